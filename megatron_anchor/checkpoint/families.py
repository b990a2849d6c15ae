"""Which Hugging Face tensors make up which Megatron tensor: one table, read in both directions.

A rule holds for every layer (and expert) at once. Names of dimensions and conditions are fields
and properties of `Model`. Megatron's names are those of its ``torch_dist`` checkpoints, where all
layers of a kind form one tensor; ``engine`` is the name that Transformer Engine's layer spec gives
it, where that differs, and ``alias`` one more under which it may be found.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.model_arguments import Required
from megatron_anchor.checkpoint.row_maps import (
    Grouped,
    RowLayout,
    Segment,
    Stack,
    Vocabulary,
    Zeros,
)
from megatron_anchor.errors import UserError

LAYER, EXPERT = "{layer}", "{expert}"
LOCAL, ENGINE = TARGETS = ("local", "transformer_engine")
"""Megatron's layer specs, by --transformer-impl."""


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor and what it is made of."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: RowLayout
    columns: str | None = None
    """Dimension of the second axis; None: a vector."""
    when: str | None = None
    """Property of `Model`; None: always."""
    alias: str | None = None
    engine: str | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes in front of the rows, by which the tensor is stacked: layers, experts."""
        return axes_of(self.megatron)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the stacked tensor in a ``torch_dist`` checkpoint, the usual one first."""
        return tuple(stacked(name) for name in self.forms)

    @property
    def forms(self) -> tuple[str, ...]:
        """The same with placeholders for layer and expert."""
        return tuple(name for name in (self.megatron, self.engine, self.alias) if name)

    def key(self, target: str) -> str:
        """Name of the stacked tensor that a layer spec asks for."""
        return stacked(self.engine if target == ENGINE and self.engine else self.megatron)

    def names(self, indices: Mapping[str, int]) -> tuple[str, ...]:
        """Hugging Face's names for one layer (and expert)."""
        return tuple(numbered(name, indices) for name in self.hugging_face)

    def shape(self, rows: int, model: Model) -> tuple[int, ...]:
        """Shape of a tensor of so many rows."""
        return (rows,) if self.columns is None else (rows, model.dims[self.columns])

    def source_shapes(self, model: Model) -> list[tuple[int, ...]]:
        """Shapes of the Hugging Face tensors."""
        return [self.shape(rows, model) for rows in self.layout.source_rows(model.dims)]

    def segments(self, model: Model) -> list[Segment]:
        """Megatron's rows in order."""
        return self.layout.segments(model.dims)

    def indices(self, model: Model) -> list[dict[str, int]]:
        """Every combination of layer and expert, in the order of the stacked tensor."""
        return indices_of(self.megatron, model)

    def stack(self, model: Model) -> tuple[int, ...]:
        """Sizes of the axes in front of the rows."""
        return stack_of(self.megatron, model)


@dataclass(frozen=True)
class Fused:
    """A Hugging Face tensor that holds a matrix (or vector) of all experts of a layer.

    Rules speak of its parts, one expert's matrix [rows, columns] each, under names that no file
    has. It holds them transposed and side by side, row by row in turn: entry
    [expert, column, parts x row + part].
    """

    hugging_face: str
    parts: tuple[str, ...]


def axes_of(name: str) -> tuple[str, ...]:
    """Placeholders of a name, layers first."""
    return tuple(axis for axis in (LAYER, EXPERT) if axis in name)


def stack_of(name: str, model: Model) -> tuple[int, ...]:
    """How many layers (and experts) a name stands for."""
    sizes = {LAYER: model.layers, EXPERT: model.experts}
    return tuple(sizes[axis] for axis in axes_of(name))


def indices_of(name: str, model: Model) -> list[dict[str, int]]:
    """Give every combination of layer and expert that a name stands for."""
    found: list[dict[str, int]] = [{}]
    for axis, size in zip(axes_of(name), stack_of(name, model), strict=True):
        found = [{**entry, axis: i} for entry in found for i in range(size)]
    return found


