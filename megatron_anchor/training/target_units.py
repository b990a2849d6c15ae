"""The integers in which Megatron counts targets, where targets have weights.

Megatron divides a loss by a sum of 32-bit integers, over micro-batches and ranks. A sum of weights
is therefore given in units of 1 / 2^k, and the loss in the same ones, which cancel. k is the
largest for which the targets of a global batch cannot overflow: rounding is then below 1e-6 of the
sum for global batches of up to a million tokens, and grows with their size. Without weights k is 0.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from megatron_anchor.packing.blend import corpora_of

_MOST = 2.0**20
_LIMIT = 2.0**31 - 1

_chosen: list[float] = []
"""Of this process' run; empty where nothing is weighed."""


def choose(args: Namespace, *datasets: Any) -> None:
    """Set the units of a run from all that it trains and evaluates on; the same on every rank.

    Args:
        args: Megatron's namespace.
        datasets: packed datasets, blends and lists of them, or None.
    """
    _chosen.clear()
    largest = [_largest(corpus) for corpus in corpora_of(list(datasets))]
    if all(weight is None for weight in largest):
        return
    most = max(weight or 1.0 for weight in largest) * args.global_batch_size * args.seq_length
    _chosen.append(min(_MOST, 2.0 ** math.floor(math.log2(_LIMIT / most))))


def chosen() -> float:
    """Units of a weight of 1: a power of two, 1 without weights."""
    return _chosen[0] if _chosen else 1.0


def weighed() -> bool:
    """Whether targets have weights."""
    return bool(_chosen)


def _largest(corpus: Any) -> float | None:
    """The largest weight of a target; None where all are 1."""
    if corpus.target_weights is None and corpus.weighting == "uniform":
        return None
    largest = 1.0 if corpus.target_weights is None else corpus.target_weights.manifest.largest
    if corpus.context_weights is not None:
        largest *= float(corpus.context_weights.weights.max())
    return largest
