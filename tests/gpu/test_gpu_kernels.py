"""Every kernel that this machine has, against the float64 oracle, by the error-floor rule.

Truth is dense attention in float64; the floor is the same maths without a kernel in the kernel's
dtype. A kernel stays within twice the floor forward and three times in its gradients.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_anchor.attention.backends import (
    BACKENDS,
    AttentionRequest,
    Layer,
    bind_backend,
    load_backend,
    this_hardware,
)
from megatron_anchor.attention.packed import pack_micro_batch
from tests.oracle import gradients

LENGTHS = {
    "odd": [37, 5, 90, 1, 123, 64, 200],
    "one document": [1024],
    "one token each": [1] * 300,
    "2000 documents": [1 + (7 * number) % 5 for number in range(2000)],
    "empty tail": [500, 140],
}
"""`empty tail`: cu_seqlens is padded at its end by repetition, as it comes from the dataset."""


def packed_documents(lengths, *, tail=0):
    cu_seqlens = torch.tensor([[0, *lengths]]).cumsum(1).to(torch.int32).cuda()
    cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[:, -1:].expand(-1, tail)), 1)
    T = sum(lengths)
    return pack_micro_batch(torch.arange(T).cuda()[None], cu_seqlens, seq_length=T)


def dense_by_document(lengths, scale):
    """The oracle's maths, document by document: 2000 of them would need a huge mask."""

    def attend(q, k, v):
        copies = q.shape[1] // k.shape[1]
        outputs = []
        for qd, kd, vd in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            kd, vd = kd.repeat_interleave(copies, 1), vd.repeat_interleave(copies, 1)
            logits = torch.einsum("qhd,khd->hqk", qd, kd) * scale
            later = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            weights = logits.masked_fill(later, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, vd))
        return torch.cat(outputs)

    return attend


def kernel(name, *, heads, kv_heads, head_dim, dtype, scale):
    """Bind a backend, or skip with its own reason."""
    request = AttentionRequest(
        head_dim=head_dim,
        dtype=dtype,
        query_heads=heads,
        kv_heads=kv_heads,
        hardware=this_hardware(),
    )
    reason = load_backend(name).why_not(request)
    if reason:
        pytest.skip(f"{name}: {reason}")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=head_dim,
        attention_dropout=0.0,
        params_dtype=dtype,
    )
    groups = SimpleNamespace(tp=None, cp=None)
    return bind_backend(
        name, Layer(config=config, layer_number=1, scale=scale, pg_collection=groups)
    )


def judge(name, ours, floor, truth, dtype):
    largest = max(x.abs().max() for x in (truth[0], *truth[1]))
    ulp = 2 * torch.finfo(dtype).eps * largest
    pairs = [(2, "output", ours[0], floor[0], truth[0])]
    pairs += [
        (3, which, *triple)
        for which, *triple in zip(("dq", "dk", "dv"), ours[1], floor[1], truth[1], strict=True)
    ]
    for factor, which, got, base, true in pairs:
        assert got.isfinite().all(), f"{name}: {which} is not finite"
        error, allowed = (got - true).abs().max(), (base - true).abs().max()
        assert error <= factor * allowed + ulp, f"{name}: {which} off by {error}, floor {allowed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("documents", LENGTHS)
@pytest.mark.parametrize("name", BACKENDS)
def test_kernel_stays_at_the_error_floor(name, documents, heads, head_dim, dtype):
    lengths, scale = LENGTHS[documents], head_dim**-0.5
    attend = kernel(
        name, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype, scale=scale
    )
    packed = packed_documents(lengths, tail=5 if documents == "empty tail" else 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(sum(lengths), n, head_dim, generator=generator).to(dtype).cuda()
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    dense = dense_by_document(lengths, scale)
    truth = gradients(dense, [x.double() for x in (q, k, v)], upstream.double())
    floor = gradients(dense, [q, k, v], upstream)
    ours = gradients(
        lambda *x: attend(*x, runs=packed.runs(), scale=scale, dropout=0.0), [q, k, v], upstream
    )
    judge(name, ours, floor, truth, dtype)


@pytest.mark.parametrize("name", BACKENDS)
def test_documents_do_not_see_each_other(name):
    """Changing the first document leaves the others' outputs as they are, bit for bit."""
    attend = kernel(name, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, scale=128**-0.5)
    packed = packed_documents([130, 70, 200])
    q, k, v = (torch.randn(400, n, 128, device="cuda").bfloat16() for n in (4, 2, 2))
    before = attend(q, k, v, runs=packed.runs(), scale=128**-0.5, dropout=0.0)
    for x in (q, k, v):
        x[:130] = torch.randn_like(x[:130])
    after = attend(q, k, v, runs=packed.runs(), scale=128**-0.5, dropout=0.0)
    assert torch.equal(before[130:], after[130:])
    assert not torch.equal(before[:130], after[:130])
