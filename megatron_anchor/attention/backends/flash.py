"""flash-attn's variable-length function: FlashAttention 3, 4 or 2, whichever fits the device.

FlashAttention 3 (package ``flash-attn-3``) is for sm90, 4 (``flash-attn-4``) for sm90 to sm120, 2
(``flash-attn``) for everything from sm80 on. On sm90 version 3 comes first, since the backward pass
of version 4 is young there.

Facts of `RELEASES`: the argument checks of flash-attn at 2026-08 (``flash_attn_interface.py``,
``hopper/flash_api.cpp``), and those of the wheel 4.0.0b36 (``flash_attn/cute/interface.py``).

Legend: T queries, K keys, H query heads, G key/value heads, D and E head dims of keys and values.
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

from megatron_anchor.attention.backends.flash_lse import FLASH_2_FIRST, FlashLse
from megatron_anchor.attention.backends.merged import attend_with_lse
from megatron_anchor.attention.backends.request import (
    AttentionRequest,
    needs_device,
    needs_half_precision,
    needs_our_communication,
    this_hardware,
)
from megatron_anchor.attention.backends.widths import equal_widths

if TYPE_CHECKING:
    from megatron_anchor.attention.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Widths of keys and values beyond the largest head dimension, on some devices."""

    keys: int
    values: int
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """First compute capability that has them, and the first that does not."""
    first_version: str = "0"
    """First version whose gradients are right."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """One generation of flash-attn."""

    number: int
    package: str
    install: str
    """How to get it."""
    source: str
    """What its facts were read in."""
    modules: tuple[str, ...]
    """Where its varlen function is; packages before and after a rename differ."""
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """First compute capability that it serves, and the first that it does not."""
    largest_head_dims: tuple[tuple[tuple[int, int], int], ...] = (((0, 0), 256),)
    """From which compute capability on which largest head dimension, ascending."""
    more_widths: tuple[Widths, ...] = ()
    unequal_widths: tuple[tuple[int, int], tuple[int, int]] | None = None
    """First and last width of keys, and of values, that may differ; elsewhere, and where this is
    None, values are filled up with zeros."""
    dropout: bool = False
    sink_parameter: bool = False
    """Whether it takes sinks by itself; else its log-sum-exp makes them (`merged`)."""
    anchor_in_window: bool = True
    deterministic: Callable[[tuple[int, int], int], bool] = lambda capability, head_dim: True
    """Whether its backward pass can be deterministic."""
    first_versions: tuple[tuple[tuple[int, int], str], ...] = (((0, 0), "0"),)
    """From which compute capability on which first version serves, ascending."""
    first_deterministic: str = "0"
    """First version with a deterministic backward pass."""
    first_window: str = "0"
    """First version with sliding windows."""
    first_lse: str = "0"
    """First version whose forward and backward passes can be called by themselves."""


BLACKWELL = ((10, 0), (12, 0))
"""Data-center devices: sm100, sm103, sm110. sm120 has less shared memory and kernels of its own."""

RELEASES = (
    Release(
        number=3,
        package="flash-attn-3",
        install=(
            "pip install flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/; "
            "the package index has none"
        ),
        source="main of 2026-08, `hopper/`",
        modules=("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        capabilities=((9, 0), (9, 1)),
        unequal_widths=((136, 192), (104, 128)),
        deterministic=lambda capability, head_dim: head_dim <= 192,
    ),
    Release(
        number=4,
        package="flash-attn-4",
        install="pip install --pre flash-attn-4",
        source="4.0.0b36, the wheel",
        modules=("flash_attn.cute.interface",),
        capabilities=((9, 0), (13, 0)),
        largest_head_dims=(((9, 0), 256), ((10, 0), 128)),
        more_widths=(
            Widths(keys=192, values=128, capabilities=BLACKWELL),
            # Before, sm100's gradients of several sequences were wrong without a word
            # (TransformerEngine issue 3216; its 2.21 asks for 4.0.0b33 as well).
            Widths(keys=256, values=256, capabilities=BLACKWELL, first_version="4.0.0b33"),
        ),
        unequal_widths=((8, 256), (8, 256)),
        sink_parameter=True,
        anchor_in_window=False,
        deterministic=lambda capability, head_dim: capability < (12, 0),
    ),
    Release(
        number=2,
        package="flash-attn",
        install="pip install flash-attn",
        source="2.8.3",
        modules=("flash_attn.flash_attn_interface",),
        capabilities=((8, 0), (99, 0)),
        dropout=True,
        first_versions=(((8, 0), "2.1.1"), ((10, 0), "2.7.3")),
        first_deterministic="2.4.1",
        first_window="2.3.0",
        first_lse=FLASH_2_FIRST,
    ),
)
"""In the order of preference."""


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Give the reason why no installed flash-attn can serve, or None."""
    common = (
        needs_device(request, capability=(8, 0))
        or needs_our_communication(request)
        or needs_half_precision(request)
    )
    if common:
        return common
    reasons = [
        reason for release in RELEASES if (reason := unsupported_in_release(release, request))
    ]
    return "; ".join(reasons) if len(reasons) == len(RELEASES) else None


