"""Negative log-likelihood by position.

Memory is flat: a text goes through the model in blocks with a key-value cache, and logits exist for
one block only.

Legend: S tokens of a window, N tokens of a block, V vocabulary.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.generation import not_finite
from megatron_anchor.evaluation.haystack import digest_of
from megatron_anchor.evaluation.tokens import PromptTokenizer

BLOCK = 512
"""Tokens that have logits at a time."""


@dataclass(frozen=True)
class Text:
    """A text to predict."""

    path: str
    content: str

    @property
    def digest(self) -> str:
        """Tells it from others."""
        return digest_of(self.content)


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text, predicted with nothing before them but the first token."""

    text: str
    number: int
    ids: list[int]


def read_texts(patterns: Sequence[str]) -> list[Text]:
    """Read text files, named or by patterns such as ``texts/*.txt``.

    Raises:
        UserError: if none is found, or one is unreadable or empty.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        named = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [path for path in named if Path(path).is_file()]
        if not files:
            raise UserError(f"--text {pattern}: no such file")
        paths.update(dict.fromkeys(files))
    texts: dict[str, Text] = {}  # by content: a copy under another name would count twice
    for path in paths:
        try:
            content = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {path}: {error}") from error
        if not content.strip():
            raise UserError(f"--text {path} is empty")
        texts.setdefault(content, Text(path, content))
    return list(texts.values())


def windows(
    texts: Sequence[Text], tokenizer: PromptTokenizer, *, length: int, most: int
) -> Iterator[Window]:
    """Cut texts into windows: the first of every text, then the second of every text, and so on.

    Args:
        texts: to predict.
        tokenizer: of the model.
        length: tokens of a window, the first token included; the last of a text may be shorter.
        most: windows in all.

    Raises:
        UserError: for a length or a text with nothing to predict.
    """
    room = length - len(tokenizer.first)
    if texts and room < 1:
        raise UserError(
            f"--seq-lengths {length}: no room for text behind the first tokens {tokenizer.first}"
        )
    encoded = [(text, tokenizer.encode_text(text.content)) for text in texts]
    for text, ids in encoded:
        if len(tokenizer.first) + len(ids) < 2:
            raise UserError(
                f"--text {text.path} has {len(ids)} token(s) and none before them: there is "
                "nothing to predict; give a longer text"
            )
    made, number = 0, 0
    while any(len(ids) > number * room for _, ids in encoded):
        for text, ids in encoded:
            part = [*tokenizer.first, *ids[number * room : (number + 1) * room]]
            if len(part) < 2 or len(ids) <= number * room:
                continue
            if made == most:
                return
            yield Window(text.digest, number, part)
            made += 1
        number += 1


def token_losses(model: Any, ids: Sequence[int], *, block: int = BLOCK) -> np.ndarray:
    """Give the negative log-likelihood of each token but the first, in nats.

    Args:
        model: causal language model.
        ids: [S] tokens.
        block: tokens that go through the model at a time.

    Returns:
        float64 [S - 1], of the tokens at positions 1 to S - 1.
    """
    import torch
    from transformers import DynamicCache

    tokens_S = torch.tensor(ids, device=model.device)
    cache = DynamicCache(config=model.config)
    # transformers 5 renamed the argument; 4.57 knows the old name only.
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    losses = []
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, block):
            inputs_N = tokens_S[start : min(start + block, len(ids) - 1)]
            output = model(input_ids=inputs_N[None], use_cache=True, **{name: cache})
            targets_N = tokens_S[start + 1 : start + 1 + len(inputs_N)]
            logits_NV = output.logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none"))
    found = torch.cat(losses).double().cpu().numpy()
    if not np.isfinite(found).all():
        place = int(np.flatnonzero(~np.isfinite(found))[0]) + 1
        raise UserError(not_finite(f"at token {place} of a text"))
    return found


def bucket_sums(losses: np.ndarray) -> tuple[list[float], list[int]]:
    """Sum losses by powers of two of the position: 1, 2-3, 4-7, 8-15, ...

    Args:
        losses: [S - 1], of positions 1 to S - 1.

    Returns:
        Sums in nats, and numbers of tokens.
    """
    buckets = np.floor(np.log2(np.arange(1, len(losses) + 1))).astype(int)
    return np.bincount(buckets, losses).tolist(), np.bincount(buckets).tolist()
