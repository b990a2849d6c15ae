"""A model's shape from its config.json, without torch or transformers.

The keys are Hugging Face's. Only what costs work or memory is read here, with the Megatron
arguments that go with it; whether a folder can be converted is for `checkpoint` to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from megatron_anchor.checkpoint.hugging_face_config import SWIGLU_LIMIT, architecture, rope_of
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.errors import UserError
from megatron_anchor.planner.shapes import Experts, Latent, Shape

Config = Mapping[str, Any]

TRAITS: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "MixtralForCausalLM": {},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
    "DeepseekV2ForCausalLM": {"qk_norm": True},
    "DeepseekV3ForCausalLM": {"qk_norm": True},
    "Glm4MoeForCausalLM": {},
    "GptOssForCausalLM": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
}
"""Architecture to what its class fixes, as fields of `Model`. DeepSeek's norms are of latents."""

DEFAULT_WINDOWS = {"MistralForCausalLM": 4096, "GptOssForCausalLM": 128}
"""Windows of configs that have no ``sliding_window``; a null means none."""

MOST, MOST_LAYERS = 10**9, 10**4
"""Bounds of a config's numbers, far beyond any model: what is larger is a mistake."""

CHOOSES_BY_GROUP = ("group_limited_greedy", "noaux_tc")
"""DeepSeek's ``topk_method`` where a token's experts come from few groups."""


def shape_of(config: Config, *, model: Model | None = None) -> Shape:
    """Read a shape.

    Args:
        config: content of a config.json.
        model: what `checkpoint` made of it, where it knows the family.

    Raises:
        UserError: for an unknown architecture, a missing number, or something else in its place.
        UserError: for contradicting forms of RoPE.
    """
    model = model or _model_of(config)
    latent = _latent(config) if config.get("kv_lora_rank") else None
    experts = _experts(config, model)
    window, windowed = _windows(config, model)
    return Shape(
        model=model,
        ffn=_size(config, "intermediate_size"),
        latent=latent,
        experts=experts,
        window=window,
        windowed=windowed,
        sinks=model.family == "GptOssForCausalLM",
        predicted=_integer(config, "num_nextn_predict_layers", 0),
        arguments=_latent_arguments(latent)
        | _expert_arguments(config, model, experts)
        | _layer_arguments(config, model, window, windowed),
    )


def _integer(config: Config, key: str, default: int | None = None, *, least: int = 0) -> int:
    """Take a whole number.

    Raises:
        UserError: for anything else.
    """
    value = default if config.get(key) is None else config[key]
    most = MOST_LAYERS if key in ("num_hidden_layers", "num_nextn_predict_layers") else MOST
    if type(value) is int and value > most:
        raise UserError(f"config.json: {key} is {value}, expected at most {most}")
    if type(value) is not int or value < least:
        more = f" of at least {least}" if least else ""
        raise UserError(f"config.json: {key} is {value!r}, expected a whole number{more}")
    return value


def _size(config: Config, key: str, default: int | None = None) -> int:
    """Take a whole number of at least 1."""
    return _integer(config, key, default, least=1)


def _number(config: Config, key: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"config.json: {key} is {value!r}, expected a number")
    return float(value)


