"""What `--fim-data` and its flags ask of packed datasets, and what of it is refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.packing.fill_in_the_middle import FillInTheMiddle
from megatron_anchor.packing.target_weights import POWERS

TOKENS = {"prefix": "prefix", "suffix": "suffix", "middle": "middle", "end": "eod"}
"""Field of `FillInTheMiddle` to the part of its flag's name."""


def refusals(args: Namespace) -> Iterator[str]:
    """Say which rates cannot be, and what does not go together."""
    if not args.fim_data:
        return
    for name in ("fim_rate", "fim_spm_rate"):
        value = getattr(args, name)
        if not (value is not None and 0 < value <= 1):
            yield f"--{name.replace('_', '-')} {value}: expected a share above 0, up to 1"
    if args.loss_weighting in POWERS:
        yield (
            f"--loss-weighting {args.loss_weighting} with --fim-data: documents are weighed by "
            "their length in the corpus, and --fim-data adds three tokens; leave out one of the two"
        )


def fill_in_the_middle(args: Namespace, tokenizer: Any) -> FillInTheMiddle | None:
    """How the arguments rearrange documents, None where they do not.

    Args:
        args: Megatron's namespace.
        tokenizer: Megatron's, for the ids of the tokens that the flags name.

    Raises:
        UserError: a token is not in the vocabulary, or two of them are the same.
    """
    if not args.fim_data:
        return None
    ids = {
        field: _token_id(tokenizer, f"--fim-{part}-token", getattr(args, f"fim_{part}_token"))
        for field, part in TOKENS.items()
    }
    if len(set(ids.values())) < len(ids):
        raise UserError(
            f"two of {', '.join(f'--fim-{part}-token' for part in TOKENS.values())} are the same "
            f"token (ids {', '.join(map(str, ids.values()))}); name four tokens"
        )
    return FillInTheMiddle(
        rate=args.fim_rate, suffix_first_rate=args.fim_spm_rate, seed=args.seed, **ids
    )


def _token_id(tokenizer: Any, flag: str, text: str) -> int:
    """The id of one token of the vocabulary, by its name."""
    known = getattr(tokenizer, "_tokenizer", tokenizer)
    try:
        [found] = known.tokens_to_ids([text])
    except (KeyError, ValueError):  # tiktoken's and the null tokenizer's way to know no token
        found = None
    if found is None or found == getattr(known, "unk_id", None):
        raise UserError(
            f"{flag} {text!r} is no token of this tokenizer; name one of its vocabulary, or add "
            "the token to the tokenizer (and to the model)"
        )
    if not 0 <= int(found) < tokenizer.vocab_size:
        raise UserError(
            f"{flag} {text!r} has the id {found}, outside the vocabulary of "
            f"{tokenizer.vocab_size}; name another token"
        )
    return int(found)
