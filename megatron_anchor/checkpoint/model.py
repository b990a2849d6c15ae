"""The shape of a model, in neither side's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PADDED_VOCABULARY_MULTIPLE = 128
"""Megatron's default; such a size can be shared by any usual number of tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What both sides must agree on."""

    family: str
    """Hugging Face's architecture, such as ``LlamaForCausalLM``."""
    layers: int
    hidden: int
    ffn: int
    """Width of the MLP between gate/up and down (of one expert in MoE models)."""
    heads: int
    groups: int
    """Key-value heads."""
    head: int
    """Dimensions of one head."""
    vocabulary: int
    """Rows of the embedding that mean tokens."""
    tied: bool = False
    """The output layer is the embedding."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of gate, up and down."""
    qk_norm: bool = False
    """RMSNorm on every head of queries and keys."""
    epsilon: float = 1e-6
    """Of all RMSNorms."""
    rotary_base: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Hugging Face's rope parameters without the base; empty: plain RoPE."""
    positions: int = 0
    """``max_position_embeddings``."""
    experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    normalized_router: bool = True
    """The weights of the chosen experts add up to 1."""
    router_loss_coefficient: float = field(default=0.0, compare=False)
    swiglu_limit: float = 0.0
    """Where gpt-oss' SwiGLU clamps its inputs; 0: SwiGLU as everywhere else."""
    sinks: bool = False
    """Every head's softmax has one more logit without a key."""
    windows: tuple[int, ...] = ()
    """Keys that a query of each layer sees, its own included, 0: all before it; empty: all in all
    layers."""
    no_rope: tuple[bool, ...] = ()
    """Which layers do not rotate queries and keys; empty: none."""
    padded_vocabulary: int = 0
    """Rows of Megatron's embedding; 0: the next multiple of 128."""

    @property
    def dims(self) -> dict[str, int]:
        """Numbers behind the names of dimensions that the family tables use."""
        return {
            "hidden": self.hidden,
            "ffn": self.ffn,
            "query": self.heads * self.head,
            "key": self.groups * self.head,
            "qkv": (self.heads + 2 * self.groups) * self.head,
            "head": self.head,
            "heads": self.heads,
            "groups": self.groups,
            "gate and up": 2 * self.ffn,
            "vocabulary": self.vocabulary,
            "padded vocabulary": self.padded_rows,
            "experts": self.experts,
        }

    @property
    def padded_rows(self) -> int:
        """Rows of the embedding in Megatron."""
        multiple = PADDED_VOCABULARY_MULTIPLE
        return self.padded_vocabulary or -(-self.vocabulary // multiple) * multiple

    @property
    def windows_in_force(self) -> tuple[int, ...]:
        """The windows, those left out that are no shorter than the longest sequence."""
        shorter = tuple(size if size < self.positions else 0 for size in self.windows)
        return shorter if any(shorter) else ()

    # Conditions that the family tables name.

    @property
    def untied(self) -> bool:
        """The output layer has its own weight."""
        return not self.tied

    @property
    def linear_bias(self) -> bool:
        """Megatron's linear layers have biases: all of them or none (the qkv bias aside)."""
        return self.output_bias or self.mlp_bias

    @property
    def megatron_qkv_bias(self) -> bool:
        """Megatron's ``linear_qkv`` has a bias."""
        return self.qkv_bias or self.linear_bias

    @property
    def no_qkv_bias(self) -> bool:
        """Only Megatron has this bias."""
        return self.megatron_qkv_bias and not self.qkv_bias

    @property
    def no_output_bias(self) -> bool:
        """Only Megatron has this bias."""
        return self.linear_bias and not self.output_bias

    @property
    def no_mlp_bias(self) -> bool:
        """Only Megatron has these biases."""
        return self.linear_bias and not self.mlp_bias
