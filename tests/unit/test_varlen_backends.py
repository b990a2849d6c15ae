"""torch's varlen_attn and flash-attn's functions: what we hand over, run on plain operations.

torch's own Python code runs here, with a CPU version of the operator below it; flash-attn's
generations are stood in for by functions of their signatures.
"""

import inspect
import sys
from types import ModuleType

import pytest
import torch

from megatron_anchor.attention.backends import flash, sdpa, varlen
from megatron_anchor.attention.packed import pack_micro_batch
from tests.oracle import gradients
from tests.varlen_reference import attend_documents, attend_documents_backward

LENGTHS = [37, 5, 90, 1, 123]
SCALE = 0.3


@pytest.fixture(scope="module", autouse=True)
def cpu_flash_operator():
    """A CPU version of the operator that `varlen_attn` calls; torch has a CUDA one only."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **settings):
        assert (settings["window_size_left"], settings["window_size_right"]) == (-1, 0)
        assert (dropout, max_q, max_k) == (0.0, max(LENGTHS), max(LENGTHS))
        assert cu_q.dtype == cu_k.dtype == torch.int32
        out, lse = attend_documents(q, k, v, cu_q, cu_k, scale=settings["scale"], causal=causal)
        empty = torch.empty(0)
        return out, lse.t().contiguous(), empty, empty, empty

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *rest, **kw):
        inputs = (q, k, v, cu_q, cu_k)
        return attend_documents_backward(
            grad, out, lse.t(), inputs, scale=kw["scale"], causal=causal
        )

    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    yield
    library._destroy()


def both(function, heads, dtype=torch.float32):
    """Output and gradients of a kernel and of sdpa on the same inputs."""
    torch.manual_seed(0)
    T = sum(LENGTHS)
    cu_seqlens = torch.tensor([[0, *LENGTHS]]).cumsum(1).to(torch.int32)
    packed = pack_micro_batch(torch.arange(T)[None], cu_seqlens, seq_length=T)
    q, k, v, grad = (torch.randn(T, n, 8, dtype=dtype) for n in (*heads, heads[1], heads[0]))

    def run(attend):
        return gradients(
            lambda *x: attend(*x, runs=packed.runs(), scale=SCALE, dropout=0.0), [q, k, v], grad
        )

    return run(function), run(sdpa.attend)


def assert_same(got, expected):
    for ours, theirs in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_torch_varlen_equals_sdpa_forward_and_backward(heads):
    assert_same(*both(varlen.attend, heads))


def test_torch_varlen_of_older_signature_gets_its_own_words(monkeypatch):
    """torch 2.10 has ``is_causal`` and no GQA."""
    import torch.nn.attention.varlen as host

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None):
        assert q.shape == k.shape, "heads are repeated for it"
        return attend_documents(q, k, v, cu_q, cu_k, scale=scale, causal=is_causal)[0]

    monkeypatch.setattr(host, "varlen_attn", varlen_attn)
    varlen.known_parameters.cache_clear()
    try:
        assert_same(*both(varlen.attend, (4, 2)))
    finally:
        varlen.known_parameters.cache_clear()


def flash_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert dropout_p == 0.0
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    return attend_documents(
        q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal
    )[0]


def flash_3(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    deterministic=False,
):
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    return attend_documents(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal)


def flash_4(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    deterministic=False,
):
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    return attend_documents(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal)


@pytest.mark.parametrize("function", [flash_2, flash_3, flash_4])
def test_every_generation_of_flash_attn_gets_the_arguments_that_it_knows(function):
    def attend(*x, **settings):
        return flash.call(function, *x, **settings)

    assert_same(*both(attend, (4, 2)))


def test_deterministic_mode_reaches_flash_attn():
    seen = []

    def function(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, deterministic):
        seen.append(deterministic)
        return q

    x = torch.randn(4, 1, 8)
    packed = pack_micro_batch(torch.arange(4)[None], torch.tensor([[0, 4]]), seq_length=4)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            flash.call(function, x, x, x, runs=packed.runs(), scale=1.0, dropout=0.0)
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [False, True]


def test_a_flash_attn_that_cannot_be_imported_is_reported(monkeypatch):
    broken = ModuleType("flash_attn_interface")  # built for another torch, say
    monkeypatch.setitem(sys.modules, "flash_attn_interface", broken)
    flash.varlen_function.cache_clear()
    with pytest.raises(ValueError, match=r"flash-attn-3 is installed but cannot be imported \("):
        flash.varlen_function(flash.RELEASES[0])


def test_torch_varlen_still_has_the_signature_that_we_call():
    from torch.nn.attention.varlen import varlen_attn

    known = list(inspect.signature(varlen_attn).parameters)
    assert known[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "scale" in known
    assert {"window_size", "is_causal"} & set(known)
