"""Who holds what under context parallelism, and how one attention call is made of it.

    kind          a rank holds                    for attention it has
    none          the sample                      all slots, all heads
    ulysses       1/P of the slots                all slots, 1/P of the heads
    gather        1/P of the slots                its queries, all keys, all heads
    ulysses in groups of A, gather across B       the slots of its group, 1/A of the heads; its
                                                  group's queries, all keys

The last, with A x B = P, sends least: all-to-all inside a node, gathered keys and values of few
heads between nodes. Transformer Engine's own kinds communicate inside its kernel and are not here.

Legend: P context-parallel ranks, s slots of this rank, S = P x s, B micro-batch (or, next to A, the
groups across which keys and values are gathered), H query heads, G key/value heads, D and E head
dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_anchor.attention import ulysses
from megatron_anchor.attention.backends.request import (
    GATHER,
    TRANSFORMER_ENGINE,
    ULYSSES,
    ULYSSES_GATHER,
)
from megatron_anchor.attention.gather import attend_gathered
from megatron_anchor.attention.packed import AnchorPackedSeqParams
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT
from megatron_anchor.windows import Window


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The groups of one layer's attention."""

    heads_group: dist.ProcessGroup | None = None
    """Ranks that exchange slots for heads, None for none."""
    keys_group: dist.ProcessGroup | None = None
    """Ranks that gather each other's keys and values, None for none."""
    memory_limit: int = GATHER_LIMIT
    """Bytes that gathered keys and values may take (`megatron_anchor.attention.gather`)."""

    def attend(
        self,
        q_sBHD: Tensor,
        k_sBGD: Tensor,
        v_sBGE: Tensor,
        *,
        kernel: Callable[..., Tensor],
        packed: AnchorPackedSeqParams,
        scale: float,
        dropout: float,
        window: Window | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Attend over the packed documents with this rank's queries.

        Args:
            q_sBHD: [s, B, H, D] rotated queries.
            k_sBGD: [s, B, G, D] rotated keys.
            v_sBGE: [s, B, G, E] values.
            kernel: `megatron_anchor.attention.backends.Attend`.
            packed: documents of the micro-batch.
            scale: factor of the logits.
            dropout: probability of dropping an attention weight.
            window: of the layer, None for none.
            sink_H: [H] logits of the heads' sinks, None for none.

        Returns:
            [s, B, H, E] in the dtype of ``q_sBHD``.
        """
        q, k, v, sink = q_sBHD, k_sBGD, v_sBGE, sink_H
        if self.heads_group is not None:
            q, k, v = ulysses.gather_sequence(q, k, v, group=self.heads_group)
            if sink is not None:
                sink = sink.chunk(self.heads_group.size())[self.heads_group.rank()]
        B = q.shape[1]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        if self.keys_group is None:
            runs = packed.runs(window)
            out = kernel(q, k, v, runs=runs, scale=scale, dropout=dropout, sink_H=sink)
        else:
            out = attend_gathered(
                q,
                k,
                v,
                attend=kernel,
                plan=packed.gather_plan(self.keys_group.rank(), window),
                group=self.keys_group,
                scale=scale,
                dropout=dropout,
                memory_limit=self.memory_limit,
                sink_H=sink,
            )
        out = out.unflatten(0, (B, -1)).transpose(0, 1)
        if self.heads_group is not None:
            out = ulysses.scatter_sequence(out, group=self.heads_group)
        return out


def communication(kind: str, groups: Any, *, memory_limit: int) -> Communication:
    """Find the groups of a layer.

    Args:
        kind: one of `request.CONTEXT_PARALLEL`.
        groups: Megatron's ProcessGroupCollection; its ``cp`` is read, and ``hcp`` for
            `ULYSSES_GATHER`.
        memory_limit: see `Communication`.
    """
    if groups.cp.size() == 1 or kind == TRANSFORMER_ENGINE:
        return Communication()
    if kind == ULYSSES:
        return Communication(heads_group=groups.cp)
    if kind == GATHER:
        return Communication(keys_group=groups.cp, memory_limit=memory_limit)
    assert kind == ULYSSES_GATHER, kind
    heads_group, keys_group = groups.hcp
    return Communication(heads_group=heads_group, keys_group=keys_group, memory_limit=memory_limit)
