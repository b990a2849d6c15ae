"""What gathered keys and values cost: memory within the bound, elements sent, no waiting."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from megatron_anchor.attention import gather
from megatron_anchor.attention.backends import sdpa
from megatron_anchor.attention.context_parallel import Communication
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.context_parallel.split import split_sample
from megatron_anchor.training import batch as batches
from megatron_anchor.training.context_parallel import ContextParallel
from tests.distributed.ranks import run_ranks

MIB = 1 << 20
M_MMAP_THRESHOLD = -3


class Group:
    """The first of `ranks` ranks, all of which hold what this one holds."""

    def __init__(self, ranks):
        self.ranks, self.sent = ranks, 0

    def size(self):
        return self.ranks

    def rank(self):
        return 0

    def all_gather_into_tensor(self, out, x, group):
        out.view(self.ranks, -1).copy_(x.reshape(-1))
        self.sent += (self.ranks - 1) * x.numel()

    def reduce_scatter_tensor(self, out, x, group):
        assert x.dtype == torch.promote_types(x.dtype, torch.float32), "summed in float32"
        torch.sum(x.view(self.ranks, -1), 0, out=out.view(-1))
        self.sent += x.numel() // self.ranks * (self.ranks - 1)


@pytest.fixture
def fake(monkeypatch):
    def make(ranks):
        group = Group(ranks)
        functions = ("all_gather_into_tensor", "reduce_scatter_tensor")
        replaced = SimpleNamespace(**{name: getattr(group, name) for name in functions})
        monkeypatch.setattr(gather, "dist", replaced)
        return group

    return make


def micro_batch(S, parts, lengths):
    borders = np.cumsum([0, *lengths])
    chunks = split_sample(borders, sequence_length=S, parts=parts)["part_of_chunk"]
    return pack_micro_batch(
        torch.zeros(1, S // parts, dtype=torch.int64),
        torch.from_numpy(borders)[None].int(),
        seq_length=S,
        part_of_chunk=[chunks[chunks >= 0]],
    )


@pytest.mark.parametrize("limit", [1, 1 << 30])
@pytest.mark.parametrize("ranks", [2, 4])
def test_elements_sent_are_those_of_the_formula(fake, ranks, limit):
    """(N - 1) s 2 G D forward, and twice as many backward: gathered again, and summed."""
    S, H, G, D = 64, 4, 2, 8
    group, s = fake(ranks), S // ranks
    q, k, v = (torch.randn(s, 1, heads, D).requires_grad_() for heads in (H, G, G))
    packed = micro_batch(S, ranks, [40, 24])
    communication = Communication(keys_group=group, memory_limit=limit)
    out = communication.attend(q, k, v, kernel=sdpa.attend, packed=packed, scale=1.0, dropout=0.0)
    forward = (ranks - 1) * s * 2 * G * D
    assert group.sent == forward
    out.sum().backward()
    assert group.sent == 3 * forward


class FlashLike(torch.autograd.Function):
    """Saves what flash kernels save, and computes something cheap of the right shapes."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype).fill_(1)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _ = ctx.saved_tensors
        assert k.untyped_storage().size() == k.numel() * k.element_size(), "filled again"
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)


def flash_like(q, k, v, *, runs, scale, dropout, sink_H):
    return FlashLike.apply(q, k, v)


