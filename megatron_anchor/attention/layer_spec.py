"""Megatron's own GPT block spec with this package's attention, layer and router in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_anchor.attention.backends.request import ULYSSES
from megatron_anchor.attention.core import AnchorCoreAttention
from megatron_anchor.attention.layer import AnchorTransformerLayer
from megatron_anchor.attention.norms import TorchNorm
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.attention.router import AnchorRouter
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT


def anchor_block_spec(
    config: TransformerConfig,
    *,
    rotary: RotarySettings,
    backend: str,
    precision: str = "model",
    context_parallel: str = ULYSSES,
    gather_memory: int = GATHER_LIMIT,
    anchor_in_window: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Give the spec of this pipeline stage's layers, dense or MoE.

    A block spec and not a single layer's: the latter would fix the final norm to one that refuses
    sequence parallelism.

    Args:
        config: Megatron's transformer config.
        rotary: rotation of queries and keys.
        backend: name of the attention kernel, already resolved.
        precision: of the attention core, ``model`` or ``fp32``.
        context_parallel: how ranks communicate, one of `request.CONTEXT_PARALLEL`.
        gather_memory: bytes that gathered keys and values may take.
        anchor_in_window: whether the anchor stays visible in layers with a window.
        vp_stage: virtual pipeline stage.
        pp_rank: pipeline rank; None means this process' own.

    Returns:
        Spec whose layers all hold `AnchorCoreAttention`, and `AnchorRouter` where they have
        experts.
    """
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    core_attention = partial(
        AnchorCoreAttention,
        rotary=rotary,
        backend=backend,
        precision=precision,
        context_parallel=context_parallel,
        gather_memory=gather_memory,
        anchor_in_window=anchor_in_window,
    )
    for layer in spec.layer_specs:
        layer.module = AnchorTransformerLayer
        layer.submodules.self_attention.submodules.core_attention = core_attention
        layer.submodules.mlp = _with_anchor_router(layer.submodules.mlp)
        _replace_torch_norms(layer.submodules)
        _replace_torch_norms(layer.submodules.self_attention.submodules)
    _replace_torch_norms(spec)
    return spec


def layer_spec_provider(
    *,
    rotary: RotarySettings,
    backend: str,
    precision: str = "model",
    context_parallel: str = ULYSSES,
    gather_memory: int = GATHER_LIMIT,
    anchor_in_window: bool = False,
) -> Callable[..., Any]:
    """Wrap `anchor_block_spec` in the signature of ``GPTModelConfig.transformer_layer_spec``."""

    def provide(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        return anchor_block_spec(
            model_config.transformer,
            rotary=rotary,
            backend=backend,
            precision=precision,
            context_parallel=context_parallel,
            gather_memory=gather_memory,
            anchor_in_window=anchor_in_window,
            vp_stage=vp_stage,
        )

    return provide


def _with_anchor_router(mlp: Any) -> Any:
    """Replace the router in the spec of an MoE layer; dense layers stay as they are."""
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return mlp
    submodules = dataclasses.replace(mlp.keywords["submodules"], router=AnchorRouter)
    return partial(MoELayer, **{**mlp.keywords, "submodules": submodules})


def _replace_torch_norms(submodules: Any) -> None:
    for name, module in vars(submodules).items():
        if module is WrappedTorchNorm:
            setattr(submodules, name, TorchNorm)
