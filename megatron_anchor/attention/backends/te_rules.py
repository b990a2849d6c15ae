"""What Transformer Engine cannot do with packed documents, or does wrong without a word.

Each rule states what was found in Transformer Engine 2.20 (its selector of kernels,
``dot_product_attention/utils.py``, and its context parallelism, ``context_parallel.py``), or reads
in the release notes of 2.21, whose code was not at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import Version

from megatron_anchor.attention.backends.flash import RELEASES, Release, unsupported_in_release
from megatron_anchor.attention.backends.request import (
    AttentionRequest,
    needs_device,
    needs_half_precision,
)

FIRST_VERSION = {"p2p": "2.2", "a2a": "2.10", "a2a+p2p": "2.10", "all_gather": "2.18"}
"""Release of Transformer Engine in which each --cp-comm-type learnt packed documents."""

WITHOUT_CP = "2.2"
"""First release that is told whether there is padding between documents."""

BROKEN_CUDNN = (91000, 91001)
"""Releases of cuDNN that Transformer Engine avoids for their known bugs."""

FLASH_2_BEFORE = (("0", "2.8.4"), ("2.21", "2.8.5"))
"""From which Transformer Engine on which first FlashAttention 2 it does not take
(``FlashAttentionUtils``; pull request 3403 for 2.21), ascending."""

FLASH_4_256 = "2.21"
"""First Transformer Engine that says that it trains with FlashAttention 4 and head dimension 256
over packed documents (pull request 3540)."""

FLASH_2_WIDE = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Where it takes FlashAttention 2 for head dimensions above 192."""

