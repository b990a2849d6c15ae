"""Kernels for causal attention inside documents, chosen by name from a lazy table.

A backend is a module with ``unsupported_reason(request) -> str | None``, a pure function that says
why the backend cannot serve a request, and with one of

- ``attend(q_THD, k_KGD, v_KGE, *, runs, scale, dropout, sink_H) -> out_THE`` (`Attend`);
- ``bind(layer) -> attend``, where each layer needs an object of its own.

Importing this package imports no kernel library.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_anchor.attention.backends.request import (
    HALF,
    AttentionRequest,
    Hardware,
    this_hardware,
)
from megatron_anchor.attention.runs import Runs

__all__ = ["BACKENDS", "AttentionRequest", "Choice", "Hardware", "this_hardware"]

BACKENDS = {
    name: f"megatron_anchor.attention.backends.{name}"
    for name in ("te", "flash", "varlen", "flex", "sdpa")
}
"""Name to module, in the order in which ``auto`` prefers them for 16 bits on a CUDA device."""

EVERYWHERE = ("sdpa",)
"""What ``auto`` takes without a CUDA device and in float32, where other kernels were not tried."""


class Attend(Protocol):
    """A kernel as a layer calls it."""

    def __call__(
        self,
        q_THD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        *,
        runs: Runs,
        scale: float,
        dropout: float,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Attend causally inside every run (`megatron_anchor.attention.runs`).

        Args:
            q_THD: [T, H, D] rotated queries of all runs.
            k_KGD: [K, G, D] rotated keys of all runs; G divides H.
            v_KGE: [K, G, E] values.
            runs: which queries see which keys.
            scale: factor of the logits.
            dropout: probability of dropping an attention weight.
            sink_H: [H] logits of the heads' sinks, None for none.

        Returns:
            [T, H, E] in the dtype of ``q_THD``.
        """
        ...


class Backend(Protocol):
    """Interface of a backend's module; `Layer` says when it has ``bind`` in place of ``attend``."""

    attend: Attend

    def unsupported_reason(self, request: AttentionRequest) -> str | None:
        """Give the reason why this backend cannot serve the request, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a kernel with an object a layer is built from."""

    config: TransformerConfig
    layer_number: int
    """1-based, in the whole model."""
    scale: float
    """Factor of the logits."""
    pg_collection: ProcessGroupCollection
    cp_comm_type: str | None = None
    """Kind of the kernel's own context parallelism, None where it has none to do."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend that can serve, and why those that ``auto`` would rather take cannot."""

    name: str
    passed_over: tuple[str, ...] = ()
    """``name: reason`` of each."""

    def explain(self) -> str:
        """Say it in a few lines for the log."""
        lines = [f"attention kernel: {self.name}"]
        names: dict[str, list[str]] = {}
        for passed in self.passed_over:
            name, reason = passed.split(": ", 1)
            names.setdefault(reason, []).append(name)
        lines += [f"  not {', '.join(same)}: {reason}" for reason, same in names.items()]
        return "\n".join(lines)


def load_backend(name: str) -> Backend:
    """Import a backend's module.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown --anchor-attention-backend {name!r}{hint} (choose from "
            f"{', '.join(['auto', *BACKENDS])})"
        )
    module: Any = importlib.import_module(BACKENDS[name])
    return module


def bind_backend(name: str, layer: Layer) -> Attend:
    """Give a layer its kernel.

    Args:
        name: a name of `BACKENDS`.
        layer: what it is for; backends without state do not look at it.
    """
    module = load_backend(name)
    bind = getattr(module, "bind", None)
    return module.attend if bind is None else bind(layer)


def choose_backend(name: str, request: AttentionRequest) -> Choice:
    """Resolve ``auto`` and refuse what cannot serve.

    Args:
        name: a name of `BACKENDS`, or ``auto`` for the first one that can serve.
        request: what is asked of it.

    Returns:
        A backend that can serve, with the reasons against those before it.

    Raises:
        ValueError: with the reason of each backend that was asked and cannot serve.
    """
    if name != "auto":
        candidates: tuple[str, ...] = (name,)
    else:
        fast = request.hardware.capability is not None and request.dtype in HALF
        candidates = tuple(BACKENDS) if fast else EVERYWHERE
    reasons: list[str] = []
    for candidate in candidates:
        reason = load_backend(candidate).unsupported_reason(request)
        if reason is None:
            return Choice(name=candidate, passed_over=tuple(reasons))
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"--anchor-attention-backend {name} cannot serve: " + "; ".join(reasons))
