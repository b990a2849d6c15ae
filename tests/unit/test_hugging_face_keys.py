"""Every key of a config.json has a row, and means what transformers makes of it."""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.hugging_face_config import config_for, model_of, sliding_window
from megatron_anchor.checkpoint.hugging_face_keys import (
    IN_ROPE,
    READ_BY_FAMILY,
    WITHOUT_EFFECT,
    kept_keys,
    read_keys,
)
from megatron_anchor.checkpoint.transformers_model import check_transformers_model
from megatron_anchor.errors import UserError

CONFIGS = Path(__file__).parents[1] / "hf_configs"
TYPES = sorted(READ_BY_FAMILY)


def stored(name, version="5.24"):
    return json.loads((CONFIGS / version / f"{name}.json").read_text())


def config_class(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def test_the_tables_are_those_of_the_families():
    assert set(TYPES) == {family.model_type for family in FAMILIES.values()}
    for model_type in TYPES:
        assert not read_keys(model_type) & kept_keys(model_type)
    words = [word for text in WITHOUT_EFFECT.values() for word in text.split()]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_of_transformers_config_class_has_a_row(model_type):
    from transformers import GenerationConfig

    kind = config_class(model_type)
    keys = {field.name for field in dataclasses.fields(kind)} | set(kind().to_dict())
    keys |= set(kind.attribute_map) | set(GenerationConfig._get_default_generation_params())
    for path in CONFIGS.rglob("*.json"):
        config = json.loads(path.read_text())
        keys |= set(config) if config["model_type"] == model_type else set()
    assert len(keys) > 50
    assert not keys - read_keys(model_type) - kept_keys(model_type)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_that_transformers_model_reads_has_a_row(model_type):
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    source = inspect.getsource(module)
    keys = set(re.findall(r"\bconfig\.([a-z]\w*)", source))
    keys |= set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))
    keys -= {"rope_parameters", "standardize_rope_params", "get_text_config"}
    assert {"hidden_size", "rms_norm_eps", "num_attention_heads"} <= keys
    assert not keys - read_keys(model_type) - kept_keys(model_type)


def test_every_key_of_transformers_rope_parameters_has_a_row():
    from transformers.modeling_rope_utils import RopeParameters

    multimodal = {"mrope_section"}
    assert set(RopeParameters.__annotations__) - IN_ROPE <= multimodal


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("value", [0, False, "x", 3, [1], {"a": 1}])
def test_a_key_without_a_row_is_refused_with_its_value(model_type, value):
    config = stored(model_type) | {"attention_twist": value}
    with pytest.raises(UserError, match=re.escape(f"attention_twist {value!r}")):
        model_of(config)
    assert model_of(config | {"attention_twist": None}) == model_of(stored(model_type))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, "per_layer_config"),
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"rope_parameters\.full_attention",
        ),
        ({"model_type": "smollm3"}, "model_type 'smollm3' contradicts architectures"),
        ({"model_type": "mistral"}, "model_type 'mistral' contradicts architectures"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "expected one name"),
    ],
)
def test_what_is_none_of_a_llama_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        model_of(stored("llama") | change)


@pytest.mark.parametrize(
    "extra",
    [
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "_attn_implementation": "sdpa"},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
        {"unsloth_version": "2025.1", "max_sequence_length": 2048, "pad_token_id": -1},
        {"temperature": 0.6, "top_p": 0.9, "id2label": {"0": "A"}, "use_cache": False},
        {"sliding_window": None, "use_sliding_window": False, "per_layer_config": None},
        {"hidden_act": "swish"},
        {"partial_rotary_factor": 1.0, "rope_scaling": None},
    ],
)
def test_what_changes_nothing_is_not_refused(extra):
    assert model_of(stored("llama") | extra) == model_of(stored("llama"))


WINDOW = {"use_sliding_window": True, "sliding_window": 16}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("qwen3", {**WINDOW, "layer_types": [FULL, SLIDING] * 2}, 16),
        ("qwen3", {**WINDOW, "layer_types": None, "max_window_layers": 2}, 16),
        ("qwen3", {**WINDOW, "layer_types": None, "max_window_layers": 4}, None),
        ("qwen3", {**WINDOW, "layer_types": [FULL] * 4, "max_window_layers": 0}, None),
        ("qwen2", {**WINDOW, "layer_types": [SLIDING] * 4}, 16),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, None),
        ("qwen3_moe", {**WINDOW, "max_window_layers": 4}, 16),
        ("mistral", {"sliding_window": 16}, 16),
        ("mixtral", {"sliding_window": 16}, 16),
    ],
)
def test_the_window_is_the_one_that_transformers_masks_with(name, change, window):
    config = stored(name) | change
    assert sliding_window(config) == window
    if window is None:
        assert model_of(config) == model_of(stored(name))
        return
    model = model_of(config)
    for like in (config, None):
        written = config_for(model, dtype="float32", like=like)
        assert sliding_window(written) == window
        assert model_of(written) == model
        check_transformers_model(written, model)
    without = dataclasses.replace(model, windows=())
    written = config_for(without, dtype="float32", like=config)
    assert sliding_window(written) is None
    assert model_of(written) == without