def unsupported_in_release(release: Release, request: AttentionRequest) -> str | None:
    """Give the reason why one generation of flash-attn cannot serve, or None."""
    rules = (
        _device_unsupported,
        _widths_unsupported,
        _deterministic_unsupported,
        _mask_unsupported,
    )
    return next((reason for rule in rules if (reason := rule(release, request))), None)


def _label(release: Release) -> str:
    return f"FlashAttention {release.number}"


def _device_unsupported(release: Release, request: AttentionRequest) -> str | None:
    label, hardware = _label(release), request.hardware
    assert hardware.capability is not None
    if not release.capabilities[0] <= hardware.capability < release.capabilities[1]:
        return f"{label} has no kernels for {hardware.name}"
    if release.package not in hardware.packages:
        return f"{label} is not installed ({release.install})"
    first = _since(release.first_versions, hardware.capability)
    if _found(release, request) < Version(first):
        return (
            f"{label} serves {hardware.name} from {first} on, found "
            f"{hardware.packages[release.package]}; upgrade it"
        )
    return None


def _widths_unsupported(release: Release, request: AttentionRequest) -> str | None:
    label, widths = _label(release), (request.head_dim, request.value_width)
    capability = request.hardware.capability
    assert capability is not None
    largest = _since(release.largest_head_dims, capability)
    more = [
        more
        for more in release.more_widths
        if (more.keys, more.values) == widths
        and more.capabilities[0] <= capability < more.capabilities[1]
    ]
    got = "x".join(str(width) for width in dict.fromkeys(widths))
    if more and _found(release, request) < Version(more[0].first_version):
        return (
            f"{label} has right gradients for head dimension {got} on {request.hardware.name} from "
            f"{more[0].first_version} on, found {_found(release, request)}; upgrade it"
        )
    if any(width % 8 for width in widths) or (max(widths) > largest and not more):
        return (
            f"{label} is for head dimensions up to {largest} that are multiples of 8, got {got} "
            "(--kv-channels)"
        )
    if request.dropout and not release.dropout:
        return f"{label} has no dropout, got --attention-dropout {request.dropout:g}; set it to 0"
    return None


def _deterministic_unsupported(release: Release, request: AttentionRequest) -> str | None:
    if not request.deterministic:
        return None
    label, found = _label(release), _found(release, request)
    assert request.hardware.capability is not None
    if not release.deterministic(request.hardware.capability, request.head_dim):
        return (
            f"{label} has no deterministic backward pass for head dimension {request.head_dim} on "
            f"{request.hardware.name}; leave out --deterministic-mode"
        )
    if found < Version(release.first_deterministic):
        return (
            f"{label} has a deterministic backward pass from {release.first_deterministic} on, "
            f"found {found}; upgrade it, or leave out --deterministic-mode"
        )
    return None