def _model_of(config: Config) -> Model:
    family = architecture(config)
    if family not in TRAITS:
        raise UserError(f"config.json: architecture {family}: known are {', '.join(TRAITS)}")
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    positions = _size(config, "max_position_embeddings")
    missing = SimpleNamespace(rope_theta=1e4, max_position_embeddings=positions)
    _check_rope(config)
    base, scaling = rope_of(config, missing)
    experts = _number_of_experts(config)
    traits: dict[str, Any] = dict(TRAITS[family])
    return Model(
        family=family,
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_size(config, "moe_intermediate_size", _size(config, "intermediate_size")),
        heads=heads,
        groups=_size(config, "num_key_value_heads", heads),
        head=_size(config, "head_dim", hidden // max(1, heads)),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family == "SmolLM3ForCausalLM")),
        epsilon=_number(config, "rms_norm_eps", 1e-6),
        rotary_base=base,
        scaling=scaling,
        positions=positions,
        experts=experts,
        experts_per_token=_integer(config, "num_experts_per_tok") if experts else 0,
        # Qwen and DeepSeek say so; Mixtral and gpt-oss always do.
        normalized_router=bool(config.get("norm_topk_prob", not config.get("kv_lora_rank"))),
        router_loss_coefficient=_number(
            config, "router_aux_loss_coef", _number(config, "aux_loss_alpha", 0.0)
        ),
        **_chosen(config, family) | traits,
    )


def _chosen(config: Config, family: str) -> dict[str, bool]:
    """What a config chooses in some families."""
    bias = bool(config.get("attention_bias", False))
    if family == "Glm4MoeForCausalLM":  # its output projection has no bias
        return {"qkv_bias": bias, "qk_norm": bool(config.get("use_qk_norm", False))}
    if family != "LlamaForCausalLM":
        return {}
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _check_rope(config: Config) -> None:
    """Check the types of what `rope_of` reads.

    Raises:
        UserError: for anything but numbers and objects.
    """
    _number(config, "rope_theta", 1e4)
    for key in ("rope_parameters", "rope_scaling"):
        form = config.get(key)
        if form is None:
            continue
        if not isinstance(form, dict):
            raise UserError(f"config.json: {key} is {form!r}, expected an object")
        _number(form, "rope_theta", 1e4)
        for name in ("rope_type", "type"):
            if not isinstance(form.get(name, ""), str):
                raise UserError(f"config.json: {key}: {name} is {form[name]!r}, expected a name")


def _number_of_experts(config: Config) -> int:
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((_integer(config, key) for key in keys if config.get(key) is not None), 0)


def _experts(config: Config, model: Model) -> Experts | None:
    if not model.experts:
        return None
    if not 1 <= model.experts_per_token <= model.experts:
        raise UserError(
            f"config.json: num_experts_per_tok {model.experts_per_token} of {model.experts} experts"
        )
    dense = _integer(config, "first_k_dense_replace", 0)
    if dense > model.layers:
        raise UserError(f"config.json: first_k_dense_replace {dense} of {model.layers} layers")
    return Experts(
        number=model.experts,
        per_token=model.experts_per_token,
        ffn=model.ffn,
        shared_ffn=_integer(config, "n_shared_experts", 0) * model.ffn,
        dense_layers=dense,
    )


def _latent(config: Config) -> Latent:
    rank = config.get("q_lora_rank")
    return Latent(
        q_lora_rank=None if rank is None else _size(config, "q_lora_rank"),
        kv_lora_rank=_size(config, "kv_lora_rank"),
        qk_nope_head_dim=_size(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(config, "qk_rope_head_dim"),
        v_head_dim=_size(config, "v_head_dim"),
    )


def _windows(config: Config, model: Model) -> tuple[int | None, tuple[bool, ...]]:
    """Give the window and the layers that have it, as transformers reads them."""
    if model.family.startswith(("Qwen", "SmolLM3")) and not config.get("use_sliding_window"):
        return None, ()
    window = config.get("sliding_window", DEFAULT_WINDOWS.get(model.family))
    if window is None:
        return None, ()
    window = _size({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != model.layers:
            raise UserError(f"config.json: layer_types {kinds!r}: expected {model.layers} names")
        return window, tuple(kind == "sliding_attention" for kind in kinds)
    first = 0
    if model.family.startswith("Qwen"):
        first = _integer(config, "max_window_layers", 28)
    elif model.family == "GptOssForCausalLM":
        return window, tuple(layer % 2 == 0 for layer in range(model.layers))
    return window, tuple(layer >= first for layer in range(model.layers))


def _latent_arguments(latent: Latent | None) -> dict[str, Any]:
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "kv_channels": None,
    }


def _expert_arguments(config: Config, model: Model, experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    values: dict[str, Any] = {}
    if experts.dense_layers:
        values["ffn_hidden_size"] = _size(config, "intermediate_size")
        dense = [layer < experts.dense_layers for layer in range(model.layers)]
        values["moe_layer_freq"] = pattern([not here for here in dense])
    if experts.shared_ffn:
        values["moe_shared_expert_intermediate_size"] = experts.shared_ffn
    if (scale := _number(config, "routed_scaling_factor", 1.0)) != 1:
        values["moe_router_topk_scaling_factor"] = scale
    if config.get("topk_method") in CHOOSES_BY_GROUP:
        values["moe_router_num_groups"] = _integer(config, "n_group")
        values["moe_router_group_topk"] = _integer(config, "topk_group")
    if model.family in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"):
        values |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if model.family.startswith("Deepseek"):
        values["moe_router_load_balancing_type"] = "seq_aux_loss"
    return values


def _layer_arguments(
    config: Config, model: Model, window: int | None, windowed: tuple[bool, ...]
) -> dict[str, Any]:
    predicted = _integer(config, "num_nextn_predict_layers", 0)
    values: dict[str, Any] = {"mtp_num_layers": predicted or None}
    if window is not None and any(windowed):
        values["window_size"] = f"{window - 1},0"
        values["window_attn_skip_freq"] = None if all(windowed) else pattern(windowed)
    if (rotated := _number(config, "partial_rotary_factor", 1.0)) != 1:
        values["rotary_percent"] = rotated
    if model.family == "SmolLM3ForCausalLM":
        step = _size(config, "no_rope_layer_interval", 4)
        has_rope = config.get("no_rope_layers")  # 1 means that the layer has RoPE
        if has_rope is None:
            has_rope = [(layer + 1) % step != 0 for layer in range(model.layers)]
        elif not isinstance(has_rope, list) or len(has_rope) != model.layers:
            raise UserError(
                f"config.json: no_rope_layers {has_rope!r}: expected {model.layers} of 0 and 1"
            )
        values["no_rope_freq"] = pattern([not here for here in has_rope])
    if model.family == "GptOssForCausalLM":
        values |= {
            "softmax_type": "learnable",
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": _number(config, "swiglu_limit", SWIGLU_LIMIT),
        }
    return values


def pattern(layers: list[bool] | tuple[bool, ...]) -> str:
    """Write which layers have something as Megatron reads it, such as ``([0]*3+[1]*58)``."""
    for period in range(1, len(layers) // 2 + 1):
        times, rest = divmod(len(layers), period)
        if not rest and tuple(layers[:period]) * times == tuple(layers):
            return f"{_runs(layers[:period])}*{times}"
    return _runs(layers)


def _runs(layers: list[bool] | tuple[bool, ...]) -> str:
    runs = [(value, len(list(run))) for value, run in groupby(layers)]
    return "(" + "+".join(f"[{value:d}]" + (f"*{n}" if n > 1 else "") for value, n in runs) + ")"
