"""`AnchorCoreAttention` on a hand-made config and process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Alone:
    """A context-parallel group of one rank, without torch.distributed."""

    def size(self) -> int:
        return 1


def attention_layer(
    *,
    heads: int,
    head_dim: int,
    backend: str,
    group: Any = None,
    config_values: dict[str, Any] | None = None,
    **bound: Any,
):
    """Build the module of one layer.

    Args:
        heads: query heads of this rank.
        head_dim: dimensions of a head.
        backend: name of the kernel.
        group: context-parallel group, None for one rank.
        config_values: what to change in Megatron's config afterwards.
        bound: more of what the layer spec binds; ``rotary`` is made from ``head_dim`` without it.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_anchor.attention.core import AnchorCoreAttention
    from megatron_anchor.attention.rope import RotarySettings

    config = TransformerConfig(
        num_layers=1, hidden_size=head_dim * heads, num_attention_heads=heads
    )
    for name, value in {"attention_dropout": 0.0, **(config_values or {})}.items():
        setattr(config, name, value)
    return AnchorCoreAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=SimpleNamespace(cp=Alone() if group is None else group),
        **{"rotary": RotarySettings(head_dim=head_dim), "backend": backend, **bound},
    )