def memory_of_a_layer(limit, lengths, S, parts):
    """Bytes at the peak beyond what there is before, and the part of them that is the result."""
    # Blocks of a MiB and more are given back to the system at once, so that its figures are ours.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    group, heads, D = Group(parts), 8, 64
    gather.dist = SimpleNamespace(
        all_gather_into_tensor=group.all_gather_into_tensor,
        reduce_scatter_tensor=group.reduce_scatter_tensor,
    )
    q, k, v = (torch.ones(S // parts, 1, heads, D).bfloat16().requires_grad_() for _ in range(3))
    packed = micro_batch(S, parts, lengths)
    packed.gather_plan(0)
    communication = Communication(keys_group=group, memory_limit=limit)
    reset_peak()
    before = memory("VmRSS")
    out = communication.attend(q, k, v, kernel=flash_like, packed=packed, scale=1.0, dropout=0.0)
    forward = memory("VmRSS") - before
    out.backward(out.detach())
    result = sum(x.numel() * x.element_size() for x in (out, q.grad, k.grad, v.grad))
    return memory("VmHWM") - before, forward, result


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


@pytest.mark.parametrize("lengths", [[131072], [65536] + [1024] * 64], ids=["one", "many"])
def test_a_layer_takes_no_more_than_the_limit(lengths):
    """At 131072 slots on 8 ranks, where 8 heads at once would be 256 MiB and their sums 512."""
    S, limit = 131072, 256 * MIB
    [(peak, kept, result)] = run_ranks(memory_of_a_layer, 1, limit, lengths, S, 8)
    [(unbounded, _, _)] = run_ranks(memory_of_a_layer, 1, 1 << 40, lengths, S, 8)
    assert peak - result <= 1.1 * limit
    assert unbounded - result > 2 * limit, "the limit is what keeps it low"
    assert kept <= 3 * result, "nothing gathered lives from forward to backward"


WAITING = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "masked_select", "unique", "argwhere", "bincount", "__array__"),
}


class Waits(TorchFunctionMode):
    """Notes every call that would make the host wait for tensors which came from `move`."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        marked = any(getattr(x, "on_device", False) for x in given)
        name = function.__name__
        if marked and (
            name in WAITING
            or (name in ("__getitem__", "__setitem__") and self._by_mask(args[1]))
            or (name == "repeat_interleave" and self._by_tensor(args, kwargs or {}))
        ):
            self.waits.append(resolve_name(function) or name)
        result = function(*args, **(kwargs or {}))
        if marked:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    x.on_device = True
        return result

    def _by_tensor(self, args, kwargs):
        return isinstance(args[1], torch.Tensor) and kwargs.get("output_size") is None

    def _by_mask(self, index):
        masks = [x for x in tree_leaves(index) if isinstance(x, torch.Tensor)]
        return any(x.dtype == torch.bool for x in masks)


@pytest.mark.parametrize(
    "found",
    [
        ContextParallel(kind="ulysses"),
        ContextParallel(kind="gather", keys_ranks=2),
    ],
    ids=["one rank", "gather"],
)
def test_the_host_never_waits_for_the_device(found, fake, monkeypatch):
    """From the data loader's batch to the gradient of an attention layer."""
    S, H, G, D = 64, 4, 2, 16
    split = found.split

    def move(tensor, device):
        copied = tensor.clone()
        copied.on_device = True
        return copied

    for module in (batches, __import__("megatron_anchor.attention.runs", fromlist=["runs"])):
        monkeypatch.setattr(module, "move", move)
    borders = np.array([0, 40, 50, 64, 64], dtype=np.int32)
    sample = {
        name: torch.zeros(1, S, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")
    } | {
        "loss_mask": torch.ones(1, S),
        "cu_seqlens": torch.from_numpy(borders)[None],
        **{name: torch.tensor([3]) for name in batches.FIGURES},
    }
    if split.gathers:
        chunks = split_sample(borders, sequence_length=S, parts=split.parts)["part_of_chunk"]
        sample["part_of_chunk"] = torch.from_numpy(chunks)[None]
    communication = Communication(keys_group=fake(2) if split.gathers else None)
    with Waits() as mode:
        batch = batches.get_batch(iter([sample]), split=split, rank=0, device=torch.device("cpu"))
        q, k, v = (move(torch.randn(S // split.cp_size, 1, h, D), None) for h in (H, G, G))
        for x in (q, k, v):
            x.requires_grad_()
        cos, _ = batch.packed.rotation(RotarySettings(head_dim=D))
        assert cos.on_device
        out = communication.attend(
            q, k, v, kernel=sdpa.attend, packed=batch.packed, scale=1.0, dropout=0.0
        )
        out.sum().backward()
    assert mode.waits == []


def test_a_wait_would_be_noticed():
    x = torch.arange(3)
    x.on_device = True
    with Waits() as mode:
        x[x > 1].tolist()
    assert len(mode.waits) == 2
