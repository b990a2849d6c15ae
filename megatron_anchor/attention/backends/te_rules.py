"""What Transformer Engine cannot do with packed documents, or does wrong without a word.

Each rule states what was found in Transformer Engine 2.20 (its selector of kernels,
``dot_product_attention/utils.py``, and its context parallelism, ``context_parallel.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import Version

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

OTHERS = "use --anchor-attention-backend varlen or flash"


def why_not(request: AttentionRequest) -> str | None:
    """Give the first reason why Transformer Engine cannot serve, or None."""
    return next((reason for rule in RULES if (reason := rule(request))), None)


def _device(request: AttentionRequest) -> str | None:
    return needs_device(request, capability=(8, 0)) or needs_half_precision(request)


def _kinds(request: AttentionRequest) -> str | None:
    if not request.context_parallel_kinds:
        return None
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


def _head_dim(request: AttentionRequest) -> str | None:
    """cuDNN's kernels for training (``fused_attn.cpp``): 128, on sm90 256; flash-attn's: 256."""
    hardware = request.hardware
    assert hardware.capability is not None
    wide = hardware.capability < (10, 0) or "flash-attn" in hardware.packages
    largest = 256 if wide else 128
    if request.head_dim > largest or request.head_dim % 8:
        return (
            f"on {hardware.name} its kernels are for head dimensions up to {largest} that are "
            f"multiples of 8, got {request.head_dim} (--kv-channels), and it would build S x S "
            "scores; use --anchor-attention-backend flex or sdpa"
        )
    return None


def _environment(request: AttentionRequest) -> str | None:
    if request.deterministic and not request.hardware.te_is_deterministic:
        return (
            "--deterministic-mode: Megatron stops at the first layer unless Transformer Engine is "
            "told so in the environment, too; export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
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
    flash, hopper = _flash_attn(request), capability == (9, 0)
    if request.preferred in ("unfused", "local"):
        return (
            f"--attention-backend {request.preferred} keeps Transformer Engine from its fused "
            "kernels, and its other one builds S x S scores; leave the flag out"
        )
    if request.preferred == "flash" and not flash:
        return (
            f"--attention-backend flash: no flash-attn for {name} is installed, and Transformer "
            "Engine would build S x S scores; pip install flash-attn, or leave the flag out"
        )
    if capability < (9, 0) and (not flash or request.preferred == "fused"):
        return (
            f"on {name} Transformer Engine has no fused kernel for packed documents except "
            f"flash-attn (it would build S x S scores); pip install flash-attn and leave out "
            f"--attention-backend fused, or {OTHERS}"
        )
    if request.deterministic and hopper and (not flash or request.preferred == "fused"):
        return (
            "--deterministic-mode on sm90: cuDNN's deterministic backward pass stops where "
            "documents x heads x (longest document)^2 reaches 2^30, and Transformer Engine then "
            "builds S x S scores, or finds no kernel under context parallelism; leave the flag "
            "out, or pip install flash-attn"
        )
    flash_runs = flash and (
        capability < (9, 0) or request.preferred == "flash" or (request.deterministic and hopper)
    )
    if not flash_runs and (reason := _cudnn(request)):
        return reason
    if (
        flash_runs
        and request.te_context_parallel
        and ("all_gather" in request.context_parallel_kinds)
    ):
        return (
            "--cp-comm-type all_gather with flash-attn, which Transformer Engine would take on "
            f"{name} here, is silently wrong for packed documents (FlashAttention 2; newer ones "
            "were not tried); use --cp-comm-type p2p or a2a"
            + (", or leave out --attention-backend flash" if request.preferred == "flash" else "")
        )
    return None


def _cudnn(request: AttentionRequest) -> str | None:
    """First cuDNN with packed documents and GQA on a device (``utils.py``, ``fused_attn.cpp``)."""
    hardware = request.hardware
    assert hardware.capability is not None
    needed = 90600 if hardware.capability < (10, 0) else 90700
    if hardware.capability >= (12, 0) or (request.deterministic and needed == 90700):
        needed = 91801
    if hardware.cudnn >= needed and hardware.cudnn not in BROKEN_CUDNN:
        return None
    return (
        f"on {hardware.name} its fused kernel for packed documents needs cuDNN "
        f"{_dotted(needed)} or newer"
        + (" with --deterministic-mode" if request.deterministic else "")
        + f", found {_dotted(hardware.cudnn)}"
        + (" (known to be wrong)" if hardware.cudnn in BROKEN_CUDNN else "")
        + f"; upgrade nvidia-cudnn, or {OTHERS}"
    )


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _flash_attn(request: AttentionRequest) -> bool:
    """Say whether Transformer Engine would find a flash-attn for this device."""
    hardware = request.hardware
    assert hardware.capability is not None
    newer = {"flash-attn-3": hardware.capability == (9, 0)}
    newer["flash-attn-4"] = hardware.capability >= (9, 0)
    return "flash-attn" in hardware.packages or any(
        fits and package in hardware.packages for package, fits in newer.items()
    )


RULES: tuple[Callable[[AttentionRequest], str | None], ...] = (
    _kinds,
    _device,
    _version,
    _alignment,
    _heads,
    _head_dim,
    _dropout,
    _environment,
    _kernel,
)
