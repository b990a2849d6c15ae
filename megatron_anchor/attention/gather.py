"""Context parallelism by gathered keys and values.

Every rank keeps its own queries and gathers the keys and values of all ranks; each stretch of its
queries then attends to its document's prefix. The number of ranks is not bounded by the heads, no
document is padded, and any kernel serves whose queries and keys may differ in length. This is what
Llama 3 was trained with (arXiv 2407.21783, section 3.3.2), with two additions: the queries of a
sample are dealt out so that ranks have equal work (`megatron_anchor.context_parallel.split`), and
heads are taken group by group so that the gathered keys and values stay within a bound.

Only a rank's own keys and values live from forward to backward: the storage of the gathered ones is
released after each group's forward pass, and filled again, by another gather, before its backward
pass. The kernel's saved tensors are views of that storage, so no kernel needs to know. Gradients of
keys and values are summed in float32, in a fixed order.

Cost a layer and rank, in elements sent: (N - 1) x s x 2 x G x D forward; the same again backward,
and as many in float32 for the gradients.

Legend: N parts (ranks of the group), B micro-batch, S slots of a sample, s = S / N, T = B x s
queries of this rank, A = N x T gathered slots, K keys of all runs (prefixes are copied), H query
heads, G key/value heads, D and E head dims of keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_anchor.attention.runs import Runs, to_device
from megatron_anchor.context_parallel.sizes import Memory
from megatron_anchor.context_parallel.split import slots_in_chunks
from megatron_anchor.windows import Window


class RunBatch(NamedTuple):
    """Some consecutive runs, which one kernel call takes."""

    runs: Runs
    queries: slice
    """Their queries among the T."""
    keys: slice
    """Their keys among the K."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GatherPlan:
    """Which gathered keys the runs of a part attend to."""

    runs: Runs
    key_index: Tensor
    """int64 [K]: row of the gathered buffer [A] for every key of every run."""
    continues: np.ndarray
    """bool [R]: whether a run's document is that of the run before it, with keys in common."""
    sample_slots: int
    """S, which bounds the keys of a run."""

    def batches(self, most_keys: int) -> list[RunBatch]:
        """Cut the runs into batches of at most so many keys, or of a single run."""
        made: list[RunBatch] = self.runs.cached(
            ("batches", most_keys), lambda: list(self._batches(most_keys))
        )
        return made

    def _batches(self, most_keys: int) -> Iterator[RunBatch]:
        runs, first = self.runs, 0
        q_ends, k_ends = np.cumsum(runs.q_lengths), np.cumsum(runs.k_lengths)
        while first < len(k_ends):
            q_before, k_before = (int(e[first - 1]) if first else 0 for e in (q_ends, k_ends))
            last = max(first + 1, int(np.searchsorted(k_ends, k_before + most_keys, "right")))
            part = slice(first, last)
            yield RunBatch(
                runs=Runs(
                    q_lengths=runs.q_lengths[part],
                    k_lengths=runs.k_lengths[part],
                    q_begins=runs.q_begins[part],
                    device=runs.device,
                    window=runs.window,
                ),
                queries=slice(q_before, int(q_ends[last - 1])),
                keys=slice(k_before, int(k_ends[last - 1])),
            )
            first = last

    def stretches(self, keys: slice) -> list[slice]:
        """Cut a batch's keys where rows of the buffer may repeat."""
        ends = np.cumsum(self.runs.k_lengths)
        starts = (ends - self.runs.k_lengths)[self.continues]
        inside = starts[(starts > keys.start) & (starts < keys.stop)].tolist()
        edges = [keys.start, *inside, keys.stop]
        return [slice(*pair) for pair in itertools.pairwise(edges)]


def plan_gather(
    borders: Sequence[np.ndarray],
    part_of_chunk: Sequence[np.ndarray],
    *,
    part: int,
    window: Window | None,
    device: torch.device,
) -> GatherPlan:
    """Find the runs of a part, sample after sample, and the rows of their keys.

    Args:
        borders: for each of the B samples the cumulative document lengths, from 0 to S, ascending.
        part_of_chunk: for each sample the part that holds each chunk.
        part: the one to plan for.
        window: of the layer; None = a query sees all of its document before it.
        device: where attention runs.
    """
    S = int(borders[0][-1])
    rows_BS, begins, tables = [], [], []
    for number, (sample, chunks) in enumerate(zip(borders, part_of_chunk, strict=True)):
        slots_Ns = slots_in_chunks(chunks, sequence_length=S)
        parts, s = slots_Ns.shape
        row_S = np.empty(S, dtype=np.int64)
        places = np.arange(parts)[:, None] * (len(borders) * s) + number * s + np.arange(s)
        row_S[slots_Ns.ravel()] = places.ravel()
        rows_BS.append(row_S)
        table = _runs_of_slots(slots_Ns[part], sample)
        tables.append(table)
        begins.append(table.document_begins + number * S)
    q_lengths, q_begins = (
        np.concatenate([table[column] for table in tables]) for column in range(2)
    )
    document_begins = np.concatenate(begins)
    k_lengths = _keys_of_runs(q_lengths, q_begins, window)
    runs = Runs(
        q_lengths=q_lengths, k_lengths=k_lengths, q_begins=q_begins, device=device, window=window
    )
    slot_K = runs.k_places().long() + _repeat(document_begins, k_lengths, device)
    row_A = to_device(np.concatenate(rows_BS), device)
    return GatherPlan(
        runs=runs,
        key_index=row_A[slot_K],
        continues=np.diff(document_begins, prepend=-1) == 0,
        sample_slots=S,
    )


