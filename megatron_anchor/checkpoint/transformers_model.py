"""Does transformers make the same of a config.json as we do? Its own model class is asked.

The model is built without memory for its weights; only the rotation's frequencies are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from megatron_anchor.attention.rope import RotarySettings, inverse_frequencies
from megatron_anchor.checkpoint.families import family_of, rules_for
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.transformers_config import transformers_config
from megatron_anchor.errors import UserError


def check_transformers_model(config: Mapping[str, Any], model: Model) -> None:
    """Check that transformers builds a model of this size with this rotation from a config.

    Args:
        config: content of config.json.
        model: what we read in it.

    Raises:
        UserError: if it builds none, or another one.
    """
    theirs = transformers_config(config, family_of(model.family).model_type)
    built = _build(theirs)
    numbers = sum(parameter.numel() for parameter in built.parameters())
    if numbers != (expected := number_of_weights(model)):
        raise UserError(
            f"config.json: transformers' model has {numbers} weights, this package's reading of it "
            f"{expected}; it would be another model"
        )
    if hasattr(theirs, "rope_parameters") or not config.get("rope_parameters"):
        _check_rotation(type(built.model.rotary_emb)(theirs), model)


def number_of_weights(model: Model) -> int:
    """Count the numbers in all Hugging Face tensors of a model."""
    return sum(
        torch.Size(shape).numel()
        for rule in rules_for(model)
        for _ in rule.indices(model)
        for shape in rule.source_shapes(model)
    )


def _build(theirs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(theirs, trust_remote_code=False)
    except Exception as error:  # of any kind, from whatever reads the fields
        raise UserError(
            f"config.json: transformers builds no model from it: {type(error).__name__}: {error}"
        ) from error
    finally:
        log.setLevel(level)


def _check_rotation(theirs: Any, model: Model) -> None:
    ours_F, factor = inverse_frequencies(
        RotarySettings(
            head_dim=model.head,
            base=model.rotary_base,
            scaling=dict(model.scaling),
            max_position_embeddings=model.positions,
        )
    )
    theirs_F = theirs.inv_freq.float()
    if theirs.attention_scaling == factor and torch.equal(theirs_F, ours_F.float()):
        return
    raise UserError(
        f"config.json: transformers rotates by inverse frequencies {_ends(theirs_F)}, scaled by "
        f"{theirs.attention_scaling:g}; this package reads RoPE base {model.rotary_base:g} and "
        f"scaling {dict(model.scaling)} in it, which gives {_ends(ours_F)}, scaled by {factor:g}"
    )


def _ends(values_F: torch.Tensor) -> str:
    return f"{float(values_F[0]):g} ... {float(values_F[-1]):g}"
