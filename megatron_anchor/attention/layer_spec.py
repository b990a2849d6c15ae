"""Megatron's own GPT block spec with this package's attention, layer and router in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_anchor.attention.backends.request import ULYSSES
from megatron_anchor.attention.core import AnchorCoreAttention
from megatron_anchor.attention.latent import LATENT_ATTENTION
from megatron_anchor.attention.layer import AnchorTransformerLayer
from megatron_anchor.attention.multi_token import (
    LAYERS_PATCH,
    LOSS_PATCH,
    AnchorMultiTokenLayer,
)
from megatron_anchor.attention.norms import TorchNorm
from megatron_anchor.attention.rope import RotarySettings, logit_scale
from megatron_anchor.attention.router import AnchorRouter
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT
from megatron_anchor.patches import apply


@dataclass
class AnchorBlockSubmodules(TransformerBlockSubmodules):
    """Megatron's block spec, with that of the layers of multi-token prediction."""

    mtp: MultiTokenPredictionBlockSubmodules | None = None
    """For ``GPTModel(..., mtp_block_spec=spec.mtp)``; None where this stage has none."""


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
) -> AnchorBlockSubmodules:
    """Give the spec of this pipeline stage's layers, dense or MoE.

    A block spec and not a single layer's: the latter would fix the final norm to one that refuses
    sequence parallelism.

    Args:
        config: Megatron's transformer config.
        rotary: rotation of queries and keys; with multi-latent attention of their rotated part,
            in neighbouring pairs.
        backend: name of the attention kernel, already resolved.
        precision: of the attention core, ``model`` or ``fp32``.
        context_parallel: how ranks communicate, one of `request.CONTEXT_PARALLEL`.
        gather_memory: bytes that gathered keys and values may take.
        anchor_in_window: whether the anchor stays visible in layers with a window.
        vp_stage: virtual pipeline stage.
        pp_rank: pipeline rank; None means this process' own.

    Returns:
        Spec whose layers all hold `AnchorCoreAttention`, and `AnchorRouter` where they have
        experts; where the config has ``mtp_num_layers``, its ``mtp`` too.

    Raises:
        ValueError: the rotation is not the one that multi-latent attention has.
    """
    own = _OwnParts(
        config=config,
        rotary=rotary,
        precision=precision,
        core={
            "backend": backend,
            "precision": precision,
            "context_parallel": context_parallel,
            "gather_memory": gather_memory,
            "anchor_in_window": anchor_in_window,
        },
    )
    host: dict[str, Any] = {
        "use_transformer_engine": config.transformer_impl == "transformer_engine",
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
        "vp_stage": vp_stage,
        "pp_rank": pp_rank,
    }
    spec = AnchorBlockSubmodules(**vars(get_gpt_decoder_block_spec(config, **host)))
    # Layers that are alike are one object.
    for layer in {id(layer): layer for layer in spec.layer_specs}.values():
        own.put_into(layer)
    _replace_torch_norms(spec)
    if config.mtp_num_layers:
        last = get_gpt_decoder_layer_specs(config, **host)[-1]
        own.put_into(last)
        spec.mtp = _multi_token_spec(config, last, vp_stage=vp_stage, pp_rank=pp_rank)
    return spec


@dataclass(frozen=True, kw_only=True)
class _OwnParts:
    """What takes the place of Megatron's parts in a layer's spec."""

    config: TransformerConfig
    rotary: RotarySettings
    precision: str
    core: dict[str, Any]
    """Arguments of `AnchorCoreAttention`, the rotation aside."""

    def put_into(self, layer: ModuleSpec) -> None:
        """Change a layer's spec."""
        layer.module = AnchorTransformerLayer
        attention = layer.submodules.self_attention
        if attention.module in LATENT_ATTENTION:
            self._put_latent_attention_into(attention)
        else:
            attention.submodules.core_attention = partial(
                AnchorCoreAttention, rotary=self.rotary, **self.core
            )
        layer.submodules.mlp = _with_anchor_router(layer.submodules.mlp)
        _replace_torch_norms(layer.submodules)
        _replace_torch_norms(attention.submodules)

    def _put_latent_attention_into(self, attention: ModuleSpec) -> None:
        config: Any = self.config
        if self.rotary.rotated_dim != config.qk_pos_emb_head_dim or not self.rotary.interleaved:
            raise ValueError(
                f"multi-latent attention rotates {config.qk_pos_emb_head_dim} dimensions of a head "
                f"in neighbouring pairs, got {self.rotary}: pass "
                f"RotarySettings(head_dim={config.qk_pos_emb_head_dim}, interleaved=True, ...)"
            )
        width = config.qk_head_dim + config.qk_pos_emb_head_dim
        attention.module = LATENT_ATTENTION[attention.module]
        attention.params = {
            **attention.params,
            "rotary": self.rotary,
            "precision": self.precision,
        }
        # Megatron's layer knows its own flags for yarn alone, and so may give another scale.
        scale = logit_scale(self.rotary, head_dim=width)
        attention.submodules.core_attention = ModuleSpec(
            module=AnchorCoreAttention,
            params={"rotary": None, "logit_scale": scale, **self.core},
        )


def _multi_token_spec(
    config: TransformerConfig, layer: ModuleSpec, *, vp_stage: int | None, pp_rank: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers of multi-token prediction, which are like the model's last; None on other stages.

    Megatron computes their loss in a function that a model has no way to choose.
    """
    apply(LOSS_PATCH)
    spec = get_gpt_mtp_block_spec(
        config,
        TransformerBlockSubmodules(layer_specs=[layer]),
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    for mtp_layer in spec.layer_specs if spec is not None else ():
        mtp_layer.module = AnchorMultiTokenLayer
        _replace_torch_norms(mtp_layer.submodules)
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

    def provide(model_config: Any, vp_stage: int | None = None) -> AnchorBlockSubmodules:
        if model_config.transformer.mtp_num_layers:
            apply(LAYERS_PATCH)
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
