"""What a run asks of its attention kernel, what the machine has, and the rules that kernels share.

Everything here is data: a backend's ``unsupported_reason`` is a pure function of an
`AttentionRequest`, so each reason is tested on any machine.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4")
"""Distributions that kernels come from, by the names under which pip knows them."""

ULYSSES, GATHER, ULYSSES_GATHER, TRANSFORMER_ENGINE = "ulysses", "gather", "ulysses+gather", "te"
CONTEXT_PARALLEL = (ULYSSES, GATHER, ULYSSES_GATHER, TRANSFORMER_ENGINE)
"""How context parallelism communicates: heads for slots, gathered keys and values, both, or
Transformer Engine's own way."""

OURS = ("a2a", "gather", "a2a+gather")
"""Values of --cp-comm-type without Transformer Engine: any kernel serves."""

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device and the kernel libraries of a process."""

    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on a CPU."""
    packages: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Version of each of `PACKAGES` that is installed."""
    torch_varlen: bool = True
    """Whether torch has ``torch.nn.attention.varlen``."""
    torch_varlen_windows: bool = True
    """Whether it takes sliding windows."""
    cudnn: int = 92000
    """Version of cuDNN as it reports it, 9.20.0 being 92000; of no meaning on a CPU."""
    te_is_deterministic: bool = True
    """Whether the environment has NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""

    @property
    def name(self) -> str:
        """The device in the words of messages."""
        return "the CPU" if self.capability is None else "sm{}{}".format(*self.capability)


@cache
def this_hardware() -> Hardware:
    """Look at this process' device and packages, without importing any of them."""
    capability = _capability()
    return Hardware(
        capability=capability,
        packages={name: found for name in PACKAGES if (found := _version(name))},
        torch_varlen=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
        torch_varlen_windows=_torch_varlen_windows(),
        cudnn=0 if capability is None else _cudnn_version(),
        te_is_deterministic=os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
    )


def _capability() -> tuple[int, int] | None:
    # megatron_anchor.on_cpu reports CUDA as available, but no accelerator.
    if not torch.cuda.is_available() or torch.accelerator.current_accelerator() is None:
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.cuda.get_device_capability(local_rank % torch.cuda.device_count())


def _torch_varlen_windows() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What a run asks of its attention kernel."""

    head_dim: int
    dtype: torch.dtype
    query_heads: int = 1
    """Query heads of one tensor-parallel rank."""
    kv_heads: int = 1
    """Key/value heads of one tensor-parallel rank."""
    value_dim: int | None = None
    """Head dimension of the values, None where it is `head_dim`."""
    window: bool = False
    """Whether some layer has a sliding window."""
    anchor_in_window: bool = False
    """Whether the anchor stays visible in such layers."""
    sink: bool = False
    """Whether heads have a sink, fixed or learnable."""
    document_alignment: int = 1
    """Slots of every document are a multiple of it."""
    context_parallel_size: int = 1
    context_parallel_kinds: tuple[str, ...] = ()
    """Values of --cp-comm-type when the context-parallel size is larger than 1, else empty."""
    context_parallel: str = ULYSSES
    """Who communicates: `ULYSSES` (any kernel) or `TRANSFORMER_ENGINE` (zigzag pieces)."""
    a2a_size: int | None = None
    """Inner group of a2a+p2p (the first of --hierarchical-context-parallel-sizes)."""
    preferred: str = "auto"
    """Megatron's --attention-backend, which steers Transformer Engine's own choice."""
    dropout: float = 0.0
    deterministic: bool = False
    hardware: Hardware = Hardware()

    @property
    def value_width(self) -> int:
        """Head dimension of the values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def te_context_parallel(self) -> bool:
        """Whether Transformer Engine splits the documents over ranks."""
        return bool(self.context_parallel_kinds) and self.context_parallel == TRANSFORMER_ENGINE

    @property
    def gathers(self) -> bool:
        """Whether queries attend to gathered keys, of which there are more than queries."""
        return self.context_parallel in (GATHER, ULYSSES_GATHER) and self.context_parallel_size > 1


def needs_our_communication(request: AttentionRequest) -> str | None:
    """Refuse the context parallelism that needs a kernel with its own communication."""
    foreign = [kind for kind in request.context_parallel_kinds if kind not in OURS]
    if foreign:
        return (
            f"--cp-comm-type {' '.join(foreign)} needs Transformer Engine's own context "
            "parallelism; for this backend use --cp-comm-type auto, " + ", ".join(OURS)
        )
    if request.te_context_parallel:
        return (
            "--anchor-context-parallel te is Transformer Engine's own context parallelism; this "
            "backend runs under Ulysses: leave the flag out, or use --anchor-attention-backend te"
        )
    if request.gathers and request.dropout:
        return (
            f"--attention-dropout {request.dropout:g} where keys and values are gathered "
            f"(--cp-comm-type {request.context_parallel_kinds[0]}) is not supported; set it to 0"
        )
    return None


def needs_half_precision(request: AttentionRequest) -> str | None:
    """Refuse dtypes that flash kernels do not have."""
    if request.dtype not in HALF:
        return (
            f"its kernels are for bfloat16 and float16, got {request.dtype}; use --bf16 (and not "
            "--attention-precision fp32), or --anchor-attention-backend sdpa"
        )
    return None


def needs_device(request: AttentionRequest, *, capability: tuple[int, int]) -> str | None:
    """Refuse the CPU and devices below a compute capability."""
    found = request.hardware.capability
    if found is None:
        return "its kernels need a CUDA device; on the CPU use --anchor-attention-backend sdpa"
    if found < capability:
        return (
            f"its kernels need sm{capability[0]}{capability[1]} or newer, this device is "
            f"{request.hardware.name}; use --anchor-attention-backend sdpa"
        )
    return None


def needs_head_dim(request: AttentionRequest, *, largest: int, multiple: int) -> str | None:
    """Refuse head dimensions that the kernels were not built for."""
    widths = dict.fromkeys((request.head_dim, request.value_width))
    if any(width > largest or width % multiple for width in widths):
        return (
            f"its kernels are for head dimensions up to {largest} that are multiples of "
            f"{multiple}, got {'x'.join(map(str, widths))} (--kv-channels); use "
            "--anchor-attention-backend sdpa"
        )
    return None


def needs_no_dropout(request: AttentionRequest) -> str | None:
    """Refuse attention dropout."""
    if request.dropout:
        return (
            f"its kernels have no dropout, got --attention-dropout {request.dropout:g}; set it to "
            "0, or use --anchor-attention-backend sdpa"
        )
    return None
