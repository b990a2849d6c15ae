"""A model's shape as Megatron's arguments: command-line flags, and a run's namespace read back."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_anchor.checkpoint.hugging_face_config import scaling_of
from megatron_anchor.checkpoint.model import PADDED_VOCABULARY_MULTIPLE, Model
from megatron_anchor.errors import UserError
from megatron_anchor.shell_words import is_value, passes_unquoted, quoted

if TYPE_CHECKING:
    import torch

FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "group_query_attention": "--group-query-attention",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "qk_layernorm": "--qk-layernorm",
    "swiglu": "--swiglu",
    "quick_geglu": "--quick-geglu",
    "glu_linear_offset": "--glu-linear-offset",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "softmax_type": "--softmax-type",
    "disable_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rope_parameters": "--rope-parameters",
    "max_position_embeddings": "--max-position-embeddings",
    "no_rope_freq": "--no-rope-freq",
    "window_size": "--window-size",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "attention_dropout": "--attention-dropout",
    "hidden_dropout": "--hidden-dropout",
    "vocab_size": "--vocab-size",
    "padded_vocab_size": "--padded-vocab-size",
    "tokenizer_type": "--tokenizer-type",
    "tokenizer_model": "--tokenizer-model",
    "anchor_token": "--anchor-token",
    "transformer_impl": "--transformer-impl",
    "num_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff",
    "moe_layer_freq": "--moe-layer-freq",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_router_load_balancing_type": "--moe-router-load-balancing-type",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "multi_latent_attention": "--multi-latent-attention",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "mtp_num_layers": "--mtp-num-layers",
    "bf16": "--bf16",
    "fp16": "--fp16",
}
"""Megatron's name of a value to its flag, in the order of megatron_args.txt."""

TEXTS = frozenset(
    {
        *("normalization", "position_embedding_type", "rope_parameters", "tokenizer_type"),
        *("tokenizer_model", "anchor_token", "transformer_impl", "softmax_type"),
        *("moe_router_score_function", "moe_router_load_balancing_type", "window_size"),
    }
)
"""Of these the values that are no numbers."""

LAYER_PATTERNS = frozenset({"no_rope_freq", "window_attn_skip_freq", "moe_layer_freq"})
"""Values that are a number, or a pattern over the layers."""

_PATTERN = re.compile(r"[\d\[\]*+,()]+")
"""Megatron's patterns; unquoted, a shell lets them be unless a file has such a name."""

SWITCHES = frozenset(
    {
        *("group_query_attention", "qk_layernorm", "swiglu", "disable_bias_linear", "add_qkv_bias"),
        *("untie_embeddings_and_output_weights", "moe_router_pre_softmax"),
        *("moe_router_enable_expert_bias", "multi_latent_attention", "quick_geglu", "bf16", "fp16"),
    }
)
"""Of these the flags without a value."""

_NUMBERS = (
    *("layers", "hidden", "ffn", "heads", "groups", "head", "vocabulary", "epsilon"),
    *("rotary_base", "positions"),
)
"""Fields of `Model` that are numbers, always."""

_PLAIN_JSON = re.compile(r'"(?:[^"\\]|\\.)*"')
"""One string of a JSON text."""


def shape_values(model: Model) -> dict[str, Any]:
    """Describe a model's shape, and what it computes, by Megatron's arguments.

    Raises:
        UserError: for something else where a number is needed.
    """
    for name in _NUMBERS:
        value = getattr(model, name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(
                f"the model's config.json holds {value!r} where a number is expected ({name})"
            )
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups if model.groups != model.heads else None,
        "kv_channels": model.head,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.epsilon,
        "qk_layernorm": model.qk_norm,
        "swiglu": not model.swiglu_limit,
        **(_clamped_values(model) if model.swiglu_limit else {}),
        **({"softmax_type": "learnable"} if model.sinks else {}),
        "disable_bias_linear": not model.linear_bias,
        "add_qkv_bias": model.qkv_bias and not model.linear_bias,
        "untie_embeddings_and_output_weights": model.untied,
        "position_embedding_type": "rope",
        "rotary_base": int(model.rotary_base),
        "rope_parameters": json.dumps(dict(model.scaling), separators=(",", ":"))
        if model.scaling
        else None,
        "max_position_embeddings": model.positions,
        "no_rope_freq": layer_frequency(model.no_rope, nth=True),
        **_window_values(model.windows_in_force),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": model.vocabulary,
        "padded_vocab_size": model.padded_rows,
        "num_experts": model.experts or None,
        "moe_ffn_hidden_size": model.ffn if model.experts else None,
        "moe_router_topk": model.experts_per_token if model.experts else None,
        "moe_router_pre_softmax": bool(model.experts) and not model.normalized_router,
        "moe_aux_loss_coeff": model.router_loss_coefficient if model.experts else None,
    }


