"""Which kernel serves what: every reason that a backend gives, and what `auto` makes of them."""

import re

import pytest
import torch

from megatron_anchor.attention.backends import (
    BACKENDS,
    AttentionRequest,
    Hardware,
    choose_backend,
    load_backend,
    this_hardware,
)

A100, H100, B200 = (8, 0), (9, 0), (10, 0)
TE = {"transformer-engine": "2.20.2"}
FA2 = {"flash-attn": "2.8.3"}
FA3 = {"flash-attn-3": "3.0.0"}
FA4 = {"flash-attn-4": "4.0.0b36"}
TE_2_21 = {"transformer-engine": "2.21.0"}


def flash_2(version):
    return {"flash-attn": version}


def request(capability=H100, packages=None, **kwargs):
    names = ("torch_varlen", "torch_varlen_windows", "te_is_deterministic", "cudnn")
    machine = {name: kwargs.pop(name) for name in names if name in kwargs}
    hardware = Hardware(capability=capability, packages=packages or {}, **machine)
    return AttentionRequest(
        **{
            "head_dim": 128,
            "dtype": torch.bfloat16,
            "query_heads": 32,
            "kv_heads": 8,
            "hardware": hardware,
            **kwargs,
        }
    )


def te_cp(*kinds, size=4, alignment=None, **kwargs):
    """A request for Transformer Engine's own context parallelism, aligned unless told otherwise."""
    return {
        "context_parallel": "te",
        "context_parallel_kinds": kinds,
        "context_parallel_size": size,
        "document_alignment": 2 * size if alignment is None else alignment,
        **kwargs,
    }


SERVED = {
    "te": [
        request(H100, TE),
        request(B200, TE, cudnn=91300),
        request(A100, TE | FA2, cudnn=90100),
        request(H100, TE, head_dim=256, te_is_deterministic=False),
        request(B200, TE | FA2, head_dim=256),
        request(B200, TE, deterministic=True),
        request(H100, TE | FA2, deterministic=True),
        request(A100, TE | FA2),
        request(A100, TE | flash_2("2.1.1"), head_dim=256),
        request(A100, TE_2_21 | flash_2("2.8.4")),
        request(A100, TE_2_21 | flash_2("2.8.4.post1+cu13")),
        request(B200, TE_2_21 | FA4, head_dim=256),
        request((8, 9), TE | FA2, head_dim=192),
        request(H100, TE | flash_2("2.0.9"), preferred="fused"),
        request(
            H100, TE | FA3, preferred="flash", query_heads=9, kv_heads=3, **te_cp("a2a", size=3)
        ),
        request(A100, TE | FA2, **te_cp("p2p")),
        request(H100, TE, **te_cp("all_gather", "p2p", "a2a")),
        request(H100, TE | FA2, **te_cp("all_gather")),
        request(H100, TE, **te_cp("a2a+p2p", size=16, a2a_size=8)),
        request(H100, TE, context_parallel_kinds=("a2a",), context_parallel_size=16, kv_heads=2),
    ],
    "flash": [
        request(A100, FA2, dropout=0.1),
        request(H100, FA3, head_dim=256),
        request(B200, FA4),
        request(B200, FA4, head_dim=256),
        request(B200, FA4, head_dim=192, value_dim=128),
        request((12, 0), FA4, window=True),
        request(H100, FA4, head_dim=256, sink=True, window=True),
        request(H100, FA3, sink=True, window=True, anchor_in_window=True),
        request(H100, FA3, deterministic=True),
    ],
    "varlen": [request(A100), request(H100, head_dim=64), request(B200, dtype=torch.float16)],
    "flex": [request(A100), request(B200, dtype=torch.float32), request(H100, deterministic=True)],
    "sdpa": [request(None), request(H100, dtype=torch.float32, dropout=0.1)],
}


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_kernel_can_do_is_not_refused(name):
    for asked in SERVED[name]:
        assert load_backend(name).unsupported_reason(asked) is None


