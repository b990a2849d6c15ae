"""torch's varlen_attn and flash-attn's functions: what we hand over, run on plain operations.

torch's own Python code runs here, with a CPU version of the operator below it; flash-attn's
generations are stood in for by functions of their signatures.
"""

import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_anchor.attention.backends import flash, sdpa, varlen
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.runs import Runs, document_runs
from megatron_anchor.windows import Window
from tests.oracle import gradients
from tests.varlen_reference import attend_documents, attend_documents_backward

LENGTHS = [37, 5, 90, 1, 123]
SCALE = 0.3


def attend_runs(q, k, v, cu_q, cu_k, *, scale, causal, left=-1):
    """Bottom right, as flash kernels align their masks."""
    return attend_documents(
        q, k, v, cu_q, cu_k, scale=scale, causal=causal, bottom_right=True, left=left
    )


def gradients_of_runs(grad, out, lse, q, k, v, cu_q, cu_k, *, scale, causal, left):
    inputs = (q, k, v, cu_q, cu_k)
    how = {"scale": scale, "causal": causal, "bottom_right": True, "left": left}
    return attend_documents_backward(grad, out, lse, inputs, **how)


@pytest.fixture(scope="module", autouse=True)
def cpu_flash_operator():
    """A CPU version of the operator that `varlen_attn` calls; torch has a CUDA one only."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **settings):
        assert settings["window_size_right"] == 0
        assert dropout == 0.0
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert cu_q.dtype == cu_k.dtype == torch.int32
        how = {"scale": settings["scale"], "left": settings["window_size_left"]}
        out, lse = attend_runs(q, k, v, cu_q, cu_k, causal=True, **how)
        empty = torch.empty(0)
        return out, lse.t().contiguous(), empty, empty, empty

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *rest, **kw):
        how = {"scale": kw["scale"], "left": kw["window_size_left"], "causal": True}
        return gradients_of_runs(grad, out, lse.t(), q, k, v, cu_q, cu_k, **how)

    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    yield
    library._destroy()


def documents(window=None):
    return document_runs(np.array(LENGTHS), device=torch.device("cpu"), window=window)


def prefixes(window=None):
    """Runs inside their documents, as gathered keys and values make them."""
    begins, lengths = np.array([0, 9, 40, 0]), np.array([20, 3, 61, 1])
    keys = begins + lengths
    if window is not None:
        keys = np.minimum(keys, lengths + window.size - 1 + window.keeps_anchor)
    return Runs(
        q_lengths=lengths,
        k_lengths=keys,
        q_begins=begins,
        device=torch.device("cpu"),
        window=window,
    )


CASES = {
    "documents": (documents(), False, 8),
    "prefixes": (prefixes(), False, 8),
    "values wider than keys": (prefixes(), False, 16),
    "values narrower, window": (documents(Window(size=7)), False, 5),
    "window": (prefixes(Window(size=7)), False, 8),
    "sink": (documents(), True, 8),
    "sink, window, prefixes": (prefixes(Window(size=7)), True, 8),
    "anchor in window": (documents(Window(size=7, keeps_anchor=True)), False, 8),
    "sink, anchor in window, prefixes": (prefixes(Window(size=7, keeps_anchor=True)), True, 5),
}


def both(function, heads, case="documents"):
    """Output and gradients of a kernel and of sdpa on the same inputs."""
    runs, has_sink, width = CASES[case]
    torch.manual_seed(0)
    T, K = runs.num_queries, runs.num_keys
    inputs = [torch.randn(T, heads[0], 8), torch.randn(K, heads[1], 8)]
    inputs += [torch.randn(K, heads[1], width)] + [torch.randn(heads[0])] * has_sink
    grad = torch.randn(T, heads[0], width)

    def run(attend):
        return gradients(
            lambda q, k, v, sink=None: attend(
                q, k, v, runs=runs, scale=SCALE, dropout=0.0, sink_H=sink
            ),
            inputs,
            grad,
        )

    return run(function), run(sdpa.attend)


def assert_same(got, expected):
    for ours, theirs in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_torch_varlen_equals_sdpa_forward_and_backward(heads, case):
    assert_same(*both(varlen.attend, heads, case))


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
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert q.shape[-1] == v.shape[-1], "FlashAttention 2 takes one width"
    return attend_runs(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=softmax_scale,
        causal=causal,
        left=window_size[0],
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
    window_size=(-1, -1),
    deterministic=False,
):
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    return attend_runs(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=softmax_scale,
        causal=causal,
        left=window_size[0],
    )


def flash_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    deterministic=False,
):
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    out, lse = attend_runs(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=softmax_scale,
        causal=causal,
        left=-1 if window_size[0] is None else window_size[0],
    )
    # By autograd, through a log-sum-exp that has a gradient.
    if learnable_sink is None:
        return out
    weights = dense_lse(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size[0])
    assert torch.allclose(weights.detach(), lse, atol=1e-5)
    return out * torch.sigmoid(weights - learnable_sink)[..., None]


def dense_lse(q, k, cu_q, cu_k, scale, left):
    """[T, H] log-sum-exp that autograd can differentiate."""
    rows = []
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        logits = torch.einsum("qhd,khd->qhk", q[a:b], k[c:d]) * scale
        own = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        hidden = torch.arange(d - c)[None] > own
        if left is not None:
            hidden |= torch.arange(d - c)[None] < own - left
        rows.append(logits.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1))
    return torch.cat(rows)


def flash_2_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    assert window_size_right == 0
    out, lse = attend_runs(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=softmax_scale,
        causal=causal,
        left=window_size_left,
    )
    return out, lse.t().contiguous(), None, None


def flash_2_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    found = gradients_of_runs(
        *(dout, out, softmax_lse.t(), q, k, v, cu_seqlens_q, cu_seqlens_k),
        scale=softmax_scale,
        causal=causal,
        left=window_size_left,
    )
    for target, value in zip((dq, dk, dv), found, strict=True):
        target.copy_(value)


def flash_3_forward(
    q,
    k,
    v,
    k_new=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    passed = (*lengths, 0.0, softmax_scale, causal, window_size_left, window_size_right)
    return flash_2_forward(q, k, v, *passed)


def flash_3_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flash_2_backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths),
        *(0.0, softmax_scale, is_causal, window_size_left, window_size_right, softcap, None),
        deterministic,
    )


def stand_in(generation):
    """A module of flash-attn's with these functions in it."""
    module = ModuleType(f"flash_attn_stand_in_{generation}")
    functions = {
        2: {
            "flash_attn_varlen_func": flash_2,
            "_wrapped_flash_attn_varlen_forward": flash_2_forward,
            "_wrapped_flash_attn_varlen_backward": flash_2_backward,
        },
        3: {
            "flash_attn_varlen_func": flash_3,
            "_flash_attn_forward": flash_3_forward,
            "_flash_attn_backward": flash_3_backward,
        },
        4: {"flash_attn_varlen_func": flash_4},
    }[generation]
    vars(module).update(functions)
    return module


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("generation", [2, 3, 4])
def test_every_generation_of_flash_attn_equals_sdpa(generation, heads, case, monkeypatch):
    release = next(r for r in flash.RELEASES if r.number == generation)
    runs = CASES[case][0]
    if runs.window is not None and runs.window.keeps_anchor and not release.anchor_in_window:
        pytest.skip("refused at start")
    module = stand_in(generation)
    monkeypatch.setattr(flash, "varlen_function", lambda _: module.flash_attn_varlen_func)
    monkeypatch.setattr(flash.inspect, "getmodule", lambda _: module)
    monkeypatch.setattr(flash, "RELEASES", (release,))
    monkeypatch.setattr(flash, "unsupported_in_release", lambda *_: None)
    assert_same(*both(flash.attend, heads, case))


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
