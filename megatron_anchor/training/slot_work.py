"""The work of a slot that does not depend on its document, in units of attention's.

Balancing (`packing.balance`) adds both: a document of l slots costs l^2, each slot `slot_work`.
With the forward pass per layer (two operations per multiply-add):

  matrix products   2 x entries of all matrices that a token passes
  attention         2 x heads x (query + value dimensions) per pair, and l^2 / 2 pairs

A dense layer of width h with an MLP of 4 h has 24 h^2 against 2 h l^2: 12 h.
"""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple

from megatron_anchor.training.latent_rules import is_latent


class _Attention(NamedTuple):
    """One layer of attention."""

    matrices: int
    """Entries of its projections."""
    channels: int
    """Query and value dimensions of all heads."""


def slot_work(args: Namespace) -> float:
    """Linear work of a slot over that of a unit of l^2, a mean over all layers.

    Args:
        args: Megatron's, validated. Layers of multi-token prediction count as the model's last
            layer, each with an output layer of its own.
    """
    depths = args.mtp_num_layers or 0
    hidden, attention = args.hidden_size, _attention(args)
    have_experts = _layers_with_experts(args)
    have_experts += have_experts[-1:] * depths
    matrices = sum(_mlp(args, experts=experts) for experts in have_experts)
    matrices += len(have_experts) * attention.matrices
    matrices += depths * 2 * hidden * hidden + (1 + depths) * hidden * args.padded_vocab_size
    return 2 * matrices / (attention.channels * len(have_experts))


def _attention(args: Namespace) -> _Attention:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not is_latent(args):
        groups = args.num_query_groups if args.group_query_attention else heads
        return _Attention(
            matrices=2 * hidden * args.kv_channels * (heads + groups),
            channels=2 * heads * args.kv_channels,
        )
    query, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    down = args.kv_lora_rank + args.qk_pos_emb_head_dim
    up = args.kv_lora_rank * heads * (args.qk_head_dim + value)
    if args.q_lora_rank is None:
        up += hidden * heads * query
    else:
        down += args.q_lora_rank
        up += args.q_lora_rank * heads * query
    return _Attention(
        matrices=hidden * down + up + heads * value * hidden, channels=heads * (query + value)
    )


def _layers_with_experts(args: Namespace) -> list[bool]:
    """Whether each of the model's layers has experts."""
    if not args.num_experts:
        return [False] * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(args.num_layers)]
    return [bool(here) for here in frequency]


def _mlp(args: Namespace, *, experts: bool) -> int:
    """Entries of the matrices that a token passes behind a layer's attention."""
    gated = args.swiglu or args.quick_geglu
    hidden, matrices = args.hidden_size, 3 if gated else 2
    if not experts:
        return matrices * hidden * args.ffn_hidden_size
    width = args.moe_router_topk * args.moe_ffn_hidden_size
    width += args.moe_shared_expert_intermediate_size or 0
    return matrices * hidden * width + hidden * args.num_experts
