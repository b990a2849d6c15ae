"""Names of settings: the packings, and the attention patterns.

The patterns are one token buffer, read with different segments and position ids. Drawn
for the documents `a b` and `c d e` with the anchor `A` at the head of each (rows attend to the
columns marked x); the masked patterns share one mask and differ in position ids only:

    full        A a b A c d e           masked      A a b A c d e
            A   x                               A   x
            a   x x                             a   x x
            b   x x x                           b   x x x
            A   x x x x                         A         x
            c   x x x x x                       c         x x
            d   x x x x x x                     d         x x x
            e   x x x x x x x                   e         x x x x

    position ids    anchor                  0 1 2 0 3 4 5   (and anchor-masked)
                    intra-document          0 1 2 3 4 5 6   (and full)
                    intra-document-reset    0 1 2 0 1 2 3

`anchor-masked` is a control: one anchor as under `anchor`, but masked like any other token of the
first document, so that `c d e` do not see it. Its later copies are segments of their own; they only
predict the first token of their document, as the one anchor would.
"""

from difflib import get_close_matches

from megatron_anchor.errors import UserError

PACKINGS = ("concat", "best-fit")
"""Values of --packing: cut documents where samples end, or cut none that fits in a sample."""

ATTENTION_PATTERNS = (
    "anchor",
    "intra-document",
    "intra-document-reset",
    "full",
    "anchor-masked",
)

PLANNED_PATTERNS = ATTENTION_PATTERNS[:4]
"""Without the control, whose cost is that of `anchor`."""

ANCHORED = ("anchor", "anchor-masked")
"""Patterns with one anchor, at a position of its own, whose copies are not counted."""


def check_attention_pattern(pattern: str) -> str:
    """Return `pattern` if it is one of ATTENTION_PATTERNS.

    Raises:
        UserError: for any other value, with the nearest name that exists.
    """
    if pattern in ATTENTION_PATTERNS:
        return pattern
    near = get_close_matches(str(pattern), ATTENTION_PATTERNS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"unknown attention pattern {pattern!r}: {hint}"
        f"set --attention-pattern to one of {', '.join(ATTENTION_PATTERNS)}"
    )


def check_anchor(wanted: str | None) -> None:
    """Refuse what --anchor-token cannot be.

    Raises:
        UserError: it is neither bos nor eos nor a token id.
    """
    if wanted not in (None, "bos", "eos") and not wanted.isdecimal():
        raise UserError(f"--anchor-token {wanted}: expected bos, eos or a token id")


def choose_anchor(wanted: str | None, *, bos: int | None, eos: int | None) -> int | None:
    """The token id that --anchor-token means, by default the bos, else the eos; None = not there.

    Args:
        wanted: bos, eos or a token id; None = the default.
        bos: token id, None where there is none.
        eos: the same.

    Raises:
        UserError: see `check_anchor`.
    """
    check_anchor(wanted)
    if wanted is None:
        return eos if bos is None else bos
    return {"bos": bos, "eos": eos}[wanted] if wanted in ("bos", "eos") else int(wanted)
