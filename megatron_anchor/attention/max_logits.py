"""The largest attention logit of every head, for --log-max-attention-logit and --qk-clip.

No kernel but Transformer Engine's gives it, so it is computed beside the kernel, from the same
queries and keys: one more product of queries and keys a layer, in tiles, in float32.

Legend: T queries, K keys, H query heads, G key/value heads, C = H / G, D head dim; q and k a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_anchor.attention.runs import Runs
from megatron_anchor.windows import is_visible

TILE = 512
"""Queries and keys of a tile, which takes H MiB."""


@torch.no_grad()
def max_logits(q_THD: Tensor, k_KGD: Tensor, *, runs: Runs, scale: float) -> Tensor:
    """float32 [H], the largest scaled logit that any query has with a key that it sees.

    Args:
        q_THD: [T, H, D] rotated queries.
        k_KGD: [K, G, D] rotated keys.
        runs: which queries see which keys.
        scale: factor of the logits.
    """
    q_places, k_places = runs.q_places(), runs.k_places()
    most_H = torch.full((q_THD.shape[1],), -torch.inf, device=q_THD.device)
    q_end = k_end = 0
    for queries, keys in zip(runs.q_lengths.tolist(), runs.k_lengths.tolist(), strict=True):
        q_begin, k_begin = q_end, k_end
        q_end, k_end = q_begin + queries, k_begin + keys
        for first in range(q_begin, q_end, TILE):
            rows = slice(first, min(first + TILE, q_end))
            visible = k_end - (q_end - rows.stop)  # the last query of the tile sees no key behind
            for start in range(k_begin, visible, TILE):
                columns = slice(start, min(start + TILE, visible))
                seen_qk = is_visible(q_places[rows, None], k_places[columns], runs.window)
                tile_H = _max_of_tile(q_THD[rows], k_KGD[columns], seen_qk)
                most_H = torch.maximum(most_H, tile_H * scale)
    return most_H


def _max_of_tile(q_qHD: Tensor, k_kGD: Tensor, seen_qk: Tensor) -> Tensor:
    q_qGCD = q_qHD.float().unflatten(1, (k_kGD.shape[1], -1))
    logits_GCqk = torch.einsum("qgcd,kgd->gcqk", q_qGCD, k_kGD.float())
    return logits_GCqk.masked_fill(~seen_qk, -torch.inf).amax((2, 3)).flatten()


class WatchedKernel:
    """A kernel that tells the largest logits of what it is called with.

    Args:
        kernel: `megatron_anchor.attention.backends.Attend`.
        tell: gets float32 [H] of the heads that the kernel sees.
    """

    def __init__(self, kernel: Callable[..., Tensor], tell: Callable[[Tensor], None]) -> None:
        self._kernel, self._tell = kernel, tell

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """Attend as the kernel does."""
        self._tell(max_logits(q, k, runs=how["runs"], scale=how["scale"]))
        return self._kernel(q, k, v, **how)