class _RunTable(NamedTuple):
    """int64 [R] each."""

    q_lengths: np.ndarray
    q_begins: np.ndarray
    """Place of the first query in its document."""
    document_begins: np.ndarray
    """Slot where the document begins."""


def _runs_of_slots(slots: np.ndarray, borders: np.ndarray) -> _RunTable:
    """Cut ascending slots where they leave a gap or enter another document."""
    document = np.searchsorted(borders, slots, side="right") - 1
    starts = np.flatnonzero((np.diff(slots) != 1) | (np.diff(document) != 0)) + 1
    starts = np.concatenate(([0], starts))
    document_begins = borders[document[starts]]
    return _RunTable(
        np.diff(np.append(starts, len(slots))), slots[starts] - document_begins, document_begins
    )


def _keys_of_runs(q_lengths: np.ndarray, q_begins: np.ndarray, window: Window | None) -> np.ndarray:
    """int64 [R]: keys of each run, from the window's start (and the anchor, if it is kept) on."""
    whole = q_begins + q_lengths
    if window is None:
        return whole
    return np.minimum(whole, q_lengths + window.size - 1 + window.keeps_anchor)


def _repeat(values: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.repeat_interleave(
        to_device(values, device), to_device(lengths, device), output_size=int(lengths.sum())
    )


class _Call(NamedTuple):
    """Everything of a gathered attention but its tensors."""

    attend: Callable[..., Tensor]
    plan: GatherPlan
    group: dist.ProcessGroup
    scale: float
    dropout: float
    heads: int
    """Key/value heads at once."""
    most_keys: int
    keep_graph: bool


def attend_gathered(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    *,
    attend: Callable[..., Tensor],
    plan: GatherPlan,
    group: dist.ProcessGroup,
    scale: float,
    dropout: float,
    memory_limit: int,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Gather keys and values and attend with this rank's queries.

    Args:
        q_THD: [T, H, D] rotated queries of this rank's slots, sample after sample.
        k_TGD: [T, G, D] rotated keys of the same slots; G divides H.
        v_TGE: [T, G, E] values.
        attend: a kernel (`megatron_anchor.attention.backends.Attend`).
        plan: of this rank.
        group: ranks over which the samples' slots are spread.
        scale: factor of the logits.
        dropout: probability of dropping an attention weight.
        memory_limit: bytes that gathered keys and values may take beside the inputs, unless a
            single head needs more (`sizes.Memory.least`).
        sink_H: [H] logits of the heads' sinks, None without.

    Returns:
        [T, H, E] in the dtype of ``q_THD``.
    """
    memory = Memory(
        slots=group.size() * len(q_THD),
        longest=plan.sample_slots,
        width=k_TGD.shape[-1] + v_TGE.shape[-1],
        itemsize=k_TGD.element_size(),
    )
    heads = memory.heads(k_TGD.shape[1], memory_limit)
    tensors = [x for x in (q_THD, k_TGD, v_TGE, sink_H) if x is not None]
    call = _Call(
        attend=attend,
        plan=plan,
        group=group,
        scale=scale,
        dropout=dropout,
        heads=heads,
        most_keys=memory.keys(heads, memory_limit),
        keep_graph=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )
    out: Tensor = _GatheredAttention.apply(q_THD, k_TGD, v_TGE, sink_H, call)
    return out


class _Step(NamedTuple):
    """The kernel call of one batch of runs, with its graph; the storage of k and v is released."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    batch: RunBatch


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: _Call
    ) -> Tensor:
        copies = q.shape[1] // k.shape[1]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        ctx.steps = []
        for first in range(0, k.shape[1], call.heads):
            kv_heads = slice(first, first + call.heads)
            heads = slice(first * copies, (first + call.heads) * copies)
            steps = _attend_heads(out, q, k[:, kv_heads], v[:, kv_heads], sink, heads, call)
            if call.keep_graph:
                ctx.steps.append((kv_heads, heads, steps))
        ctx.save_for_backward(k, v)
        ctx.call, ctx.sink = call, None if sink is None else (sink.shape, sink.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        k, v = ctx.saved_tensors
        call: _Call = ctx.call
        dq = dout.new_empty(*dout.shape[:2], k.shape[-1])
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dsink = None
        if ctx.sink is not None:
            dsink = torch.zeros(ctx.sink[0], dtype=ctx.sink[1], device=dout.device)
        while ctx.steps:
            kv_heads, heads, steps = ctx.steps.pop()
            buffers = [_gather(x[:, kv_heads], call.group) for x in (k, v)]
            sums = [_zeros_for_sums(x) for x in buffers]
            while steps:
                step: _Step = steps.pop()
                found = _gradients(step, buffers, dout[step.batch.queries, heads], call.plan)
                dq[step.batch.queries, heads] = found[0]
                if dsink is not None:
                    dsink[heads] += found[3]
                for total, grad in zip(sums, found[1:3], strict=True):
                    _add_up(total, grad, step.batch, call.plan)
            del buffers
            dk[:, kv_heads], dv[:, kv_heads] = (_scatter_sum(x, call.group) for x in sums)
            del sums
        return dq, dk, dv, dsink, None


def _attend_heads(
    out: Tensor,
    q: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    sink: Tensor | None,
    heads: slice,
    call: _Call,
) -> list[_Step]:
    """Attend with some heads and write their output; nothing gathered is left behind."""
    buffers = [_gather(x, call.group) for x in (k_TGD, v_TGE)]
    steps = []
    for batch in call.plan.batches(call.most_keys):
        step = _attend_batch(q, sink, buffers, heads, batch, call)
        out[batch.queries, heads] = step.out.detach()
        for copied in (step.k, step.v):
            copied.untyped_storage().resize_(0)
        steps.append(step)
    return steps


def _attend_batch(
    q: Tensor,
    sink: Tensor | None,
    buffers: list[Tensor],
    heads: slice,
    batch: RunBatch,
    call: _Call,
) -> _Step:
    index = call.plan.key_index[batch.keys]
    with torch.set_grad_enabled(call.keep_graph):
        own_q = q[batch.queries, heads].detach()
        own_k, own_v = (buffer.index_select(0, index) for buffer in buffers)
        own_sink = None if sink is None else sink[heads].detach()
        for leaf in (own_q, own_k, own_v, own_sink):
            if leaf is not None:
                leaf.requires_grad_(call.keep_graph)
        out = call.attend(
            own_q,
            own_k,
            own_v,
            runs=batch.runs,
            scale=call.scale,
            dropout=call.dropout,
            sink_H=own_sink,
        )
    return _Step(out, own_q, own_k, own_v, own_sink, batch)


def _gradients(
    step: _Step, buffers: list[Tensor], dout: Tensor, plan: GatherPlan
) -> tuple[Tensor, ...]:
    """Fill the released keys and values again, and run the kernel's own backward pass."""
    index = plan.key_index[step.batch.keys]
    for leaf, buffer in zip((step.k, step.v), buffers, strict=True):
        leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
        # Through .data, which leaves the version alone that the graph has noted.
        torch.index_select(buffer, 0, index, out=leaf.data)
    leaves = [leaf for leaf in (step.q, step.k, step.v, step.sink) if leaf is not None]
    grads = torch.autograd.grad(step.out, leaves, dout)
    for leaf in (step.k, step.v):
        leaf.untyped_storage().resize_(0)
    return grads


def _gather(x_TGD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N x T, G, D], the slots of all ranks, rank after rank."""
    gathered = x_TGD.new_empty(group.size() * len(x_TGD), *x_TGD.shape[1:])
    dist.all_gather_into_tensor(gathered, x_TGD.contiguous(), group=group)
    return gathered


def _zeros_for_sums(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _add_up(total_AGD: Tensor, grad_KGD: Tensor, batch: RunBatch, plan: GatherPlan) -> None:
    """Add the gradients of a batch's copied keys to those of the gathered slots.

    Stretch by stretch, in which no slot repeats: the sums do not depend on the order of threads.
    """
    for stretch in plan.stretches(batch.keys):
        rows = slice(stretch.start - batch.keys.start, stretch.stop - batch.keys.start)
        total_AGD.index_add_(0, plan.key_index[stretch], grad_KGD[rows].to(total_AGD.dtype))


def _scatter_sum(total_AGD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep this rank's slots."""
    own = total_AGD.new_empty(len(total_AGD) // group.size(), *total_AGD.shape[1:])
    dist.reduce_scatter_tensor(own, total_AGD, group=group)
    return own
