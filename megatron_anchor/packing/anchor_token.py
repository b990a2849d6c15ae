"""Which token is the anchor."""

from megatron_anchor.errors import UserError


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