@pytest.mark.parametrize(
    ("name", "change", "windows"),
    [
        ("qwen3", {**WINDOW, "layer_types": [FULL, SLIDING] * 2}, (0, 16, 0, 16)),
        ("qwen3", {**WINDOW, "layer_types": None, "max_window_layers": 3}, (0, 0, 0, 16)),
        ("qwen3_moe", WINDOW, (16,) * 4),
        ("mistral", {"sliding_window": 16}, (16,) * 4),
        ("smollm3", WINDOW | {"layer_types": None}, (0, 0, 0, 16)),
        ("smollm3", WINDOW | {"layer_types": [SLIDING] * 4}, (16,) * 4),
    ],
)
def test_each_layer_has_the_window_that_transformers_gives_it(name, change, windows):
    assert model_of(stored(name) | change).windows == windows


@pytest.mark.parametrize(
    ("change", "no_rope"),
    [
        ({}, (False, False, False, True)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, (False, True) * 2),
        ({"no_rope_layers": [0, 0, 1, 0]}, (True, True, False, True)),
        ({"no_rope_layers": [1] * 4}, ()),
    ],
)
def test_the_layers_without_rope_are_those_of_transformers(change, no_rope):
    model = model_of(stored("smollm3") | change)
    assert model.no_rope == no_rope
    assert model_of(config_for(model, dtype="float32")) == model


@pytest.mark.parametrize("value", [[1, 0], [1, 0, 1, 2], [1] * 5, ["x"] * 4])
def test_a_list_of_layers_without_rope_that_says_nothing_clear_is_refused(value):
    with pytest.raises(UserError, match=r"no_rope_layers"):
        model_of(stored("smollm3") | {"no_rope_layers": value})


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen3_moe"])
def test_a_window_in_all_layers_beside_layers_without_is_refused(name):
    config = stored(name) | WINDOW | {"layer_types": [FULL] * 4}
    if name != "qwen3_moe":
        del config["use_sliding_window"]
    with pytest.raises(UserError, match=r"layer_types .* with sliding_window 16, which"):
        model_of(config)


@pytest.mark.parametrize("kinds", [[SLIDING] * 4, ["chunked_attention"] * 4])
def test_layers_that_transformers_could_not_run_are_refused(kinds):
    config = stored("qwen3") | {"use_sliding_window": False, "layer_types": kinds}
    with pytest.raises(UserError, match="layer_types"):
        model_of(config)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def test_the_length_that_scaling_starts_from_may_stand_at_the_top():
    config = stored("llama") | {"rope_parameters": YARN, "original_max_position_embeddings": 32}
    model = model_of(config)
    assert model.scaling["original_max_position_embeddings"] == 32
    check_transformers_model(config, model)
    config["rope_parameters"] = {**YARN, "original_max_position_embeddings": 64}
    with pytest.raises(UserError, match=r"embeddings 32 contradicts .* 64"):
        model_of(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rotary_base": 5e5}, "transformers rotates by inverse frequencies 1 "),
        ({"ffn": 97}, "weights, this package's reading of it"),
    ],
)
def test_another_reading_than_transformers_own_is_noticed(change, said):
    config = stored("llama")
    model = model_of(config)
    check_transformers_model(config, model)
    with pytest.raises(UserError, match=said):
        check_transformers_model(config, dataclasses.replace(model, **change))


def test_a_model_that_transformers_cannot_build_is_refused():
    config = stored("qwen2") | {"head_dim": None}
    with pytest.raises(UserError, match="transformers builds no model from it: TypeError"):
        check_transformers_model(config, model_of(config))


def test_an_export_with_scaling_names_what_transformers_would_compute_it_from():
    like = stored("mixtral") | {"head_dim": None}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    model = dataclasses.replace(model_of(like), scaling=scaling)
    config = config_for(model, dtype="float32", like=like)
    assert config["head_dim"] == model.head
    check_transformers_model(config, model)
    assert config_for(model_of(like), dtype="float32", like=like)["head_dim"] is None


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with normalized weights"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "with norm_topk_prob false it does",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of 4 experts"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ("mixtral", {"num_experts": 2}, "are two names of one number, got 2 and 4"),
        ("qwen3_moe", {"num_experts": 2}, "are two names of one number, got 2 and 4"),
    ],
)
def test_experts_that_megatron_has_not_are_refused(name, change, said):
    with pytest.raises(UserError, match=said):
        model_of(stored(name) | change)
    allowed = {"num_experts_per_tok": 1, "norm_topk_prob": False}
    assert model_of(stored("qwen3_moe") | allowed).experts_per_token == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config\(dequantize=True\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "take the model's original ones"),
        ({"swiglu_alpha": 1.5}, r"swiglu_alpha 1\.5: .* 1\.702 fixed"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0, expected a number > 0"),
        ({"sliding_window": None}, "only where there is a window"),
        ({"sliding_window": 0}, "sliding_window 0"),
    ],
)
def test_what_gpt_oss_cannot_be_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        model_of(stored("gpt_oss") | change)


def test_gpt_oss_scales_its_rotation_by_default_as_its_class_does():
    config = {k: v for k, v in stored("gpt_oss").items() if k != "rope_parameters"}
    model = model_of(config)
    assert model == model_of(stored("gpt_oss"))
    assert model.scaling == model_of(stored("gpt_oss")).scaling
    assert model.scaling["truncate"] is False
    check_transformers_model(config, model)
