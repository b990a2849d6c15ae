"""Kernels against a dense float64 oracle, judged by the error floor of their dtype."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.attention.backends import load_backend, sdpa
from megatron_anchor.attention.heads import repeat_heads
from megatron_anchor.attention.packed import pack_micro_batch
from tests.oracle import dense_attention, document_mask, gradients

odd_lengths = st.lists(
    st.one_of(st.integers(1, 3), st.integers(14, 18), st.integers(30, 70)), min_size=1, max_size=9
)


ON_CPU = ["sdpa"]
"""Backends with a backward pass on the CPU; tests/gpu has the others."""


def packed_documents(lengths):
    cu_seqlens = torch.tensor([[0, *lengths]]).cumsum(1).to(torch.int32)
    T = sum(lengths)
    return pack_micro_batch(torch.arange(T)[None], cu_seqlens, seq_length=T)


def attend(name, lengths, scale=0.3):
    backend, packed = load_backend(name), packed_documents(lengths)
    return lambda q, k, v: backend.attend(q, k, v, runs=packed.runs(), scale=scale, dropout=0.0)


def random_inputs(T, heads, kv_heads, dtype, seed, D=8):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, heads, D), (T, kv_heads, D), (T, kv_heads, D), (T, heads, D))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CPU)
@settings(deadline=None, max_examples=25)
@given(
    lengths=odd_lengths,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]),
    seed=st.integers(0, 99),
)
def test_kernel_stays_within_twice_the_error_floor(name, dtype, lengths, heads, seed):
    """Floor: the same maths in the same dtype without a kernel, against float64."""
    q, k, v, upstream = random_inputs(sum(lengths), *heads, dtype, seed)
    mask = document_mask(lengths)

    def dense(*inputs):
        return dense_attention(*inputs, mask_TT=mask, scale=0.3)

    truth = gradients(dense, [x.double() for x in (q, k, v)], upstream.double())
    floor = gradients(dense, [q, k, v], upstream)
    ours = gradients(attend(name, lengths), [q, k, v], upstream)
    # One token attends to itself alone: the floor is then 0, yet a kernel rounds once or twice.
    largest = max(x.abs().max() for x in (truth[0], *truth[1], upstream.double()))
    ulp = 2 * torch.finfo(dtype).eps * largest
    for factor, got, base, true in (
        (2, ours[0], floor[0], truth[0]),
        *((3, *triple) for triple in zip(ours[1], floor[1], truth[1], strict=True)),
    ):
        error, allowed = (got - true).abs().max(), (base - true).abs().max()
        assert error <= factor * allowed + ulp, (float(error), float(allowed))


@pytest.mark.parametrize("name", ON_CPU)
def test_leaving_out_the_mask_would_be_noticed(name):
    q, k, v, _ = random_inputs(40, 2, 2, torch.float32, seed=1)
    apart, together = attend(name, [25, 15])(q, k, v), attend(name, [40])(q, k, v)
    assert torch.allclose(apart[:25], together[:25], atol=1e-6)
    assert (apart[25:] - together[25:]).abs().max() > 0.1


def test_short_documents_share_calls_and_long_ones_do_not():
    calls = sdpa._plan(packed_documents([3, 40, 4, 1, 16, 17, 4]).runs()).calls
    assert sorted((call.queries, call.stretches) for call in calls) == [
        (1, 1),
        (12, 3),
        (16, 1),
        (17, 1),
        (40, 1),
    ]


def test_dropout_drops_in_training():
    q, k, v, _ = random_inputs(40, 2, 2, torch.float32, seed=1)
    packed = packed_documents([40])
    dropped = sdpa.attend(q, k, v, runs=packed.runs(), scale=0.3, dropout=0.5)
    assert (
        dropped - sdpa.attend(q, k, v, runs=packed.runs(), scale=0.3, dropout=0.0)
    ).abs().max() > 0.1


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_of_repeated_heads_has_the_same_bits_for_any_split_over_ranks(copies, ranks):
    if copies % ranks:
        pytest.skip("a rank needs whole copies")
    upstream = torch.randn(50, 3 * copies, 8)
    x = torch.randn(50, 3, 8)
    _, (at_once,) = gradients(lambda y: repeat_heads(y, copies=copies), [x], upstream)
    _, (in_steps,) = gradients(
        lambda y: repeat_heads(repeat_heads(y, copies=ranks), copies=copies // ranks), [x], upstream
    )
    assert torch.equal(at_once, in_steps)
    assert torch.allclose(at_once, upstream.unflatten(1, (3, copies)).sum(2), atol=1e-5)


def test_importing_the_attention_package_imports_no_kernel_library():
    code = (
        "import sys, megatron_anchor.attention.backends\n"
        "print([m for m in ('flash_attn', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