OTHERS = "use --anchor-attention-backend varlen or flash"


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Give the first reason why Transformer Engine cannot serve, or None."""
    return next((reason for rule in RULES if (reason := rule(request))), None)


def _device(request: AttentionRequest) -> str | None:
    return needs_device(request, capability=(8, 0)) or needs_half_precision(request)


def _kinds(request: AttentionRequest) -> str | None:
    if not request.context_parallel_kinds:
        return None
    if request.gathers:
        return (
            f"--cp-comm-type {request.context_parallel_kinds[0]}: Transformer Engine's fused "
            f"kernels take packed documents whole, as many keys as queries; {OTHERS}, or use "
            "--cp-comm-type a2a"
        )
    unknown = [kind for kind in request.context_parallel_kinds if kind not in FIRST_VERSION]
    if unknown:
        return f"--cp-comm-type {unknown[0]} is not one of {', '.join(FIRST_VERSION)}" + (
            "; write it all_gather" if unknown[0] == "allgather" else ""
        )
    foreign = [kind for kind in request.context_parallel_kinds if kind != "a2a"]
    if foreign and not request.te_context_parallel:
        return (
            f"--cp-comm-type {foreign[0]} is Transformer Engine's own context parallelism, but "
            "--anchor-context-parallel ulysses was asked for; leave that flag out"
        )
    return None


def _version(request: AttentionRequest) -> str | None:
    found = request.hardware.packages.get("transformer-engine")
    if found is None:
        return (
            f"Transformer Engine is not installed (pip install 'megatron-anchor[te]'); or {OTHERS}"
        )
    kinds = request.context_parallel_kinds if request.te_context_parallel else ()
    for kind, first in [("", WITHOUT_CP), *((kind, FIRST_VERSION[kind]) for kind in kinds)]:
        if Version(found) < Version(first):
            what = f"--cp-comm-type {kind}" if kind else "it"
            return (
                f"{what} takes packed documents from Transformer Engine {first} on, found {found}; "
                "upgrade it, or use Ulysses (--cp-comm-type a2a)"
            )
    return None


def _alignment(request: AttentionRequest) -> str | None:
    unit = 2 * request.context_parallel_size
    if request.te_context_parallel and request.document_alignment % unit:
        return (
            f"--document-alignment {request.document_alignment}: Transformer Engine cuts every "
            f"document into {unit} equal chunks (2 x --context-parallel-size) and is silently "
            f"wrong where that does not come out even; leave the flag out or give a multiple of "
            f"{unit}"
        )
    return None


def _heads(request: AttentionRequest) -> str | None:
    """a2a with fewer key/value heads than ranks ends the process with SIGFPE before any check."""
    if not request.te_context_parallel:
        return None
    for kind in request.context_parallel_kinds:
        size = {"a2a": request.context_parallel_size, "a2a+p2p": request.a2a_size}.get(kind, 1)
        if size is None:
            return (
                "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes (ranks of "
                "the a2a groups, ranks of the p2p groups)"
            )
        if request.kv_heads % size or request.query_heads % size:
            return (
                f"--cp-comm-type {kind} shares {request.query_heads} query and {request.kv_heads} "
                f"key/value heads of a tensor-parallel rank over {size} ranks, and Transformer "
                "Engine crashes where that does not come out even; use Ulysses, which repeats "
                "key/value heads (leave out --anchor-context-parallel), --cp-comm-type p2p, or a "
                "smaller group"
            )
    return None


def _environment(request: AttentionRequest) -> str | None:
    if request.deterministic and not request.hardware.te_is_deterministic:
        return (
            "--deterministic-mode: Megatron stops at the first layer unless Transformer Engine is "
            "told so in the environment, too; export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
        )
    return None


def _mask(request: AttentionRequest) -> str | None:
    """Windows and sinks: what its thd kernels do, and what this package hands over."""
    if request.sink:
        return (
            f"--softmax-type: Transformer Engine keeps sinks of its own, which this package does "
            f"not hand over; {OTHERS}, or flex"
        )
    if request.anchor_in_window:
        return f"--anchor-in-window: its kernels have plain windows only; {OTHERS}, or flex"
    if (
        request.window
        and request.te_context_parallel
        and ("p2p" in request.context_parallel_kinds or "a2a+p2p" in request.context_parallel_kinds)
    ):
        return (
            "--window-size: Transformer Engine's ring has no sliding windows; use --cp-comm-type "
            "auto"
        )
    if request.value_width != request.head_dim:
        return (
            f"keys of {request.head_dim} and values of {request.value_width} dimensions were never "
            f"tried with it; {OTHERS}"
        )
    return None


def _dropout(request: AttentionRequest) -> str | None:
    if request.te_context_parallel and request.dropout:
        return (
            f"--attention-dropout {request.dropout:g} under Transformer Engine's context "
            "parallelism was never tried; set it to 0"
        )
    return None


def _kernel(request: AttentionRequest) -> str | None:
    """Foresee which of its kernels Transformer Engine would take, and whether that one is right."""
    name, capability = request.hardware.name, request.hardware.capability
    assert capability is not None
    if request.preferred in ("unfused", "local"):
        return (
            f"--attention-backend {request.preferred} keeps Transformer Engine from its fused "
            "kernels, and its other one builds S x S scores; leave the flag out"
        )
    no_cudnn, no_flash = _cudnn_unsupported(request), _flash_unsupported(request)
    if no_cudnn and no_flash:
        instead = "use --cp-comm-type a2a (Ulysses)" if request.te_context_parallel else OTHERS
        return (
            f"on {name} Transformer Engine has no fused kernel for this (it would stop, or build "
            f"S x S scores). cuDNN: {no_cudnn}. flash-attn: {no_flash}. Or {instead}"
        )
    # It takes cuDNN before flash-attn on sm90 and newer.
    all_gather = request.te_context_parallel and "all_gather" in request.context_parallel_kinds
    if no_cudnn and all_gather:
        return (
            "--cp-comm-type all_gather with flash-attn, which Transformer Engine would take on "
            f"{name} here, is silently wrong for packed documents (FlashAttention 2; newer ones "
            f"were not tried); use --cp-comm-type p2p or a2a. Not cuDNN: {no_cudnn}"
        )
    return None


def _cudnn_unsupported(request: AttentionRequest) -> str | None:
    """cuDNN's kernels for training (``fused_attn.cpp``) and what the selector holds back."""
    name, capability = request.hardware.name, request.hardware.capability
    assert capability is not None
    if request.preferred == "flash":
        return "--attention-backend flash excludes it; leave that flag out"
    if capability < (9, 0):
        return f"it has no kernel for packed documents on {name}"
    hopper = capability == (9, 0)
    largest = 256 if hopper else 128
    if request.head_dim > largest or request.head_dim % 8:
        return (
            f"on {name} its kernels are for head dimensions up to {largest} that are multiples of "
            f"8, got {request.head_dim} (--kv-channels)"
        )
    if request.deterministic and hopper:
        return (
            "its deterministic backward pass on sm90 stops where documents x heads x (longest "
            "document)^2 reaches 2^30; leave out --deterministic-mode"
        )
    shares = request.te_context_parallel and {"a2a", "a2a+p2p"} & {*request.context_parallel_kinds}
    if shares and (request.query_heads % 2 or request.kv_heads % 2):
        return (
            f"--cp-comm-type {min(shares)} needs even numbers of heads, got {request.query_heads} "
            f"query and {request.kv_heads} key/value heads of a tensor-parallel rank"
        )
    return _cudnn_version(request)