REFUSED = [
    # Every backend: the device, the dtype, the head dimension, the communication.
    ("varlen", request(None), "its kernels need a CUDA device; on the CPU use .* sdpa"),
    ("varlen", request((7, 5)), "its kernels need sm80 or newer, this device is sm75"),
    ("varlen", request(dtype=torch.float32), "for bfloat16 and float16, got torch.float32"),
    ("varlen", request(head_dim=100), "up to 256 that are multiples of 8, got 100"),
    ("varlen", request(head_dim=264), "up to 256 that are multiples of 8, got 264"),
    ("varlen", request(dropout=0.1), "no dropout, got --attention-dropout 0.1; set it to 0"),
    ("varlen", request(deterministic=True), "leave out --deterministic-mode"),
    ("varlen", request(torch_varlen=False), r"no torch.nn.attention.varlen; pip install 'torch>="),
    ("varlen", request(**te_cp("p2p")), "--cp-comm-type p2p needs .* use --cp-comm-type auto"),
    ("varlen", request(**te_cp("a2a")), "--anchor-context-parallel te is .* leave the flag out"),
    ("flex", request(None), "no backward pass on the CPU; use .* sdpa"),
    ("flex", request((7, 0)), "need sm80 or newer, this device is sm70"),
    ("flex", request(dtype=torch.float64), "does not compute in torch.float64"),
    ("flex", request(head_dim=8), "from 16 to 256, got 8"),
    ("flex", request(dropout=0.2), "no dropout, got --attention-dropout 0.2"),
    ("flex", request(**te_cp("all_gather")), "--cp-comm-type all_gather needs"),
    ("sdpa", request(**te_cp("p2p")), "--cp-comm-type p2p needs .* use --cp-comm-type auto"),
    # flash-attn: none of its generations fits.
    ("flash", request(None, FA2), "need a CUDA device"),
    ("flash", request((7, 5), FA2), "need sm80 or newer"),
    ("flash", request(), "FlashAttention 3 is not installed .* FlashAttention 2 is not installed"),
    ("flash", request(A100, FA3), "FlashAttention 3 has no kernels for sm80"),
    ("flash", request(H100, FA3, dtype=torch.float32), "for bfloat16 and float16"),
    (
        "flash",
        request(B200, FA4, head_dim=192),
        "FlashAttention 4 is for head dimensions up to 128 that are multiples of 8, got 192",
    ),
    ("flash", request(H100, FA3, head_dim=192, value_dim=100), "multiples of 8, got 192x100"),
    ("flash", request((12, 0), FA4, deterministic=True), "no deterministic backward pass .* sm120"),
    ("flash", request((12, 0), FA4, sink=True), "FlashAttention 4 has no sinks on sm120"),
    ("flash", request(B200, FA4, sink=True, head_dim=256), "has no sinks on sm100 at this head"),
    ("flash", request(B200, FA4, window=True, anchor_in_window=True), "cannot keep the anchor"),
    ("flash", request(A100, flash_2("2.2.0"), window=True), "sliding windows from 2.3.0 on"),
    (
        "flash",
        request(A100, flash_2("2.6.3"), sink=True),
        "sinks and .* from 2.7.3 on",
    ),
    ("flash", request(A100, FA2, sink=True, dropout=0.1), "--attention-dropout 0.1 with a window"),
    ("varlen", request(window=True, torch_varlen_windows=False), "no sliding windows; upgrade"),
    ("sdpa", request(None, window=True, dropout=0.1), "--attention-dropout 0.1 with a window"),
    ("te", request(H100, TE, sink=True), "--softmax-type: .* sinks of its own"),
    ("te", request(H100, TE, window=True, anchor_in_window=True), "--anchor-in-window: its"),
    ("te", request(H100, TE, window=True, **te_cp("p2p")), "ring has no sliding windows"),
    ("te", request(H100, TE, head_dim=192, value_dim=128), "keys of 192 and values of 128"),
    ("flash", request(H100, FA3, dropout=0.1), "FlashAttention 3 has no dropout, got"),
    ("flash", request(H100, FA3, head_dim=256, deterministic=True), "no deterministic backward"),
    ("flash", request(H100, FA3, **te_cp("p2p")), "--cp-comm-type p2p needs"),
    # Transformer Engine: versions, and the traps that are silently wrong or end the process.
    ("te", request(None, TE), "need a CUDA device"),
    ("te", request((7, 5), TE), "need sm80 or newer"),
    ("te", request(H100, TE, dtype=torch.float32), "for bfloat16 and float16"),
    ("te", request(H100), r"not installed \(pip install 'megatron-anchor\[te\]'\)"),
    ("te", request(H100, {"transformer-engine": "1.13"}), "from Transformer Engine 2.2 on"),
    (
        "te",
        request(H100, {"transformer-engine": "2.17.1"}, **te_cp("all_gather")),
        r"--cp-comm-type all_gather takes packed .* 2.18 on, found 2.17.1; upgrade it",
    ),
    (
        "te",
        request(H100, {"transformer-engine": "2.9"}, **te_cp("a2a")),
        "--cp-comm-type a2a takes packed documents from Transformer Engine 2.10 on",
    ),
    (
        "te",
        request(H100, TE, **te_cp("allgather")),
        "allgather is not one of .*write it all_gather",
    ),
    (
        "te",
        request(H100, TE, **te_cp("p2p", context_parallel="ulysses")),
        "p2p is Transformer Engine's own .* --anchor-context-parallel ulysses .* leave that flag",
    ),
    (
        "te",
        request(H100, TE, **te_cp("p2p", alignment=1)),
        "--document-alignment 1: .* 8 equal chunks .* silently wrong .* a multiple of 8",
    ),
    (
        "te",
        request(H100, TE, **te_cp("p2p", alignment=4)),
        "--document-alignment 4: .* 8 equal chunks",
    ),
    (
        "te",
        request(H100, TE, **te_cp("a2a", size=16)),
        "32 query and 8 key/value heads of a tensor-parallel rank over 16 ranks, .* crashes",
    ),
    ("te", request(H100, TE, **te_cp("a2a+p2p")), "needs --hierarchical-context-parallel-sizes"),
    (
        "te",
        request(H100, TE, **te_cp("a2a+p2p", size=32, a2a_size=16)),
        r"--cp-comm-type a2a\+p2p shares .* over 16 ranks",
    ),
    ("te", request(H100, TE, **te_cp("p2p", dropout=0.1)), "--attention-dropout 0.1 under"),
    ("te", request(H100, TE, cudnn=90501), "on sm90 .* cuDNN 9.6.0 or newer, found 9.5.1"),
    ("te", request(H100, TE, cudnn=8907), "cuDNN 9.6.0 or newer, found 8.9.7"),
    ("te", request(H100, TE, cudnn=91001), "found 9.10.1 .known to be wrong."),
    ("te", request((12, 0), TE, cudnn=91800), "on sm120 .* cuDNN 9.18.1 or newer, found 9.18.0"),
    (
        "te",
        request(B200, TE, deterministic=True, cudnn=91300),
        "cuDNN 9.18.1 or newer with --deterministic-mode, found 9.13.0",
    ),
    ("te", request(B200, TE, head_dim=192), "on sm100 .* S x S.* up to 128 .* got 192"),
    (
        "te",
        request(H100, TE, head_dim=264),
        "on sm90 .* up to 256 .* got 264 .* FlashAttention 2 is not installed",
    ),
    ("te", request(H100, TE, head_dim=100), "multiples of 8, got 100"),
    (
        "te",
        request(B200, TE, deterministic=True, te_is_deterministic=False),
        "export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    ),
    ("te", request(A100, TE), "on sm80 Transformer Engine has no fused kernel .* flash-attn"),
    ("te", request(A100, TE | FA3), "on sm80 Transformer Engine has no fused kernel"),
    ("te", request(A100, TE | FA2, preferred="fused"), "--attention-backend fused excludes it"),
    (
        "te",
        request(H100, TE, preferred="flash"),
        "--attention-backend flash excludes .* 2 is not installed",
    ),
    ("te", request(H100, TE, preferred="unfused"), "--attention-backend unfused keeps .* S x S"),
    (
        "te",
        request(H100, TE, deterministic=True),
        "S x S scores.* backward pass on sm90 .* leave out --determin",
    ),
    (
        "te",
        request(A100, TE | FA2, **te_cp("all_gather")),
        "all_gather with flash-attn, .* on sm80 here, is silently wrong",
    ),
    (
        "te",
        request(H100, TE | FA2, preferred="flash", **te_cp("all_gather")),
        "silently wrong .* --attention-backend flash excludes it; leave that flag out",
    ),
    (
        "te",
        request(H100, TE | FA2, deterministic=True, **te_cp("all_gather")),
        "all_gather with flash-attn",
    ),
    # Where cuDNN has no kernel, flash-attn runs: all_gather is wrong there too.
    *(
        (
            "te",
            request(B200, TE | fa, head_dim=head_dim, **te_cp("all_gather")),
            f"all_gather with flash-attn, .* on sm100 here, is silently wrong .* got {head_dim}",
        )
        for fa in (FA2, FA2 | FA4)
        for head_dim in (192, 256)
    ),
    # Versions of flash-attn, for its own backend and inside Transformer Engine.
    ("flash", request(A100, flash_2("1.0.9")), "serves sm80 from 2.1.1 on, found 1.0.9; upgrade"),
    ("flash", request(B200, flash_2("2.6.3")), "serves sm100 from 2.7.3 on, found 2.6.3"),
    (
        "flash",
        request(A100, flash_2("2.4.0"), deterministic=True),
        "deterministic backward pass from 2.4.1 on, found 2.4.0",
    ),
    ("te", request(A100, TE | flash_2("2.0.9")), "serves sm80 from 2.1.1 on, found 2.0.9"),
    ("te", request(A100, TE | flash_2("2.8.4")), "takes FlashAttention 2 before 2.8.4, found 2.8"),
    ("te", request(A100, TE_2_21 | flash_2("2.8.5")), "2.21.0 takes FlashAttention 2 before 2.8.5"),
    # FlashAttention 4 and the widest heads: wrong gradients before 4.0.0b33, none on sm120.
    (
        "flash",
        request(B200, {"flash-attn-4": "4.0.0b24"}, head_dim=256),
        "right gradients for head dimension 256 on sm100 from 4.0.0b33 on, found 4.0.0b24; upgrade",
    ),
    ("flash", request((12, 0), FA4, head_dim=256), "4 is for head dimensions up to 128 .* got 256"),
    ("flash", request((12, 0), FA4, head_dim=192, value_dim=128), "up to 128 .* got 192x128"),
    ("flash", request(A100, FA4), "FlashAttention 4 has no kernels for sm80"),
    ("te", request(B200, TE | FA4, head_dim=256), "4 trains head dimension 256 .* Engine 2.21 on"),
    ("te", request(B200, TE | flash_2("2.7.2"), head_dim=256), "from 2.7.3 on, found 2.7.2"),
    (
        "te",
        request(A100, TE | flash_2("2.3.6"), deterministic=True),
        "deterministic backward pass from 2.4.1 on, found 2.3.6",
    ),
    # Wide heads in FlashAttention 2.
    *(
        (
            "te",
            request(capability, TE | FA2, head_dim=256),
            "takes FlashAttention 2 on sm.* head dimensions up to 192, got 256",
        )
        for capability in ((8, 6), (8, 9), (10, 3))
    ),
    # FlashAttention 3 and 4 alone.
    (
        "te",
        request(H100, TE | FA3, preferred="flash", dropout=0.1),
        "FlashAttention 3 has no dropout",
    ),
    (
        "te",
        request(H100, TE | FA3, deterministic=True, dropout=0.1),
        "FlashAttention 3 has no dropout",
    ),
    (
        "te",
        request(H100, TE | FA3, deterministic=True, head_dim=256),
        "3 has no deterministic backward pass for head dimension 256",
    ),
    (
        "te",
        request(H100, TE | FA4, preferred="flash", **te_cp("a2a+p2p", a2a_size=2)),
        r"FlashAttention 4 is not taken under --cp-comm-type a2a\+p2p",
    ),
    # Odd numbers of heads keep Transformer Engine's a2a from cuDNN.
    *(
        (
            "te",
            request(H100, TE, query_heads=9, kv_heads=3, **te_cp(kind, size=3 * n, a2a_size=3)),
            "needs even numbers of heads, got 9 query and 3 key/value heads",
        )
        for kind, n in (("a2a", 1), ("a2a+p2p", 2))
    ),
]


@pytest.mark.parametrize(("name", "asked", "reason"), REFUSED)
def test_what_a_kernel_cannot_do_is_refused_with_the_reason(name, asked, reason):
    found = load_backend(name).unsupported_reason(asked)
    assert found is not None
    assert re.search(reason, found), found
    with pytest.raises(ValueError, match=f"--anchor-attention-backend {name} cannot serve"):
        choose_backend(name, asked)


def test_auto_prefers_the_fastest_that_can_serve():
    names = {
        "sdpa": [request(None, TE | FA2), request(H100, TE, dtype=torch.float32)],
        "te": [
            request(H100, TE | FA3),
            request(A100, TE | FA2),
            request(B200, TE),
            request((12, 0), TE),
        ],
        "flash": [
            *(request(B200, fa) for fa in (FA2, FA4)),
            request((12, 0), TE | FA2, cudnn=91800, preferred="fused"),
            request(H100, FA3),
            request(A100, TE | FA2, dropout=0.1, preferred="fused"),
        ],
        "varlen": [request(H100), request(A100, TE)],
        "flex": [request(H100, torch_varlen=False), request(H100, deterministic=True)],
    }
    for name, requests in names.items():
        for asked in requests:
            assert choose_backend("auto", asked).name == name


def test_auto_explains_what_it_passed_over():
    text = choose_backend("auto", request(A100, TE)).explain()
    assert text.splitlines()[0] == "attention kernel: varlen"
    assert re.search(r"not te: on sm80 .*\n  not flash: .*not installed", text)
    assert choose_backend("sdpa", request(None)).explain() == "attention kernel: sdpa"


def test_one_reason_against_many_is_told_once():
    text = choose_backend("auto", request((7, 0), TE | FA2)).explain().splitlines()
    assert text[0] == "attention kernel: sdpa"
    assert [line.split(":")[0] for line in text[1:]] == ["  not te, flash, varlen, flex"]


def test_auto_gives_the_reason_of_each_when_none_can_serve():
    with pytest.raises(ValueError, match=r"te: .*flash: .*varlen: .*flex: .*sdpa: --cp-comm-type"):
        choose_backend("auto", request(H100, **te_cp("p2p")))


def test_on_the_cpu_auto_refuses_what_needs_transformer_engine():
    with pytest.raises(ValueError, match=r"--cp-comm-type p2p needs .* use --cp-comm-type auto"):
        choose_backend("auto", request(None, TE, **te_cp("p2p")))


def test_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown .* 'sdap'; did you mean 'sdpa'\?"):
        choose_backend("sdap", request(None))


def test_the_cpu_is_seen_as_such_also_where_it_pretends_to_be_a_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    assert this_hardware.__wrapped__().capability is None
    assert this_hardware().name == "the CPU"