def stacked(name: str) -> str:
    """Drop the placeholders: ``decoder.layers.{layer}.mlp`` becomes ``decoder.layers.mlp``."""
    return name.replace(f".{LAYER}", "").replace(f".{EXPERT}", "")


def numbered(name: str, indices: Mapping[str, int]) -> str:
    """Fill the placeholders in."""
    for axis, index in indices.items():
        name = name.replace(axis, str(index))
    return name


M, H = f"decoder.layers.{LAYER}", f"model.layers.{LAYER}"
QKV = tuple(f"{H}.self_attn.{x}_proj" for x in "qkv")
WEIGHTS, BIASES = (tuple(f"{name}.{x}" for name in QKV) for x in ("weight", "bias"))

OUTER = (
    Rule(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary(), "hidden"
    ),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Stack(["hidden"])),
    Rule("output_layer.weight", ("lm_head.weight",), Vocabulary(), "hidden", when="untied"),
)
ATTENTION = (
    Rule(
        f"{M}.self_attention.linear_qkv.layer_norm_weight",
        (f"{H}.input_layernorm.weight",),
        Stack(["hidden"]),
        alias=f"{M}.input_layernorm.weight",
    ),
    Rule(f"{M}.self_attention.linear_qkv.weight", WEIGHTS, Grouped(), "hidden"),
    Rule(f"{M}.self_attention.linear_qkv.bias", BIASES, Grouped(), when="qkv_bias"),
    Rule(f"{M}.self_attention.linear_qkv.bias", (), Zeros("qkv"), when="no_qkv_bias"),
    Rule(
        f"{M}.self_attention.q_layernorm.weight",
        (f"{H}.self_attn.q_norm.weight",),
        Stack(["head"]),
        when="qk_norm",
    ),
    Rule(
        f"{M}.self_attention.k_layernorm.weight",
        (f"{H}.self_attn.k_norm.weight",),
        Stack(["head"]),
        when="qk_norm",
    ),
    Rule(
        f"{M}.self_attention.linear_proj.weight",
        (f"{H}.self_attn.o_proj.weight",),
        Stack(["hidden"]),
        "query",
    ),
    Rule(
        f"{M}.self_attention.linear_proj.bias",
        (f"{H}.self_attn.o_proj.bias",),
        Stack(["hidden"]),
        when="output_bias",
    ),
    Rule(f"{M}.self_attention.linear_proj.bias", (), Zeros("hidden"), when="no_output_bias"),
)
DENSE_MLP = (
    Rule(
        f"{M}.mlp.linear_fc1.layer_norm_weight",
        (f"{H}.post_attention_layernorm.weight",),
        Stack(["hidden"]),
        alias=f"{M}.pre_mlp_layernorm.weight",
    ),
    Rule(
        f"{M}.mlp.linear_fc1.weight",
        (f"{H}.mlp.gate_proj.weight", f"{H}.mlp.up_proj.weight"),
        Stack(["ffn", "ffn"]),
        "hidden",
    ),
    Rule(
        f"{M}.mlp.linear_fc1.bias",
        (f"{H}.mlp.gate_proj.bias", f"{H}.mlp.up_proj.bias"),
        Stack(["ffn", "ffn"]),
        when="mlp_bias",
    ),
    Rule(f"{M}.mlp.linear_fc1.bias", (), Zeros("gate and up"), when="no_mlp_bias"),
    Rule(f"{M}.mlp.linear_fc2.weight", (f"{H}.mlp.down_proj.weight",), Stack(["hidden"]), "ffn"),
    Rule(
        f"{M}.mlp.linear_fc2.bias",
        (f"{H}.mlp.down_proj.bias",),
        Stack(["hidden"]),
        when="mlp_bias",
    ),
    Rule(f"{M}.mlp.linear_fc2.bias", (), Zeros("hidden"), when="no_mlp_bias"),
)