def _cudnn_version(request: AttentionRequest) -> str | None:
    """First cuDNN with packed documents and GQA on a device (``utils.py``, ``fused_attn.cpp``)."""
    hardware = request.hardware
    assert hardware.capability is not None
    needed = 90600 if hardware.capability < (10, 0) else 90700
    if hardware.capability >= (12, 0) or (request.deterministic and needed == 90700):
        needed = 91801
    if hardware.cudnn >= needed and hardware.cudnn not in BROKEN_CUDNN:
        return None
    return (
        f"on {hardware.name} its kernel for packed documents needs cuDNN {_dotted(needed)} or newer"
        + (" with --deterministic-mode" if request.deterministic else "")
        + f", found {_dotted(hardware.cudnn)}"
        + (" (known to be wrong)" if hardware.cudnn in BROKEN_CUDNN else "")
        + "; upgrade nvidia-cudnn"
    )


def _dotted(version: int) -> str:
    major = 10000 if version >= 90000 else 1000  # 8.9.7 reports 8907, 9.0.0 reports 90000
    return f"{version // major}.{version % major // 100}.{version % 100}"


def _flash_unsupported(request: AttentionRequest) -> str | None:
    """Say why Transformer Engine would take no flash-attn, or None."""
    if request.preferred == "fused":
        return "--attention-backend fused excludes it; leave that flag out"
    capability = request.hardware.capability
    assert capability is not None
    reasons = []
    for release in RELEASES:
        if not release.capabilities[0] <= capability < release.capabilities[1]:
            continue
        reason = unsupported_in_release(release, request) or _release_in_te(release, request)
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons)


def _release_in_te(release: Release, request: AttentionRequest) -> str | None:
    """What Transformer Engine's selector asks of flash-attn beyond what flash-attn does."""
    capability, found = request.hardware.capability, request.hardware.packages[release.package]
    own = Version(request.hardware.packages["transformer-engine"])
    before = [before for since, before in FLASH_2_BEFORE if own >= Version(since)][-1]
    if release.number == 2 and Version(found) >= Version(before):
        return (
            f"Transformer Engine {own} takes FlashAttention 2 before {before}, found {found}; "
            "install an older one"
        )
    if release.number == 4 and request.head_dim == 256 and own < Version(FLASH_4_256):
        return (
            "FlashAttention 4 trains head dimension 256 over packed documents from Transformer "
            f"Engine {FLASH_4_256} on, found {own}; upgrade it"
        )
    if release.number == 2 and request.head_dim > 192 and capability not in FLASH_2_WIDE:
        return (
            f"Transformer Engine takes FlashAttention 2 on {request.hardware.name} for head "
            f"dimensions up to 192, got {request.head_dim} (--kv-channels)"
        )
    if (
        release.number == 4
        and request.te_context_parallel
        and ("a2a+p2p" in request.context_parallel_kinds)
    ):
        return "FlashAttention 4 is not taken under --cp-comm-type a2a+p2p"
    return None


RULES: tuple[Callable[[AttentionRequest], str | None], ...] = (
    _kinds,
    _device,
    _version,
    _alignment,
    _heads,
    _mask,
    _dropout,
    _environment,
    _kernel,
)
