"""config.json, read and written in the forms of transformers 4.57 and 5.x.

4.57 has ``rope_theta`` and ``rope_scaling`` (without the base); 5.x has ``rope_parameters`` with
the base inside. What is written holds both, so that either version reads the same rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.config_limits import check_limits
from megatron_anchor.checkpoint.families import (
    ALL_LAYERS,
    BY_LAYER,
    FAMILIES,
    Family,
    biases_without_a_place,
    family_of,
)
from megatron_anchor.checkpoint.hugging_face_keys import (
    FULL,
    SLIDING,
    check_keys,
    kept_keys,
    read_keys,
)
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.model_folder import check_links, read_json
from megatron_anchor.checkpoint.names import names
from megatron_anchor.checkpoint.transformers_config import (
    EXPERTS,
    check_fields,
    transformers_config,
)
from megatron_anchor.errors import UserError

NOT_KEPT = names(
    """
    transformers_version auto_map _name_or_path name_or_path _commit_hash attn_implementation
    _attn_implementation _attn_implementation_autoset experts_implementation
    _experts_implementation layer_types max_window_layers sliding_window use_sliding_window
    """
)
"""Entries of another config that an export does not take over."""
AS_THERE = ("head_dim", "intermediate_size", "max_window_layers")
"""Entries that may be missing or (in a mixture of experts, without a window) mean nothing."""
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
WITH_ORIGINAL_LENGTH = ("yarn", "llama3")
"""Kinds that read ``original_max_position_embeddings``."""
QUICK_GELU = 1.702
"""Factor inside the sigmoid of Megatron's --quick-geglu."""
SWIGLU_LIMIT = 7.0
"""Where gpt-oss clamps, if its config does not say."""
SILU = ("silu", "swish")
"""transformers' names of the one activation that SwiGLU has."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        UserError: if it is not there or not a JSON object, or if the folder has links that
            lead outside of it.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face model")
    check_links(folder)
    config = read_json(path)
    check_limits(path, config)
    return config


def model_of(config: Mapping[str, Any]) -> Model:
    """Read the model's shape from a config, as transformers reads it.

    Args:
        config: content of config.json.

    Raises:
        UserError: for an unknown architecture, a missing field, a key that nobody has looked
            at, or a feature that training does not have.
    """
    theirs, family, name = _understood(config)
    theta, scaling = rope_of(config, theirs)
    head_dim = getattr(theirs, "head_dim", None)
    model = Model(
        family=name,
        layers=theirs.num_hidden_layers,
        hidden=theirs.hidden_size,
        ffn=getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size,
        heads=theirs.num_attention_heads,
        groups=theirs.num_key_value_heads,
        head=head_dim or theirs.hidden_size // theirs.num_attention_heads,
        vocabulary=theirs.vocab_size,
        tied=theirs.tie_word_embeddings,
        qk_norm=family.qk_norm,
        epsilon=float(theirs.rms_norm_eps),
        rotary_base=theta,
        scaling=scaling,
        positions=theirs.max_position_embeddings,
        windows=_windows(theirs, family),
        no_rope=_layers_without_rope(theirs, family),
        sinks=family.sinks,
        swiglu_limit=_swiglu_limit(theirs) if family.clamps_swiglu else 0.0,
        **_experts(config, theirs, family),
        **family.biases(theirs),
    )
    _refuse_unsupported(config, theirs, model)
    return model


def _swiglu_limit(theirs: Any) -> float:
    """Where gpt-oss clamps; older transformers have the number in the layer, not in the config."""
    return float(getattr(theirs, "swiglu_limit", SWIGLU_LIMIT))


def _understood(config: Mapping[str, Any]) -> tuple[Any, Family, str]:
    """Check a config's keys and fields; give transformers' object of it and its family."""
    name = architecture(config)
    family = family_of(name)
    model_type = config.get("model_type")
    if model_type not in (None, family.model_type):
        raise UserError(
            f"config.json: model_type {model_type!r} contradicts architectures [{name!r}], which "
            f"is {family.model_type!r}; transformers goes by model_type, so keep the right one"
        )
    check_keys(config, family.model_type)
    check_fields(config)
    _check_rope_kinds(config)
    return transformers_config(config, family.model_type), family, name


def _experts(config: Mapping[str, Any], theirs: Any, family: Family) -> dict[str, Any]:
    """Give what a mixture of experts has in addition, as fields of `Model`."""
    if not family.has_experts:
        return {}
    counts = {config[name] for name in EXPERTS if config.get(name) is not None}
    if len(counts) > 1:
        raise UserError(
            f"config.json: {' and '.join(EXPERTS)} are two names of one number, got "
            f"{' and '.join(map(str, sorted(counts)))}; keep the right one"
        )
    by_one_name = hasattr(theirs, "num_local_experts")
    return {
        "experts": theirs.num_local_experts if by_one_name else theirs.num_experts,
        "experts_per_token": theirs.num_experts_per_tok,
        "normalized_router": getattr(theirs, "norm_topk_prob", True),
        "router_loss_coefficient": float(theirs.router_aux_loss_coef),
    }


def architecture(config: Mapping[str, Any]) -> str:
    """Name the architecture; configs without ``architectures`` are known by their model_type.

    Raises:
        UserError: for an unknown one.
    """
    given = config.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UserError(
            f"config.json: architectures is {given!r}, expected a list of names"
            + (f" such as [{given!r}]" if isinstance(given, str) else "")
        )
    if len(given) > 1:
        raise UserError(f"config.json: architectures is {given!r}, expected one name")
    if given:
        return given[0]
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = str(config.get("model_type"))
    if model_type not in by_type:
        raise UserError(
            f"config.json: no architectures, and model_type {model_type!r} is none of "
            f"{', '.join(by_type)}"
        )
    return by_type[model_type]


def rope_of(config: Mapping[str, Any], theirs: Any) -> tuple[float, dict[str, Any]]:
    """Give the base and the scaling (empty: none), from either form.

    Args:
        config: content of config.json.
        theirs: transformers' object of it, for what is missing.

    Raises:
        UserError: if both forms are there and differ.
    """
    new, old = (dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if not new and not old:  # some classes scale by default
        new = dict(getattr(theirs, "rope_parameters", None) or {})
    given = (config.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta"))
    bases = {float(value) for value in given if value is not None}
    forms = [scaling_of(form) for form in (new, old) if form]
    if len(bases) > 1 or (len(forms) > 1 and forms[0] != forms[1]):
        raise UserError(
            f"config.json: rope_parameters {new} contradicts rope_theta "
            f"{config.get('rope_theta')} and rope_scaling {old}; keep the right one"
        )
    if not bases:
        bases = {float((getattr(theirs, "rope_parameters", None) or vars(theirs))["rope_theta"])}
    scaling = forms[0] if forms else {}
    if scaling.get("rope_type") in WITH_ORIGINAL_LENGTH:
        _set_original_length(scaling, config, theirs)
    return next(iter(bases)), scaling


def _check_rope_kinds(config: Mapping[str, Any]) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        kind = scaling_of(config.get(key) or {}).get("rope_type", ROPE_TYPES[0])
        if kind not in ROPE_TYPES:
            raise UserError(
                f"config.json: rope type {kind!r} is none of default, {', '.join(ROPE_TYPES)}"
            )


def _set_original_length(scaling: dict[str, Any], config: Mapping[str, Any], theirs: Any) -> None:
    """Find the length that a scaling starts from, which must not move with an extension."""
    name = "original_max_position_embeddings"
    inside, outside = scaling.get(name), config.get(name)
    if None not in (inside, outside) and inside != outside:
        raise UserError(
            f"config.json: {name} {outside} contradicts the one beside rope_type, {inside}; "
            "keep the right one"
        )
    # Without either, transformers takes the model's length.
    scaling[name] = inside or outside or theirs.max_position_embeddings


def scaling_of(form: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce one form to the scaling without the base; "type" is the oldest name of the kind."""
    kind = form.get("rope_type", form.get("type", "default"))
    outside = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned")
    rest = {k: v for k, v in form.items() if k not in outside}
    return {} if kind == "default" else {"rope_type": kind, **rest}


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Give the window that is in force in any layer, None for full attention.

    Raises:
        UserError: see `model_of`.
    """
    theirs, family, _ = _understood(config)
    return max(_windows(theirs, family), default=None)


def _windows(theirs: Any, family: Family) -> tuple[int, ...]:
    """Give the window of every layer, 0 where there is none; empty: none anywhere."""
    window = getattr(theirs, "sliding_window", None) if family.windows else None
    if not getattr(theirs, "use_sliding_window", True):
        window = None
    if window is not None and window < 1:
        raise UserError(
            f"config.json: sliding_window {window}: a query sees itself at least, so 1 or more; "
            "null means no window"
        )
    kinds: list[str] = (
        theirs.layer_types if family.windows == BY_LAYER else [SLIDING] * bool(window)
    )
    others = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if others or (SLIDING in kinds and window is None):
        raise UserError(
            f"config.json: layer_types {kinds} with sliding_window {window}: "
            f"expected {FULL}, and {SLIDING} only where there is a window"
        )
    if SLIDING not in kinds or window is None:
        return ()
    if family.windows != BY_LAYER:
        return (window,) * theirs.num_hidden_layers
    return tuple(int(window) if kind == SLIDING else 0 for kind in kinds)


def _layers_without_rope(theirs: Any, family: Family) -> tuple[bool, ...]:
    """Say which layers do not rotate; transformers' list says which do."""
    if not family.skips_rope:
        return ()
    rotates, layers = theirs.no_rope_layers, theirs.num_hidden_layers
    if len(rotates) != layers or any(value not in (0, 1) for value in rotates):
        raise UserError(
            f"config.json: no_rope_layers {rotates}: expected 1 (rotates) or 0 for each of "
            f"{layers} layers"
        )
    return tuple(not value for value in rotates) if not all(rotates) else ()


