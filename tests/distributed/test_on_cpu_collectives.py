"""Every collective that Megatron uses, asked of "NCCL", against sums and slices done by hand.

P ranks. Rank r's input is `tensor_of(r, ...)`: whole numbers, so that sums are exact in every
dtype, different on every rank and in every place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank puts in: 10 * rank + 0, 1, 2, ... (modulo 7)."""
    count = torch.Size(shape).numel()
    return ((10 * rank + torch.arange(count)) % 7).reshape(shape).to(dtype)


def within_group(check: Callable[[int, int], None]) -> None:
    """Join a group as a program for GPUs does, check(rank, P), and leave it together."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    check(dist.get_rank(), dist.get_world_size())
    dist.barrier(device_ids=[torch.cuda.current_device()])
    dist.destroy_process_group()


def reductions(r: int, P: int) -> None:
    for dtype in DTYPES:
        summed = sum(tensor_of(i, 2, P, dtype=dtype) for i in range(P))
        mine = tensor_of(r, 2, P, dtype=dtype)
        dist.all_reduce(mine)
        assert torch.equal(mine, summed), dtype

        summed = sum(tensor_of(i, P, 3, dtype=dtype) for i in range(P))
        piece = torch.empty(1, 3, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(piece, tensor_of(r, P, 3, dtype=dtype))
        assert torch.equal(piece[0], summed[r]), dtype

    largest = tensor_of(r, 5)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert torch.equal(largest, torch.stack([tensor_of(i, 5) for i in range(P)]).amax(0))
    mean = tensor_of(r, 5)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, sum(tensor_of(i, 5) for i in range(P)) / P)


def gathers(r: int, P: int) -> None:
    for dtype in DTYPES:
        whole = torch.empty(2 * P, 3, dtype=dtype, device=torch.cuda.current_device())
        work = dist.all_gather_into_tensor(whole, tensor_of(r, 2, 3, dtype=dtype), async_op=True)
        work.wait()
        assert torch.equal(whole, torch.cat([tensor_of(i, 2, 3, dtype=dtype) for i in range(P)]))

        for async_op in (False, True):
            shapes = [(i, 2) if i % 2 else (2, i, 1) for i in range(P)]  # unequal, one empty
            pieces = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
            work = dist.all_gather(pieces, tensor_of(r, *shapes[r], dtype=dtype), async_op=async_op)
            if async_op:
                work.wait()
            for i, piece in enumerate(pieces):
                assert torch.equal(piece, tensor_of(i, *shapes[i], dtype=dtype))

    objects: list[Any] = [None] * P
    dist.all_gather_object(objects, {"rank": r})
    assert objects == [{"rank": i} for i in range(P)]


def exchanges(r: int, P: int) -> None:
    for dtype in DTYPES:
        received = torch.empty(P, 2, dtype=dtype, device="cuda")
        dist.all_to_all_single(received, tensor_of(r, P, 2, dtype=dtype))
        expected = torch.stack([tensor_of(i, P, 2, dtype=dtype)[r] for i in range(P)])
        assert torch.equal(received, expected)

    def rows(sender: int, receiver: int) -> int:
        return (sender + 2 * receiver) % 3  # some are 0

    inputs = [[rows(i, j) for j in range(P)] for i in range(P)]
    outputs = [rows(i, r) for i in range(P)]
    received = torch.empty(sum(outputs), 2, device="cuda")
    dist.all_to_all_single(received, tensor_of(r, sum(inputs[r]), 2), outputs, inputs[r])
    sent = [tensor_of(i, sum(inputs[i]), 2).split(inputs[i])[r] for i in range(P)]
    assert torch.equal(received, torch.cat(sent))

    lists = [torch.empty(2, device="cuda") for _ in range(P)]
    dist.all_to_all(lists, list(tensor_of(r, P, 2)))
    assert torch.equal(torch.stack(lists), torch.stack([tensor_of(i, P, 2)[r] for i in range(P)]))

    got = torch.empty(3, dtype=torch.bfloat16, device="cuda")
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor_of(r, 3, dtype=torch.bfloat16), (r + 1) % P),
            dist.P2POp(dist.irecv, got, (r - 1) % P),
        ]
    )
    for request in requests:
        request.wait()
    assert torch.equal(got, tensor_of((r - 1) % P, 3, dtype=torch.bfloat16))


def coalesced(r: int, P: int) -> None:
    for async_op in (False, True):
        pieces = [torch.empty(2, device="cuda") for _ in range(3)]
        with dist._coalescing_manager(async_ops=async_op) as work:
            for k, piece in enumerate(pieces):
                dist.reduce_scatter_tensor(piece, k + tensor_of(r, 2 * P), async_op=async_op)
        if async_op:
            work.wait()
        summed = sum(tensor_of(i, P, 2) for i in range(P))
        for k, piece in enumerate(pieces):
            assert torch.equal(piece, k * P + summed[r])

        wholes = [torch.empty(2 * P, device="cuda") for _ in range(3)]
        with dist._coalescing_manager(async_ops=async_op) as work:
            for k, whole in enumerate(wholes):
                dist.all_gather_into_tensor(whole, k + tensor_of(r, 2), async_op=async_op)
        if async_op:
            work.wait()
        for k, whole in enumerate(wholes):
            assert torch.equal(whole, k + torch.cat([tensor_of(i, 2) for i in range(P)]))


def groups(r: int, P: int) -> None:
    ranks = [[i for i in range(P) if i % 2 == 0], [i for i in range(P) if i % 2 == 1]]
    mine, _ = dist.new_subgroups_by_enumeration(ranks, backend="nccl")
    assert dist.get_backend(mine) == "gloo"
    count = torch.ones(1, device="cuda")
    dist.all_reduce(count, group=mine)
    assert count.item() == len(ranks[r % 2])
    others = dist.new_group(ranks[1], backend="cpu:gloo,cuda:nccl", device_id=None)
    if r % 2:
        assert dist.get_world_size(others) == len(ranks[1])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("collective", [reductions, gathers, exchanges, coalesced, groups])
def test_collectives_give_what_nccl_would(collective: Any, ranks: int) -> None:
    run_ranks(within_group, ranks, collective, timeout=120)
