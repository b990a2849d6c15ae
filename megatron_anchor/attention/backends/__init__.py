"""Kernels for causal attention inside documents, chosen by name from a lazy table.

A backend is a module with two functions:

- ``why_not(request) -> str | None``: the reason why it cannot serve, or None;
- ``attend(q_THD, k_TGD, v_TGD, *, packed, scale, dropout) -> out_THD``.

Importing this package imports no kernel library.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_anchor.attention.packed import AnchorPackedSeqParams

BACKENDS = {"sdpa": "megatron_anchor.attention.backends.sdpa"}
"""Name to module, in the order in which ``auto`` prefers them."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What a run asks of its attention kernel."""

    head_dim: int
    dtype: torch.dtype
    context_parallel_kinds: tuple[str, ...] = ()
    """Values of --cp-comm-type when the context-parallel size is larger than 1, else empty."""
    dropout: float = 0.0
    deterministic: bool = False


class Backend(Protocol):
    """Interface of a backend's module."""

    def why_not(self, request: AttentionRequest) -> str | None:
        """Give the reason why this backend cannot serve the request, or None."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        packed: AnchorPackedSeqParams,
        scale: float,
        dropout: float,
    ) -> Tensor:
        """Attend causally inside every document of ``packed``: [T, H, D] in, [T, H, D] out."""
        ...


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
    return importlib.import_module(BACKENDS[name])


def choose_backend(name: str, request: AttentionRequest) -> str:
    """Resolve ``auto`` and refuse what cannot serve.

    Args:
        name: a name of `BACKENDS`, or ``auto`` for the first one that can serve.
        request: what is asked of it.

    Returns:
        The name of a backend that can serve.

    Raises:
        ValueError: with the reason of each backend that was asked and cannot serve.
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else [name]:
        reason = load_backend(candidate).why_not(request)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"--anchor-attention-backend {name} cannot serve: " + "; ".join(reasons))