def _moe(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of a mixture of experts, which Hugging Face's families name differently."""
    experts = f"{M}.mlp.experts.experts.{EXPERT}"
    return (
        Rule(
            f"{M}.mlp.linear_fc1.layer_norm_weight",
            (f"{H}.post_attention_layernorm.weight",),
            Stack(["hidden"]),
            engine=f"{M}.pre_mlp_layernorm.weight",
        ),
        Rule(f"{M}.mlp.router.weight", (f"{H}.{router}.weight",), Stack(["experts"]), "hidden"),
        Rule(
            f"{experts}.linear_fc1.weight",
            (f"{H}.{gate}.weight", f"{H}.{up}.weight"),
            Stack(["ffn", "ffn"]),
            "hidden",
        ),
        Rule(f"{experts}.linear_fc2.weight", (f"{H}.{down}.weight",), Stack(["hidden"]), "ffn"),
    )


MIXTRAL_MLP = _moe(
    "block_sparse_moe.gate",
    *(f"block_sparse_moe.experts.{EXPERT}.{name}" for name in ("w1", "w3", "w2")),
)
EXPERT_PROJECTIONS = tuple(f"mlp.experts.{EXPERT}.{name}_proj" for name in ("gate", "up", "down"))
QWEN3_MLP = _moe("mlp.gate", *EXPERT_PROJECTIONS)
SINKS = Rule(
    f"{M}.self_attention.core_attention.softmax_offset",
    (f"{H}.self_attn.sinks",),
    Stack(["heads"]),
)
GATE, UP, DOWN = (f"{H}.{name}" for name in EXPERT_PROJECTIONS)
GPT_OSS_MLP = (
    *_moe("mlp.router", *EXPERT_PROJECTIONS),
    Rule(f"{M}.mlp.router.bias", (f"{H}.mlp.router.bias",), Stack(["experts"])),
    Rule(
        f"{M}.mlp.experts.experts.{EXPERT}.linear_fc1.bias",
        (f"{GATE}.bias", f"{UP}.bias"),
        Stack(["ffn", "ffn"]),
    ),
    Rule(
        f"{M}.mlp.experts.experts.{EXPERT}.linear_fc2.bias",
        (f"{DOWN}.bias",),
        Stack(["hidden"]),
    ),
)
GPT_OSS_FUSED = (
    Fused(f"{H}.mlp.experts.gate_up_proj", (f"{GATE}.weight", f"{UP}.weight")),
    Fused(f"{H}.mlp.experts.gate_up_proj_bias", (f"{GATE}.bias", f"{UP}.bias")),
    Fused(f"{H}.mlp.experts.down_proj", (f"{DOWN}.weight",)),
    Fused(f"{H}.mlp.experts.down_proj_bias", (f"{DOWN}.bias",)),
)

ATTENTION_LAYERS = (f"{M}.self_attention.linear_proj", f"{M}.self_attention.linear_qkv")
DENSE_LAYERS = (*ATTENTION_LAYERS, f"{M}.mlp.linear_fc1", f"{M}.mlp.linear_fc2")
MOE_LAYERS = (
    *ATTENTION_LAYERS,
    f"{M}.mlp.experts.experts.{EXPERT}.linear_fc1",
    f"{M}.mlp.experts.experts.{EXPERT}.linear_fc2",
)
FINAL_NORM = "decoder.final_layernorm"
HEAD_NORMS = (f"{M}.self_attention.q_layernorm", f"{M}.self_attention.k_layernorm")
MLP_NORM = f"{M}.pre_mlp_layernorm"
ALL_LAYERS, BY_LAYER = "all layers", "by layer"
ANY_VALUE = Required((), "", fits=lambda value: True)
PLAIN_SWIGLU = "another activation than the family's clamped SwiGLU"
CLAMPS = Required((7.0,), PLAIN_SWIGLU, fits=lambda value: isinstance(value, float) and value > 0)


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture."""

    rules: tuple[Rule, ...]
    model_type: str
    linear_layers: tuple[str, ...] = DENSE_LAYERS
    """Megatron's linear layers, each of which asks a checkpoint for an (empty) extra state."""
    separate_norms: tuple[str, ...] = (FINAL_NORM,)
    """Norms that Transformer Engine does not fuse into a linear layer; these ask for one too."""
    biases: Callable[[Any], Mapping[str, bool]] = lambda config: {}
    """Which biases transformers' config object asks for, as fields of `Model`."""
    bias_places: tuple[str, ...] = ()
    """Which biases it can have at all, as fields of `Model`."""
    qk_norm: bool = False
    windows: str | None = None
    """Which layers have the sliding window: all of them, or those that ``layer_types`` names; None:
    the family has none."""
    skips_rope: bool = False
    """``no_rope_layers`` says which layers rotate."""
    sinks: bool = False
    clamps_swiglu: bool = False
    """Its experts have a clamped SwiGLU with another sigmoid, of which the up part is one more."""
    fused: tuple[Fused, ...] = ()

    @property
    def says(self) -> dict[str, Required]:
        """Megatron's arguments to what this family needs of them, where others need something
        else."""
        rows = {
            "window_size": (self.windows, ANY_VALUE),
            "no_rope_freq": (self.skips_rope, ANY_VALUE),
            "softmax_type": (self.sinks, Required(("learnable",), "attention without sinks")),
            "swiglu": (self.clamps_swiglu, Required((None, False), PLAIN_SWIGLU)),
            "quick_geglu": (self.clamps_swiglu, Required((True,), PLAIN_SWIGLU)),
            "glu_linear_offset": (self.clamps_swiglu, Required((1.0,), PLAIN_SWIGLU)),
            "activation_func_clamp_value": (self.clamps_swiglu, CLAMPS),
        }
        return {name: row for name, (has, row) in rows.items() if has}

    @property
    def has_experts(self) -> bool:
        """Its MLPs are mixtures of experts."""
        return any(EXPERT in name for name in self.linear_layers)


def _llama_biases(config: Any) -> dict[str, bool]:
    return {**_qwen3_biases(config), "mlp_bias": config.mlp_bias}


def _qwen3_biases(config: Any) -> dict[str, bool]:
    return {"qkv_bias": config.attention_bias, "output_bias": config.attention_bias}


def _gpt_oss_biases(config: Any) -> dict[str, bool]:
    return {**_qwen3_biases(config), "mlp_bias": True}


BIASED = ("qkv_bias", "output_bias", "mlp_bias")
DENSE = OUTER + ATTENTION + DENSE_MLP
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(DENSE, "llama", biases=_llama_biases, bias_places=BIASED),
    "MistralForCausalLM": Family(DENSE, "mistral", windows=ALL_LAYERS),
    "Qwen2ForCausalLM": Family(
        DENSE,
        "qwen2",
        biases=lambda config: {"qkv_bias": True},
        bias_places=BIASED[:1],
        windows=BY_LAYER,
    ),
    "Qwen3ForCausalLM": Family(
        DENSE,
        "qwen3",
        separate_norms=(FINAL_NORM, *HEAD_NORMS),
        biases=_qwen3_biases,
        bias_places=BIASED[:2],
        qk_norm=True,
        windows=BY_LAYER,
    ),
    "SmolLM3ForCausalLM": Family(
        DENSE,
        "smollm3",
        biases=_llama_biases,
        bias_places=BIASED,
        windows=BY_LAYER,
        skips_rope=True,
    ),
    "MixtralForCausalLM": Family(
        OUTER + ATTENTION + MIXTRAL_MLP,
        "mixtral",
        MOE_LAYERS,
        (FINAL_NORM, MLP_NORM),
        windows=ALL_LAYERS,
    ),
    "Qwen3MoeForCausalLM": Family(
        OUTER + ATTENTION + QWEN3_MLP,
        "qwen3_moe",
        MOE_LAYERS,
        (FINAL_NORM, MLP_NORM, *HEAD_NORMS),
        biases=_qwen3_biases,
        bias_places=BIASED[:2],
        qk_norm=True,
        windows=ALL_LAYERS,
    ),
    "GptOssForCausalLM": Family(
        OUTER + ATTENTION + (SINKS,) + GPT_OSS_MLP,
        "gpt_oss",
        MOE_LAYERS,
        (FINAL_NORM, MLP_NORM),
        biases=_gpt_oss_biases,
        bias_places=BIASED,
        windows=BY_LAYER,
        sinks=True,
        clamps_swiglu=True,
        fused=GPT_OSS_FUSED,
    ),
}

