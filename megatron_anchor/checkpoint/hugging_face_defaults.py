"""Fields of config.json: of the right kind, and transformers' own values for missing ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_anchor.checkpoint.errors import CheckpointError

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Ints that a config must state: they say which model this is."""
DEFAULTED = {
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": float,
    "max_position_embeddings": int,
    "tie_word_embeddings": bool,
    "hidden_act": str,
    "attention_bias": bool,
    "mlp_bias": bool,
    "sliding_window": int,
    "use_sliding_window": bool,
    "max_window_layers": int,
    "layer_types": list,
    "num_local_experts": int,
    "num_experts": int,
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "norm_topk_prob": bool,
    "router_aux_loss_coef": float,
    "decoder_sparse_step": int,
    "mlp_only_layers": list,
}
"""Fields that a family's config class has defaults for, where it has the field at all."""
ROPE = {
    "rope_theta": float,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "partial_rotary_factor": float,
}
NULLABLE = {
    *("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "layer_types"),
    *("mlp_only_layers", *ROPE),
}
SIGNED = {"sliding_window", "max_window_layers", "router_aux_loss_coef"}


def check_fields(config: Mapping[str, Any]) -> None:
    """Check the kinds of the fields that are read.

    Raises:
        CheckpointError: naming the field and its value.
    """
    for name in SIZES:
        _check(name, config.get(name), int)
    for name, kind in (DEFAULTED | ROPE).items():
        if name in config and not (config[name] is None and name in NULLABLE):
            _check(name, config[name], kind)
    for form in ("rope_parameters", "rope_scaling"):
        for name, value in (config.get(form) or {}).items():
            if name in ("rope_type", "type"):
                _check(f"{form}.{name}", value, str)
            elif value is not None and not isinstance(value, bool | list):
                positive = name in ("rope_theta", "factor")
                _check(f"{form}.{name}", value, float, positive=positive)


def _check(name: str, value: Any, kind: type, *, positive: bool = True) -> None:
    number, positive = kind in (int, float), positive and name not in SIGNED
    fits = isinstance(value, int | float if kind is float else kind)
    if number:
        fits = fits and not isinstance(value, bool) and math.isfinite(value)
        fits = fits and (value > 0 or not positive)
    if not fits:
        expected = "a number" if kind is float else kind.__name__
        raise CheckpointError(
            f"config.json: {name} is {value!r}, expected {expected}"
            + (" > 0" if number and positive else "")
        )


def with_defaults(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fill in what a config leaves out by asking transformers' config class of its kind.

    Args:
        config: content of config.json, with its fields checked.
        model_type: of the family.

    Returns:
        The config with every field of its class, ``rope_theta`` included where neither form of
        rope parameters has it.

    Raises:
        CheckpointError: if the class refuses the values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {name: config[name] for name in (*SIZES, *DEFAULTED) if name in config}
    try:
        theirs = CONFIG_MAPPING[model_type](**given).to_dict()
    except Exception as error:  # strict dataclasses have an Exception of their own
        raise CheckpointError(f"config.json: transformers refuses it: {error}") from error
    filled = {name: theirs[name] for name in DEFAULTED if name in theirs and name not in config}
    forms = (config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config)
    if all(form.get("rope_theta") is None for form in forms):
        theta = (theirs.get("rope_parameters") or theirs)["rope_theta"]  # 5.x, 4.57
        filled["rope_theta"] = theta
    return {**config, **filled}
