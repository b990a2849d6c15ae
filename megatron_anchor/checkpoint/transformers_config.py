"""What transformers makes of a config.json: missing fields, and fields that depend on others.

Nothing is loaded by this: the family's config class gets the fields that are read, each checked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from megatron_anchor.checkpoint.hugging_face_keys import read_keys
from megatron_anchor.errors import UserError

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
    "no_rope_layers": list,
    "swiglu_limit": float,
    "swiglu_alpha": float,
    "no_rope_layer_interval": int,
}
"""Fields that a family's config class has defaults for, where it has the field at all."""
ROPE = {
    "rope_theta": float,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "partial_rotary_factor": float,
    "original_max_position_embeddings": int,
}
EXPERTS = ("num_experts", "num_local_experts")
"""Names of one number: which of them a family has depends on transformers' version."""
NULLABLE = {
    *("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "layer_types"),
    *("mlp_only_layers", "no_rope_layers", *ROPE),
}
SIGNED = {"sliding_window", "max_window_layers", "router_aux_loss_coef"}


def check_fields(config: Mapping[str, Any]) -> None:
    """Check the kinds of the fields that are read.

    Raises:
        UserError: naming the field and its value.
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
        raise UserError(
            f"config.json: {name} is {value!r}, expected {expected}"
            + (" > 0" if number and positive else "")
        )


def transformers_config(config: Mapping[str, Any], model_type: str) -> Any:
    """Build transformers' own config object of a family.

    Args:
        config: content of config.json, with its fields checked.
        model_type: of the family.

    Raises:
        UserError: if the class refuses the values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = read_keys(model_type) - {"architectures", "model_type", "quantization_config"}
    names |= {"pad_token_id"}  # without effect, but some classes' own is above a small vocabulary
    given = {name: copy.deepcopy(config[name]) for name in names if name in config}
    for name, other in (EXPERTS, EXPERTS[::-1]):
        if name in given:
            given.setdefault(other, given[name])
    try:
        return CONFIG_MAPPING[model_type](**given)
    except Exception as error:  # strict dataclasses have an Exception of their own
        said = " ".join(str(error).split())
        raise UserError(f"config.json: transformers refuses it: {said}") from error