def _refuse_unsupported(config: Mapping[str, Any], theirs: Any, model: Model) -> None:
    if quantised := config.get("quantization_config"):
        mxfp4 = isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4"
        raise UserError(
            "config.json: quantization_config: quantised weights cannot be trained; "
            + (
                "load the model by AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, "
                "quantization_config=Mxfp4Config(dequantize=True)) and save it by save_pretrained"
                if mxfp4
                else "take the model's original ones"
            )
        )
    alpha = getattr(theirs, "swiglu_alpha", QUICK_GELU)
    if alpha != QUICK_GELU:
        raise UserError(
            f"config.json: swiglu_alpha {alpha}: Megatron's activation has {QUICK_GELU} fixed"
        )
    if theirs.hidden_act not in SILU:
        raise UserError(f"config.json: hidden_act {theirs.hidden_act!r}, expected 'silu' (SwiGLU)")
    for place in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        if (partial := place.get("partial_rotary_factor")) not in (None, 1):
            raise UserError(f"config.json: partial_rotary_factor {partial} is not supported")
    if (
        family_of(model.family).windows == ALL_LAYERS
        and model.windows
        and FULL in (kinds := config.get("layer_types") or [])
    ):
        raise UserError(
            f"config.json: layer_types {kinds} with sliding_window {max(model.windows)}, which "
            f"{model.family} has in all layers; remove one of the two"
        )
    if left_out := biases_without_a_place(model):
        raise UserError(
            "config.json: attention_bias true is not supported: Megatron's linear layers have "
            f"biases all or none, and {model.family} has no {' or '.join(left_out)} to export "
            "them to"
        )
    dense, step = (
        getattr(theirs, "mlp_only_layers", None),
        getattr(theirs, "decoder_sparse_step", 1),
    )
    if dense or step != 1:
        raise UserError(
            f"config.json: mlp_only_layers {dense}, decoder_sparse_step {step}: only experts in "
            "every layer are supported"
        )
    if model.heads % model.groups:
        raise UserError(
            f"config.json: num_attention_heads {model.heads} is not a multiple of "
            f"num_key_value_heads {model.groups}"
        )
    if model.experts_per_token > model.experts:
        raise UserError(
            f"config.json: num_experts_per_tok {model.experts_per_token} of {model.experts} experts"
        )
    if model.experts_per_token == 1 and model.normalized_router:
        raise UserError(
            "config.json: num_experts_per_tok 1 with normalized weights, which then are always 1: "
            "Megatron's router has no such setting"
            + ("" if model.family.startswith("Mixtral") else "; with norm_topk_prob false it does")
        )