def argument_values(
    model: Model,
    *,
    dtype: torch.dtype,
    tokenizer: str | None,
    anchor: int | None,
    target: str | None = None,
) -> dict[str, Any]:
    """Describe a checkpoint by Megatron's arguments.

    Args:
        model: its shape.
        dtype: of its weights.
        tokenizer: folder with the tokenizer's files; None: there is no tokenizer.
        anchor: token id of the anchor, if it is known.
        target: layer spec that loads the weights; None: any.
    """
    return shape_values(model) | {
        "tokenizer_type": "HuggingFaceTokenizer" if tokenizer else "NullTokenizer",
        "tokenizer_model": tokenizer,
        "anchor_token": None if anchor is None else str(anchor),
        "transformer_impl": target,
        "bf16": str(dtype) == "torch.bfloat16",
        "fp16": str(dtype) == "torch.float16",
    }


def _clamped_values(model: Model) -> dict[str, Any]:
    return {
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": model.swiglu_limit,
    }


def _window_values(windows: tuple[int, ...]) -> dict[str, Any]:
    """Megatron counts the keys on either side of the query's own, and has one size."""
    assert len(set(windows) - {0}) <= 1, windows
    frequency = None if all(windows) else layer_frequency(tuple(map(bool, windows)), nth=False)
    return {
        "window_size": (max(windows) - 1, 0) if windows else None,
        "window_attn_skip_freq": frequency,
    }