NOT_CONVERTED = {
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
        "training has all its parts (give its shape by flags), but the table of weights has no "
        "layers with experts behind layers without",
    ),
    "Olmo2ForCausalLM": "it normalises what attention and MLP give, and queries and keys across "
    "all heads; Megatron's layers normalise what goes in, and head by head",
    "GraniteForCausalLM": "it multiplies what each layer adds by residual_multiplier, which "
    "Megatron's layers do not have",
}
"""Architectures that people ask for, and why they are refused."""

CAUSAL = "ForCausalLM"
RECOMPUTED = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "follows from the RoPE settings",
    r"model\.rotary_emb\.inv_freq": "follows from the RoPE settings",
}
"""Tensors of old checkpoints that are no weights, by pattern, and why nothing is lost."""


def family_of(name: str) -> Family:
    """Find a family by its architecture.

    Raises:
        UserError: for an unknown one, with the nearest known name.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    # Most of any two names is the ending that all have.
    kinds = {known.removesuffix(CAUSAL).lower(): known for known in FAMILIES}
    kind = re.sub(f"{CAUSAL}$", "", name, flags=re.IGNORECASE).lower()
    if name in NOT_CONVERTED:
        raise UserError(f"{name} is not converted: {NOT_CONVERTED[name]} (docs/conversion.md)")
    near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.7)
    hint = f"did you mean {kinds[near[0]]}? " if near else ""
    raise UserError(
        f"unknown architecture {name!r}; {hint}Known: {', '.join(FAMILIES)} (docs/conversion.md)"
    )


def biases_without_a_place(model: Model) -> list[str]:
    """Name the biases that Megatron trains and the family has no place for.

    Megatron's linear layers have biases all or none, so one asked for brings all of them.
    """
    trained = {
        "qkv_bias": model.megatron_qkv_bias,
        "output_bias": model.linear_bias,
        "mlp_bias": model.linear_bias,
    }
    places = family_of(model.family).bias_places
    return [name for name, is_trained in trained.items() if is_trained and name not in places]


def unequal_windows(model: Model) -> str | None:
    """Say what is wrong where the family has one window for all layers, and the model has not."""
    if family_of(model.family).windows != ALL_LAYERS or len({0, *model.windows}) == 1:
        return None
    without = [number for number, size in enumerate(model.windows, 1) if not size]
    if not without:
        return None
    return (
        f"layers {', '.join(map(str, without))} have no sliding window, the others one of "
        f"{max(model.windows)}: {model.family} has it in all layers or in none"
    )


def rules_for(model: Model) -> list[Rule]:
    """Give the rules that hold for this model."""
    return [
        rule
        for rule in family_of(model.family).rules
        if rule.when is None or getattr(model, rule.when)
    ]


def recomputed(name: str) -> str | None:
    """Say why a Hugging Face tensor is not carried over, None if it must be."""
    for pattern, reason in RECOMPUTED.items():
        if re.fullmatch(pattern, name):
            return reason
    return None