def config_for(model: Model, *, dtype: str, like: Mapping[str, Any] | None = None) -> dict:
    """Write the config of a model, in both forms of rope parameters.

    Args:
        model: as trained.
        dtype: of the weights, such as ``bfloat16``.
        like: config of a model of this shape, whose other entries (token ids, dropout, names) are
            kept.
    """
    family = family_of(model.family)
    given = like or {}
    known = kept_keys(family.model_type) - NOT_KEPT
    kept = {key: value for key, value in given.items() if key in known}
    scaling = dict(model.scaling)
    config = {
        **kept,
        "architectures": [model.family],
        "model_type": family.model_type,
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
    if "output_bias" in family.bias_places:
        if model.qkv_bias and not model.output_bias:
            raise UserError(
                f"--add-qkv-bias: the attention_bias of {model.family} adds a bias to the output "
                "projection, too, which this run did not train; leave the flag out, or begin with "
                "a Qwen2 model, which has biases in these places"
            )
        config["attention_bias"] = model.qkv_bias
    if "mlp_bias" in read_keys(family.model_type):
        config["mlp_bias"] = model.mlp_bias
    if like is None:
        config["pad_token_id"] = None  # a class' default may be above the vocabulary
    if family.clamps_swiglu:
        config |= {"swiglu_limit": model.swiglu_limit, "swiglu_alpha": QUICK_GELU}
    config |= _experts_entries(model) | _layer_entries(model)
    for name in AS_THERE if like is not None else ():
        if name == "head_dim" and scaling:
            continue  # transformers' scalings fail where a family's default for it is null
        if name in given:
            config[name] = given[name]
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


def _layer_entries(model: Model) -> dict[str, Any]:
    """Say in which ways layers differ, in the words of the family."""
    family = family_of(model.family)
    entries: dict[str, Any] = {}
    if family.skips_rope:
        skipped = model.no_rope or (False,) * model.layers
        entries["no_rope_layers"] = [int(not skips) for skips in skipped]
    if not family.windows:
        return entries
    window = max(model.windows, default=None)
    entries["sliding_window"] = window  # classes have one by default
    read = read_keys(family.model_type)
    if family.windows == BY_LAYER and "use_sliding_window" not in read:
        entries["sliding_window"] = window or model.positions  # transformers makes its mask anyway
    if "use_sliding_window" in read:
        entries["use_sliding_window"] = window is not None
    if family.windows == BY_LAYER:
        sizes = model.windows or (0,) * model.layers
        entries["layer_types"] = [SLIDING if size else FULL for size in sizes]
    if "max_window_layers" in read:
        entries["max_window_layers"] = model.layers
    return entries