def layer_frequency(layers: Sequence[bool], *, nth: bool) -> int | list[int] | None:
    """Say which layers have something in the words of Megatron's flags.

    Args:
        layers: of all layers, whether they have it; empty: none.
        nth: what a number N says of each N-th layer; of the others it says the opposite.

    Returns:
        The number if there is one, else a list of 1 and 0; None without layers.
    """
    if not layers:
        return None
    count = len(layers)
    for n in range(1, count + 1):
        period = [not nth] * (n - 1) + [nth]
        if count % n == 0 and list(layers) == period * (count // n):
            return n
    return [int(has) for has in layers]


def flag_lines(values: Mapping[str, Any], *, for_shell: bool = False) -> list[str]:
    """Write values as command-line flags, one per line.

    Args:
        values: by Megatron's names; None, and switches that are off, are left out.
        for_shell: quote for a shell script; otherwise the lines pass an unquoted ``$(cat file)``.

    Raises:
        UserError: for a value that the shell or the parser would take for more than one.
    """
    lines = []
    for name, flag in FLAGS.items():
        value = values.get(name)
        if value is None or (value is False and name in SWITCHES):
            continue
        switched_on = value is True and name in SWITCHES
        lines.append(flag if switched_on else f"{flag} {_word(name, value, for_shell)}")
    return lines


def _word(name: str, value: Any, for_shell: bool) -> str:
    if isinstance(value, list):
        value = "+".join(f"[{has}]*{len([*run])}" for has, run in groupby(value))
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    text = str(value)
    if name == "rope_parameters" and not for_shell:
        text = _PLAIN_JSON.sub(_escape, value)
    number = type(value) in (int, float) and math.isfinite(value)
    pattern = name in LAYER_PATTERNS and (number or _PATTERN.fullmatch(text))
    whole = for_shell or passes_unquoted(text) or pattern
    if (number != (name not in TEXTS) and not pattern) or not whole or not is_value(text):
        expected = "one plain word" if name in TEXTS else "a number"
        raise UserError(
            f"{FLAGS[name]} {text!r}: expected {expected}; the shell, or Megatron's parser, would "
            "read more than one value from it"
        )
    return quoted(text) if for_shell else text


def _escape(text: re.Match[str]) -> str:
    """Write a JSON string without characters that mean something to a shell."""
    return re.sub(r"[^\w\"\\./:+-]", lambda m: f"\\u{ord(m[0]):04x}", text[0], flags=re.ASCII)


def namespace(values: Mapping[str, Any], *, dtype: torch.dtype) -> Namespace:
    """Give the arguments that a checkpoint records, so that --use-checkpoint-args works too."""
    recorded = {k: v for k, v in values.items() if k != "disable_bias_linear"}
    if recorded["moe_aux_loss_coeff"] is not None:
        recorded["moe_aux_loss_coeff"] = [recorded["moe_aux_loss_coeff"]]  # as the parser has it
    return Namespace(
        **recorded,
        add_bias_linear=not values["disable_bias_linear"],
        add_position_embedding=True,
        use_rotary_position_embeddings=False,
        rotary_percent=1.0,
        rotary_interleaved=False,
        apply_layernorm_1p=False,
        make_vocab_size_divisible_by=PADDED_VOCABULARY_MULTIPLE,
        params_dtype=dtype,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        no_save_optim=True,
        no_save_rng=True,
        ckpt_format="torch_dist",
    )


def model_from_args(args: Namespace, *, family: str | None, padded_vocabulary: int) -> Model:
    """Read a model's shape from the arguments of the run that trained it.

    What the families cannot represent is not looked at here; `argument_check` does that.

    Args:
        args: as the checkpoint records them; Megatron's own runs lack our flags.
        family: architecture to export as; None: the plainest one that has these weights.
        padded_vocabulary: rows of the stored embedding.

    Raises:
        UserError: for two scalings of RoPE at once.
    """
    given = vars(args)
    heads = args.num_attention_heads
    groups = given.get("num_query_groups") if given.get("group_query_attention") else heads
    bias = bool(given.get("add_bias_linear", True))
    qk_norm = bool(given.get("qk_layernorm", False))
    experts = given.get("num_experts") or 0
    qkv_bias = bias or bool(given.get("add_qkv_bias", False))
    base, scaling = _rope(given)
    windows, no_rope = _windows(args), _layers_without_rope(args)
    sinks = given.get("softmax_type") == "learnable"
    kinds = {"windows": bool(windows), "no_rope": bool(no_rope), "sinks": sinks}
    return Model(
        family=family
        or _family(qk_norm=qk_norm, qkv_bias=qkv_bias, bias=bias, experts=experts, **kinds),
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=(given.get("moe_ffn_hidden_size") if experts else None)
        or given.get("ffn_hidden_size")
        or 4 * args.hidden_size,
        heads=heads,
        groups=groups or heads,
        head=given.get("kv_channels") or args.hidden_size // heads,
        vocabulary=_vocabulary(given, padded_vocabulary),
        padded_vocabulary=padded_vocabulary,
        tied=not given.get("untie_embeddings_and_output_weights", False),
        qkv_bias=qkv_bias,
        output_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm,
        epsilon=float(given.get("layernorm_epsilon", given.get("norm_epsilon", 1e-5))),
        rotary_base=base,
        scaling=scaling,
        positions=int(given.get("max_position_embeddings") or given["seq_length"]),
        experts=experts,
        experts_per_token=given.get("moe_router_topk", 2) if experts else 0,
        normalized_router=not (experts and given.get("moe_router_pre_softmax", False)),
        router_loss_coefficient=_loss_coefficient(given) if experts else 0.0,
        windows=windows,
        no_rope=no_rope,
        sinks=sinks,
        swiglu_limit=float(given.get("activation_func_clamp_value") or 0.0),
    )


def _windows(args: Namespace) -> tuple[int, ...]:
    from megatron_anchor.attention.layer_window import layer_window

    names = ("window_size", "window_attn_skip_freq")
    settings = Namespace(**{name: getattr(args, name, None) for name in names})
    windows = [layer_window(settings, number, keeps_anchor=False) for number in _numbers(args)]
    return tuple(w.size if w else 0 for w in windows) if any(windows) else ()


def _layers_without_rope(args: Namespace) -> tuple[bool, ...]:
    frequency = getattr(args, "no_rope_freq", None) or 0
    if isinstance(frequency, int):
        frequency = [frequency and number % frequency == 0 for number in _numbers(args)]
    return tuple(map(bool, frequency)) if any(frequency) else ()


def _numbers(args: Namespace) -> range:
    return range(1, args.num_layers + 1)


def _loss_coefficient(given: Mapping[str, Any]) -> float:
    """Megatron takes one coefficient, or a list for several kinds of balancing."""
    value = given.get("moe_aux_loss_coeff") or 0.0
    return float(value[0] if isinstance(value, list) else value)


def _family(
    *,
    qk_norm: bool,
    qkv_bias: bool,
    bias: bool,
    experts: int,
    windows: bool,
    no_rope: bool,
    sinks: bool,
) -> str:
    if experts and sinks:
        return "GptOssForCausalLM"
    if experts:
        return "Qwen3MoeForCausalLM" if qk_norm else "MixtralForCausalLM"
    if qk_norm:
        return "Qwen3ForCausalLM"
    if qkv_bias and not bias:
        return "Qwen2ForCausalLM"
    return "SmolLM3ForCausalLM" if windows or no_rope else "LlamaForCausalLM"


def _vocabulary(given: Mapping[str, Any], padded: int) -> int:
    """Rows that mean tokens, as far as the run knew: --vocab-size, else the whole embedding."""
    return given.get("vocab_size") or padded


def _rope(given: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Give the base and the scaling without it; `argument_check` compares two bases."""
    from megatron_anchor.training.arguments import rope_scaling

    flags = ("rope_parameters", "use_rope_scaling", "rotary_seq_len_interpolation_factor")
    try:
        form = rope_scaling(
            Namespace(**{"rope_scaling_factor": 8.0, **dict.fromkeys(flags), **given})
        )
    except ValueError as error:
        raise UserError(f"the run's arguments: {error}") from error
    return float(given.get("rotary_base", 10000)), scaling_of(form)
