"""flash-attn's variable-length function: FlashAttention 3, 4 or 2, whichever fits the device.

FlashAttention 3 (package ``flash-attn-3``) is for sm90, 4 (``flash-attn-4``) for sm90 and sm100, 2
(``flash-attn``) for everything from sm80 on. On sm90 version 3 comes first, since the backward pass
of version 4 is young there.

Legend: T queries, K keys, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor

from megatron_anchor.attention.backends.request import (
    AttentionRequest,
    needs_device,
    needs_half_precision,
    needs_ulysses,
    this_hardware,
)

if TYPE_CHECKING:
    from megatron_anchor.attention.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Release:
    """One generation of flash-attn."""

    number: int
    package: str
    modules: tuple[str, ...]
    """Where its varlen function is; packages before and after a rename differ."""
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """First compute capability that it serves, and the first that it does not."""
    largest_head_dim: int
    dropout: bool
    deterministic_head_dim: int
    """Largest head dimension of a deterministic backward pass."""
    first_versions: tuple[tuple[tuple[int, int], str], ...] = (((0, 0), "0"),)
    """From which compute capability on which first version serves, ascending."""
    first_deterministic: str = "0"
    """First version with a deterministic backward pass."""


RELEASES = (
    Release(
        number=3,
        package="flash-attn-3",
        modules=("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        capabilities=((9, 0), (9, 1)),
        largest_head_dim=256,
        dropout=False,
        deterministic_head_dim=248,
    ),
    Release(
        number=4,
        package="flash-attn-4",
        modules=("flash_attn.cute.interface",),
        capabilities=((9, 0), (12, 0)),
        largest_head_dim=128,
        dropout=False,
        deterministic_head_dim=128,
    ),
    Release(
        number=2,
        package="flash-attn",
        modules=("flash_attn.flash_attn_interface",),
        capabilities=((8, 0), (99, 0)),
        largest_head_dim=256,
        dropout=True,
        deterministic_head_dim=256,
        first_versions=(((8, 0), "2.1.1"), ((10, 0), "2.7.3")),
        first_deterministic="2.4.1",
    ),
)
"""In the order of preference."""


def why_not(request: AttentionRequest) -> str | None:
    """Give the reason why no installed flash-attn can serve, or None."""
    common = (
        needs_device(request, capability=(8, 0))
        or needs_ulysses(request)
        or needs_half_precision(request)
    )
    if common:
        return common
    reasons = [reason for release in RELEASES if (reason := release_why_not(release, request))]
    return "; ".join(reasons) if len(reasons) == len(RELEASES) else None


def release_why_not(release: Release, request: AttentionRequest) -> str | None:
    """Give the reason why one generation of flash-attn cannot serve, or None."""
    label = f"FlashAttention {release.number}"
    hardware = request.hardware
    assert hardware.capability is not None
    if not release.capabilities[0] <= hardware.capability < release.capabilities[1]:
        return f"{label} has no kernels for {hardware.name}"
    if release.package not in hardware.packages:
        return f"{label} is not installed (pip install {release.package})"
    found = Version(hardware.packages[release.package])
    first = [v for since, v in release.first_versions if since <= hardware.capability][-1]
    if found < Version(first):
        return f"{label} serves {hardware.name} from {first} on, found {found}; upgrade it"
    if request.head_dim > release.largest_head_dim or request.head_dim % 8:
        return (
            f"{label} is for head dimensions up to {release.largest_head_dim} that are multiples "
            f"of 8, got {request.head_dim} (--kv-channels)"
        )
    if request.dropout and not release.dropout:
        return f"{label} has no dropout, got --attention-dropout {request.dropout:g}; set it to 0"
    if request.deterministic and request.head_dim > release.deterministic_head_dim:
        return (
            f"{label} has no deterministic backward pass for head dimension {request.head_dim}; "
            "leave out --deterministic-mode"
        )
    if request.deterministic and found < Version(release.first_deterministic):
        return (
            f"{label} has a deterministic backward pass from {release.first_deterministic} on, "
            f"found {found}; upgrade it, or leave out --deterministic-mode"
        )
    return None


def attend(
    q_THD: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    *,
    runs: Runs,
    scale: float,
    dropout: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attend as `Attend` says, in bfloat16 or float16, on a CUDA device; there is no sink."""
    assert sink_H is None
    deterministic = torch.are_deterministic_algorithms_enabled()
    request = AttentionRequest(
        head_dim=q_THD.shape[-1],
        dtype=q_THD.dtype,
        dropout=dropout,
        deterministic=deterministic,
        hardware=this_hardware(),
    )
    release = next(r for r in RELEASES if release_why_not(r, request) is None)
    return call(
        varlen_function(release), q_THD, k_KGD, v_KGD, runs=runs, scale=scale, dropout=dropout
    )


@cache
def varlen_function(release: Release) -> Callable[..., Any]:
    """Import the varlen function of a generation of flash-attn.

    Raises:
        ValueError: if none of its modules can be imported, with the error of each.
    """
    errors = []
    for name in release.modules:
        try:
            return importlib.import_module(name).flash_attn_varlen_func
        except (ImportError, AttributeError) as error:
            errors.append(f"{name}: {error}")
    raise ValueError(
        f"{release.package} is installed but cannot be imported ({'; '.join(errors)}); build it "
        "for this torch, or choose another --anchor-attention-backend"
    )


@cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters; every layer's call asks for them."""
    return frozenset(inspect.signature(function).parameters)


def call(
    function: Callable[..., Any],
    q_THD: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    *,
    runs: Runs,
    scale: float,
    dropout: float,
) -> Tensor:
    """Call a varlen function of any generation: all arguments by name, those that it knows.

    Args:
        function: a ``flash_attn_varlen_func``.
        q_THD: see `attend`; the others too.
    """
    known = parameters(function)
    optional: dict[str, Any] = {
        "max_seqlen_q": runs.max_q,
        "max_seqlen_k": runs.max_k,
        "dropout_p": dropout,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    assert not dropout or "dropout_p" in known
    arguments = {name: value for name, value in optional.items() if name in known}
    if runs.window is not None:
        arguments["window_size"] = (runs.window.size - 1, 0)
    result = function(
        q_THD.contiguous(),
        k_KGD.contiguous(),
        v_KGD.contiguous(),
        cu_seqlens_q=runs.cu_q,
        cu_seqlens_k=runs.cu_k,
        softmax_scale=scale,
        causal=True,
        **arguments,
    )
    # Some generations return the log-sum-exp too.
    return result[0] if isinstance(result, tuple) else result
