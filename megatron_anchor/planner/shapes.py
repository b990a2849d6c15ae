"""What a plan needs to know of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.windows import FULL, LayerKind, LayerWindows, Window


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of multi-latent attention (arXiv 2405.04434, section 2.1), by Hugging Face's names."""

    q_lora_rank: int | None
    """None: queries are projected from the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that layers have instead of an MLP."""

    number: int
    per_token: int
    """Routed experts of a token."""
    ffn: int
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Width of the experts that every token has, all together."""
    dense_layers: int = 0
    """First layers, which have an MLP."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and what `Model` does not say of it."""

    model: Model
    ffn: int
    """Width of the MLP in layers without experts."""
    latent: Latent | None = None
    experts: Experts | None = None
    window: int | None = None
    """Keys that a query sees in layers with a window, its own included."""
    windowed: tuple[bool, ...] = ()
    """Whether each layer has the window; empty: none."""
    sinks: bool = False
    """A learned logit per head that takes attention away from all keys."""
    predicted: int = 0
    """Layers of multi-token prediction."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Megatron's arguments that `Model` does not lead to, by their names."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query and key."""
        if self.latent is None:
            return self.model.head
        return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's value and output."""
        return self.latent.v_head_dim if self.latent else self.model.head

    @property
    def dense_layers(self) -> int:
        """Layers without experts; they are the first."""
        return self.experts.dense_layers if self.experts else self.model.layers

    @property
    def layers(self) -> int:
        """All layers but those of multi-token prediction."""
        return self.model.layers

    @cached_property
    def windows(self) -> LayerWindows:
        """The windows of all layers."""
        if self.window is None or not any(self.windowed):
            return FULL
        counts = Counter(self.windowed)
        kinds = {True: Window(size=self.window), False: None}
        return LayerWindows(tuple(LayerKind(kinds[has], n) for has, n in counts.items()))