def _mask_unsupported(release: Release, request: AttentionRequest) -> str | None:
    """Windows, the anchor in them, and sinks."""
    label, found = _label(release), _found(release, request)
    assert request.hardware.capability is not None
    if request.anchor_in_window and not release.anchor_in_window:
        return (
            f"{label} cannot keep the anchor in a window (--anchor-in-window); use "
            "--anchor-attention-backend varlen or flex"
        )
    if request.sink and release.sink_parameter and _no_sinks(request):
        return f"{label} has no sinks on {request.hardware.name} at this head dimension"
    needed = []
    if request.window:
        needed.append(("sliding windows", release.first_window))
    if request.anchor_in_window or request.sink:
        needed.append(("sinks and anchors in windows", release.first_lse))
    for what, first in needed:
        if found < Version(first):
            return f"{label} has {what} from {first} on, found {found}; upgrade it"
    if request.dropout and (request.window or request.sink):
        return f"--attention-dropout {request.dropout:g} with a window or a sink: set it to 0"
    return None


def _no_sinks(request: AttentionRequest) -> bool:
    """FlashAttention 4's backward pass of sinks: sm90 to sm110, but for 256 on sm100 and sm110."""
    assert request.hardware.capability is not None
    major = request.hardware.capability[0]
    return major >= 12 or (major >= 10 and request.head_dim == 256)


def _since(values: tuple[tuple[tuple[int, int], Any], ...], capability: tuple[int, int]) -> Any:
    return [value for since, value in values if since <= capability][-1]


def _found(release: Release, request: AttentionRequest) -> Version:
    return Version(request.hardware.packages[release.package])


def attend(
    q_THD: Tensor,
    k_KGD: Tensor,
    v_KGE: Tensor,
    *,
    runs: Runs,
    scale: float,
    dropout: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attend as `Attend` says, in bfloat16 or float16, on a CUDA device."""
    keeps_anchor = runs.window is not None and runs.window.keeps_anchor
    request = AttentionRequest(
        head_dim=q_THD.shape[-1],
        value_dim=v_KGE.shape[-1],
        dtype=q_THD.dtype,
        dropout=dropout,
        window=runs.window is not None,
        anchor_in_window=keeps_anchor,
        sink=sink_H is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        hardware=this_hardware(),
    )
    release = next(r for r in RELEASES if unsupported_in_release(r, request) is None)
    width = v_KGE.shape[-1]
    if not _takes_unequal(release, request):
        q_THD, k_KGD, v_KGE = equal_widths(q_THD, k_KGD, v_KGE)
    function = varlen_function(release)
    if keeps_anchor or (sink_H is not None and not release.sink_parameter):
        kernel = FlashLse(release.number, inspect.getmodule(function), runs, scale)
        out = attend_with_lse(q_THD, k_KGD, v_KGE, runs, kernel, scale=scale, sink_H=sink_H)
    else:
        out = call(
            function, q_THD, k_KGD, v_KGE, runs=runs, scale=scale, dropout=dropout, sink_H=sink_H
        )
    return out[..., :width]


def _takes_unequal(release: Release, request: AttentionRequest) -> bool:
    if release.unequal_widths is None:
        return False
    (first_key, last_key), (first_value, last_value) = release.unequal_widths
    keys, values = request.head_dim, request.value_width
    return first_key <= keys <= last_key and first_value <= values <= last_value


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
    v_KGE: Tensor,
    *,
    runs: Runs,
    scale: float,
    dropout: float,
    sink_H: Tensor | None = None,
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
    if sink_H is not None:
        arguments["learnable_sink"] = sink_H
    result = function(
        q_THD.contiguous(),
        k_KGD.contiguous(),
        v_KGE.contiguous(),
        cu_seqlens_q=runs.cu_q,
        cu_seqlens_k=runs.cu_k,
        softmax_scale=scale,
        causal=True,
        **arguments,
    )
    # Some generations return the log-sum-exp too.
    return result[0] if isinstance(result, tuple) else result
