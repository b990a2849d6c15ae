"""Gathered keys and values, alone and behind Ulysses, against one rank in float64."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_anchor.attention.backends import sdpa
from megatron_anchor.attention.context_parallel import Communication
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.context_parallel.split import assign_chunks, slots_in_chunks
from megatron_anchor.windows import Window
from tests.distributed.ranks import run_ranks

D, E = 8, 12

DOCUMENTS = [
    [[3, 13]],
    [[4, 12], [1, 1, 14]],
    [[7, 9]],
    [[1] * 16],
    [[16]],
    [[5, 27], [32], [1, 30, 1]],
]
"""Lengths of the documents of every sample of a micro-batch."""


def groups_of(ranks_of_groups):
    """The group of this rank among groups that all ranks make in one order."""
    made = [(ranks, dist.new_group(ranks)) for ranks in ranks_of_groups]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


def slots_of_this_rank(part_of_chunk, *, S, part, inner, A):
    share = slots_in_chunks(part_of_chunk, sequence_length=S)[part]
    return share.reshape(A, -1)[inner]


def attend_cases(P, A, cases):
    """Largest differences from one rank: output, dq, dk, dv, dsink of every case."""
    dist.init_process_group(backend="gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    heads_group = groups_of([list(range(b * A, b * A + A)) for b in range(P // A)])
    keys_group = groups_of([list(range(a, P, A)) for a in range(A)])
    worst = []
    for case in cases:
        worst.append(attend_case(rank, P, A, heads_group, keys_group, **case))
    dist.destroy_process_group()
    return worst


def attend_case(
    rank, P, A, heads_group, keys_group, *, documents, heads, window, sink, limit, random, dtype
):
    H, G = heads
    B, S = len(documents), sum(documents[0])
    generator = torch.Generator().manual_seed(S + H)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v, upstream = make(S, B, H, D), make(S, B, G, D), make(S, B, G, E), make(S, B, H, E)
    sink_H = make(H) if sink else None
    borders = [np.cumsum([0, *lengths]) for lengths in documents]
    part, inner = divmod(rank, A)
    chunks = [assign_chunks(b, sequence_length=S, parts=P // A) for b in borders]
    if random:
        order = np.random.default_rng(S + P)
        slots = S // (P // A)
        chunks = [order.permutation(np.repeat(np.arange(P // A), slots)) for _ in borders]
    slots_Bs = np.stack([slots_of_this_rank(c, S=S, part=part, inner=inner, A=A) for c in chunks])
    cu_seqlens = torch.full((B, S + 1), S, dtype=torch.int32)
    for row, border in zip(cu_seqlens, borders, strict=True):
        row[: len(border)] = torch.from_numpy(border)

    def run(communication, slots_Bs):
        index = torch.from_numpy(slots_Bs.T.copy())
        leaves = [x[index, torch.arange(B)].clone().requires_grad_() for x in (q, k, v, upstream)]
        *leaves, grad = leaves
        own_sink = None if sink_H is None else sink_H.clone().requires_grad_()
        packed = pack_micro_batch(
            torch.zeros(B, slots_Bs.shape[1], dtype=torch.int64),
            cu_seqlens,
            seq_length=S,
            part_of_chunk=chunks,
        )
        out = communication.attend(
            *leaves,
            kernel=sdpa.attend,
            packed=packed,
            scale=0.3,
            dropout=0.0,
            window=window,
            sink_H=own_sink,
        )
        out.backward(grad.detach())
        found = [out.detach(), *(leaf.grad for leaf in leaves)]
        return found if own_sink is None else [*found, own_sink.grad]

    communication = Communication(
        heads_group=heads_group if A > 1 else None,
        keys_group=keys_group,
        memory_limit=limit,
    )
    found = run(communication, slots_Bs)
    truth = run(Communication(), np.broadcast_to(np.arange(S), (B, S)))
    if sink_H is not None:
        dist.all_reduce(found[4])
    index = torch.from_numpy(slots_Bs.T.copy())
    wanted = [x[index, torch.arange(B)] for x in truth[:4]] + truth[4:]
    return [float((got - want).abs().max()) for got, want in zip(found, wanted, strict=True)]


def cases(dtype=torch.float64):
    settings = [
        {"heads": (4, 2), "window": None, "sink": False, "limit": 1 << 30},
        {"heads": (2, 2), "window": None, "sink": True, "limit": 1},
        {"heads": (6, 2), "window": Window(size=5), "sink": True, "limit": 1 << 14},
        {"heads": (4, 4), "window": Window(size=3, keeps_anchor=True), "sink": False, "limit": 1},
        {"heads": (4, 1), "window": None, "sink": False, "limit": 1 << 14},
    ]
    return [
        {"documents": documents, "random": random, "dtype": dtype, **setting}
        for documents, setting, random in product(DOCUMENTS, settings, (False, True))
    ]


@pytest.mark.parametrize(("P", "A"), [(2, 1), (4, 1), (4, 2)])
def test_output_and_gradients_equal_one_rank(P, A):
    every = [c for c in cases() if c["heads"][0] % A == 0]
    for worst in run_ranks(attend_cases, P, P, A, every):
        for case, differences in zip(every, worst, strict=True):
            assert max(differences) <= 1e-13, (case, differences)


def test_eight_ranks_with_two_query_heads():
    """More ranks than heads, gathered by four groups behind Ulysses in pairs."""
    every = [
        {
            "documents": [[9, 23], [32]],
            "heads": heads,
            "window": None,
            "sink": False,
            "limit": 1 << 14,
            "random": False,
            "dtype": torch.float64,
        }
        for heads in ((2, 1), (2, 2))
    ]
    for worst in run_ranks(attend_cases, 8, 8, 2, every):
        assert max(map(max, worst)) <= 1e-13, worst


def test_float32_stays_within_its_rounding():
    every = cases(torch.float32)[:10]
    for worst in run_ranks(attend_cases, 4, 4, 1, every):
        assert max(map(max, worst)) <= 1e-5, worst
