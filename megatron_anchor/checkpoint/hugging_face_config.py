"""config.json, read and written in the forms of transformers 4.57 and 5.x.

4.57 has ``rope_theta`` and ``rope_scaling`` (without the base); 5.x has ``rope_parameters`` with
the base inside. What is written holds both, so that either version reads the same rotation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.errors import CheckpointError
from megatron_anchor.checkpoint.families import FAMILIES, family_of, homeless_biases
from megatron_anchor.checkpoint.hugging_face_defaults import check_fields, with_defaults
from megatron_anchor.checkpoint.model import Model

NOT_KEPT = ("transformers_version", "auto_map", "quantization_config", "_name_or_path")
AS_THERE = ("head_dim", "intermediate_size", "max_window_layers")
"""Entries that may be missing or (in a mixture of experts, without a window) mean nothing."""
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        CheckpointError: if it is not there or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def model_of(config: Mapping[str, Any], *, drop_sliding_window: bool = False) -> Model:
    """Read the model's shape from a config.

    Args:
        config: content of config.json.
        drop_sliding_window: accept a sliding window, and train with full attention.

    Raises:
        CheckpointError: for an unknown architecture, a missing field, or a feature that training
            does not have.
    """
    name = architecture(config)
    family = family_of(name)
    config = complete(config)
    heads = config["num_attention_heads"]
    experts = _experts(config)
    theta, scaling = rope_of(config)
    model = Model(
        family=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["moe_intermediate_size" if "Qwen3Moe" in name else "intermediate_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        qk_norm=family.qk_norm,
        epsilon=float(config["rms_norm_eps"]),
        rotary_base=theta,
        scaling=scaling,
        positions=config["max_position_embeddings"],
        **experts,
        **family.biases(config),
    )
    _refuse_unsupported(config, model)
    if not drop_sliding_window:
        refuse_sliding_window(config, positions=model.positions)
    return model


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a mixture of experts has in addition, as fields of `Model`."""
    name = architecture(config)
    if not family_of(name).has_experts:
        return {}
    mixtral = name.startswith("Mixtral")  # always normalizes
    return {
        "experts": config.get("num_experts") or config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "normalized_router": mixtral or config["norm_topk_prob"],
        "router_loss_coefficient": float(config["router_aux_loss_coef"]),
    }


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check a config's fields and add those that it leaves out, as transformers has them.

    Raises:
        CheckpointError: for a field that is missing and must not be, or of the wrong kind.
    """
    check_fields(config)
    return with_defaults(config, family_of(architecture(config)).model_type)


def architecture(config: Mapping[str, Any]) -> str:
    """Name the architecture; configs without ``architectures`` are known by their model_type.

    Raises:
        CheckpointError: for an unknown one.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"config.json: architectures is {names!r}, expected a list of names"
            + (f" such as [{names!r}]" if isinstance(names, str) else "")
        )
    if names:
        return names[0]
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = str(config.get("model_type"))
    if model_type not in by_type:
        raise CheckpointError(
            f"config.json: no architectures, and model_type {model_type!r} is none of "
            f"{', '.join(by_type)}"
        )
    return by_type[model_type]


