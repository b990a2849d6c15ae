"""Sliding windows of attention layers, and the pairs of query and key that they leave.

A window counts slots inside a document, of which the first is its copy of the anchor. At inference
slot and position are the same, so this is the window that a model sees there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_anchor.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Window:
    """A query sees itself and the `size` - 1 slots before it in its document."""

    size: int
    """Keys that a query sees, its own included (Hugging Face's ``sliding_window``; Megatron's
    ``--window-size`` is (size - 1, 0))."""
    keeps_anchor: bool = False
    """Whether the document's first slot, its copy of the anchor, stays visible to all its slots."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a window of {self.size} keys: expected 1 or more")


def is_visible(query_places: Any, key_places: Any, window: Window | None) -> Any:
    """Whether queries see keys of their own document.

    Args:
        query_places: integers, places in the document; NumPy's or torch's, as all of these.
        key_places: integers that broadcast with them.
        window: None = all keys before a query and its own.

    Returns:
        bool of the shape that both broadcast to.
    """
    seen = key_places <= query_places
    if window is None:
        return seen
    near = key_places > query_places - window.size
    if window.keeps_anchor:
        near = near | (key_places == 0)
    return seen & near


class LayerKind(NamedTuple):
    """Layers that are alike."""

    window: Window | None
    layers: int


@dataclass(frozen=True)
class LayerWindows:
    """The windows of a model's attention layers."""

    kinds: tuple[LayerKind, ...] = (LayerKind(None, 1),)
    """Each window once, with the number of its layers."""

    def pairs_before(self, places: np.ndarray) -> np.ndarray:
        """float64: pairs of the queries before each place in a document, a mean over the layers.

        Args:
            places: integers, 0 or more.
        """
        places = np.asarray(places, dtype=np.float64)
        layers = sum(kind.layers for kind in self.kinds)
        weighted = (_pairs_before(places, k.window) * (k.layers / layers) for k in self.kinds)
        return np.asarray(sum(weighted))

    def pairs(self, lengths: np.ndarray) -> float:
        """Pairs inside documents of these lengths, a mean over the layers."""
        return float(self.pairs_before(lengths).sum())


FULL = LayerWindows()
"""No window in any layer."""


def _pairs_before(places: np.ndarray, window: Window | None) -> np.ndarray:
    if window is None:
        return places * (places + 1) / 2
    inside = np.minimum(places, window.size)
    keys_behind = window.size + window.keeps_anchor  # of each query further from the start
    return inside * (inside + 1) / 2 + (places - inside) * keys_behind
