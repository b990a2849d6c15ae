"""The weight of every token as a target: `PREFIX.weights.bin` beside a corpus.

The file holds one number a token of the `.bin`, in the same order: how much the loss of predicting
that token counts. It is never shifted; packing finds the slot that predicts a token. With 0 and 1
these are the answers of a conversation, with other numbers anything. Only ratios matter, since the
loss is divided by the sum of the weights.

`PREFIX.weights.json` says what the numbers are and which corpus they belong to:

    format      "megatron_anchor weights 1"
    dtype       uint8, float16 or float32 (little endian)
    tokens      how many there are, and how many weigh more than nothing
    corpus      fingerprints of the `.bin` and `.idx` that they were made for
    weights     fingerprint of the numbers themselves
    made_from   what made them: tokenizer, chat template, fields; for people
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import fingerprint
from megatron_anchor.whole_files import atomic_write_text

WEIGHTS_FORMAT = "megatron_anchor weights 1"
WEIGHT_DTYPES = ("uint8", "float16", "float32")
LARGEST_WEIGHT = 1024.0
"""Targets are summed in integers of 31 bits; a larger weight would leave too few for the others."""

WEIGHTS_BLOCK = 1 << 22
"""Numbers looked at together."""


def weights_path(prefix: str | Path) -> Path:
    """The weights of a corpus."""
    return Path(f"{prefix}.weights.bin")


def weights_manifest_path(prefix: str | Path) -> Path:
    """What the weights of a corpus are."""
    return Path(f"{prefix}.weights.json")


@dataclass(frozen=True, kw_only=True)
class WeightsManifest:
    """The JSON beside the weights."""

    dtype: str
    tokens: int
    weighted_tokens: int
    """Tokens of a weight above 0."""
    weight_sum: float
    largest: float
    corpus: dict[str, Any]
    weights: dict[str, Any]
    made_from: dict[str, Any] = field(default_factory=dict)
    format: str = WEIGHTS_FORMAT


def describe_weights(
    prefix: str | Path,
    *,
    dtype: str,
    made_from: dict[str, Any] | None = None,
    may_be_zero: bool = False,
) -> WeightsManifest:
    """Read all weights of a finished corpus, check them, and write the JSON beside them.

    Args:
        prefix: of the corpus, whose `.bin`, `.idx` and `.weights.bin` are finished.
        dtype: of the weights, one of WEIGHT_DTYPES.
        made_from: what made them.
        may_be_zero: whether all may be 0, as in a shard that others join.

    Raises:
        UserError: a weight is negative, not finite or above LARGEST_WEIGHT, or all are 0.
    """
    path = weights_path(prefix)
    numbers = _map(path, dtype)
    weighted, total, largest = 0, 0.0, 0.0
    for first in range(0, len(numbers), WEIGHTS_BLOCK):
        block = np.asarray(numbers[first : first + WEIGHTS_BLOCK], dtype=np.float32)
        wrong = ~((block >= 0) & (block <= LARGEST_WEIGHT))
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path}: token {first + at} has the weight {block[at]}, expected 0 to "
                f"{LARGEST_WEIGHT:g}; only ratios matter, so divide all of them"
            )
        weighted += int(np.count_nonzero(block))
        total += float(block.sum(dtype=np.float64))
        largest = max(largest, float(block.max(initial=0.0)))
    if not weighted and not may_be_zero:
        raise UserError(
            f"{path}: all {len(numbers)} weights are 0, so there is nothing to learn; check what "
            "makes them (a chat template without generation tags, a field that is always 0)"
        )
    manifest = WeightsManifest(
        dtype=dtype,
        tokens=len(numbers),
        weighted_tokens=weighted,
        weight_sum=total,
        largest=largest,
        corpus=_corpus(prefix),
        weights=fingerprint(path),
        made_from=made_from or {},
    )
    with atomic_write_text(weights_manifest_path(prefix)) as stream:
        stream.write(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


@dataclass(frozen=True)
class TargetWeights:
    """The weights of an open corpus. Pickles as paths, not as contents."""

    prefix: str
    manifest: WeightsManifest

    @classmethod
    def open(cls, prefix: str | Path) -> TargetWeights | None:
        """Open the weights of a corpus; None where it has none.

        Raises:
            UserError: one of the two files is missing or damaged, or they belong to another corpus.
        """
        numbers, described = weights_path(prefix), weights_manifest_path(prefix)
        there = [path for path in (numbers, described) if path.exists()]
        if not there:
            return None
        if len(there) == 1:
            [missing] = {numbers, described} - set(there)
            raise UserError(
                f"{there[0]} is there, but {missing} is not: write the corpus again, or remove "
                f"{there[0]} to train on all tokens"
            )
        manifest = read_weights_manifest(prefix)
        _require_fitting(prefix, manifest)
        return cls(str(prefix), manifest)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes these weights these."""
        return {"dtype": self.manifest.dtype, **self.manifest.weights}

    def at(self, start: int, count: int) -> np.ndarray:
        """float32 [count]: the weights of tokens `start`, `start` + 1, ... of the `.bin`."""
        return np.asarray(self._numbers[start : start + count], dtype=np.float32)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return _map(weights_path(self.prefix), self.manifest.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "manifest": self.manifest}


def read_weights_manifest(prefix: str | Path) -> WeightsManifest:
    """The JSON beside the weights of a corpus; `UserError` where it is none."""
    path = weights_manifest_path(prefix)
    try:
        manifest = WeightsManifest(**json.loads(path.read_text(encoding="utf-8")))
        form = manifest.format
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} does not describe weights ({type(error).__name__}: {error})"
        ) from (error)
    if form != WEIGHTS_FORMAT:
        raise UserError(f"{path} has the format {form!r}, expected {WEIGHTS_FORMAT!r}")
    return manifest


def _require_fitting(prefix: str | Path, manifest: WeightsManifest) -> None:
    path, remedy = weights_path(prefix), "write the corpus again with its weights"
    if manifest.corpus != _corpus(prefix):
        raise UserError(
            f"{path} was made for another corpus: {prefix}.bin and .idx differ from those that "
            f"{weights_manifest_path(prefix)} describes; {remedy}"
        )
    if fingerprint(path) != manifest.weights:
        raise UserError(f"{path} is not what {weights_manifest_path(prefix)} describes; {remedy}")
    if len(_map(path, manifest.dtype)) != manifest.tokens:
        raise UserError(f"{path} does not hold {manifest.tokens} weights; {remedy}")


def _corpus(prefix: str | Path) -> dict[str, Any]:
    return {kind: fingerprint(f"{prefix}.{kind}") for kind in ("bin", "idx")}


def _map(path: Path, dtype: str) -> np.ndarray:
    if dtype not in WEIGHT_DTYPES:
        raise UserError(f"{path}: weights of type {dtype}, expected {', '.join(WEIGHT_DTYPES)}")
    kind = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"{path} holds {size} bytes, which is no whole number of {dtype} weights")
    if not size:
        return np.empty(0, dtype=kind)  # an empty file cannot be mapped
    return np.memmap(path, mode="r", dtype=kind)