def rope_of(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Give the base and the scaling (empty: none), from either form of a `complete` config.

    Raises:
        CheckpointError: if both forms are there and differ, or the kind is not known.
    """
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    bases = {
        float(value)
        for value in (config.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta"))
        if value is not None
    }
    forms = [_scaling(form) for form in (new, old) if form]
    if len(bases) > 1 or (len(forms) > 1 and forms[0] != forms[1]):
        raise CheckpointError(
            f"config.json: rope_parameters {new} contradicts rope_theta "
            f"{config.get('rope_theta')} and rope_scaling {old}; keep the right one"
        )
    scaling = forms[0] if forms else {}
    if scaling and scaling["rope_type"] not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope type {scaling['rope_type']!r} is none of default, "
            f"{', '.join(ROPE_TYPES)}"
        )
    if scaling.get("rope_type") in ("yarn", "llama3"):
        # transformers' own default, which must not move when the length is extended.
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return next(iter(bases)), scaling


def _scaling(form: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce one form to the scaling without the base; "type" is the oldest name of the kind."""
    kind = form.get("rope_type", form.get("type", "default"))
    rest = {k: v for k, v in form.items() if k not in ("rope_theta", "rope_type", "type")}
    return {} if kind == "default" else {"rope_type": kind, **rest}


def refuse_sliding_window(config: Mapping[str, Any], *, positions: int) -> None:
    """Refuse a model whose window is shorter than its sequences.

    Args:
        config: content of config.json, or what `complete` made of it.
        positions: longest sequence, after an extension.

    Raises:
        CheckpointError: with the way out.
    """
    window = sliding_window(config)
    if window is not None and window < positions:
        raise CheckpointError(
            f"config.json: sliding_window {window} of {positions} positions; training here has "
            "full attention inside a document. To go on without the window (the exported config "
            "then has none either) add --drop-sliding-window"
        )


def _refuse_unsupported(config: Mapping[str, Any], model: Model) -> None:
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config: quantised weights cannot be trained; take the "
            "model's original ones"
        )
    activation = config["hidden_act"]
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r}, expected 'silu' (SwiGLU)")
    partial = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get(
        "partial_rotary_factor"
    )
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is not supported")
    if homeless := homeless_biases(model):
        raise CheckpointError(
            "config.json: attention_bias true is not supported: Megatron's linear layers have "
            f"biases all or none, and {model.family} has no {' or '.join(homeless)} to export "
            "them to"
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CheckpointError(
            f"config.json: mlp_only_layers {config.get('mlp_only_layers')}, decoder_sparse_step "
            f"{config.get('decoder_sparse_step')}: only experts in every layer are supported"
        )
    if model.heads % model.groups:
        raise CheckpointError(
            f"config.json: num_attention_heads {model.heads} is not a multiple of "
            f"num_key_value_heads {model.groups}"
        )


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Give the window that is in force, None for full attention."""
    config = complete(config)
    if architecture(config).startswith("Qwen"):
        first = config.get("max_window_layers") or 0  # layers below it have full attention
        if not config["use_sliding_window"] or first >= config["num_hidden_layers"]:
            return None
    types = config.get("layer_types")
    if types and "sliding_attention" not in types:
        return None
    return config.get("sliding_window")


def config_for(model: Model, *, dtype: str, like: Mapping[str, Any] | None = None) -> dict:
    """Write the config of a model, in both forms of rope parameters.

    Args:
        model: as trained.
        dtype: of the weights, such as ``bfloat16``.
        like: config of a model of this shape, whose other entries (token ids, dropout, names) are
            kept.
    """
    kept = {k: v for k, v in (like or {}).items() if k not in NOT_KEPT}
    scaling = dict(model.scaling)
    config = {
        **kept,
        "architectures": [model.family],
        "model_type": family_of(model.family).model_type,
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head,
        "hidden_act": "silu",
        "rms_norm_eps": model.epsilon,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.positions,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling or None,
        "rope_parameters": {
            "rope_type": "default",
            **scaling,
            "rope_theta": model.rotary_base,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model.family == "Qwen2ForCausalLM" and model.head * model.heads == model.hidden:
        del config["head_dim"]  # not a field of Qwen2Config
    if model.family == "LlamaForCausalLM":
        config |= {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    elif model.family.startswith("Qwen3"):
        config["attention_bias"] = model.qkv_bias
    config |= _experts_entries(model) | _full_attention(model)
    for name in AS_THERE if like is not None else ():
        if name in kept:
            config[name] = kept[name]
        else:
            config.pop(name, None)
    return config


def _experts_entries(model: Model) -> dict[str, Any]:
    """Describe the experts in the words of the family."""
    if not model.experts:
        return {}
    entries: dict[str, Any] = {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_loss_coefficient,
    }
    if model.family == "Qwen3MoeForCausalLM":
        entries |= {
            "num_experts": model.experts,  # the name in transformers 4.57
            "moe_intermediate_size": model.ffn,
            "norm_topk_prob": model.normalized_router,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return entries


def _full_attention(model: Model) -> dict[str, Any]:
    """Say that there is no sliding window, in the words of the family."""
    if model.family in ("MistralForCausalLM", "MixtralForCausalLM"):
        return {"sliding_window": None}  # the class' default is a window
    if model.family.startswith("Qwen"):
        return {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": model.layers,
            "layer_types": ["full_attention"] * model.layers,
        }
    return {}
