"""Shapes and counts of models against published figures, and against transformers' own models."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers

from megatron_anchor.errors import UserError
from megatron_anchor.planner import models
from megatron_anchor.planner.configs import shape_of
from megatron_anchor.planner.launch import model_flags
from megatron_anchor.planner.models import MODELS, find_model, known_shape
from megatron_anchor.planner.shapes import Latent
from megatron_anchor.planner.weights import active_parameters, parameters
from megatron_anchor.planner.work import layer_work

CONFIGS = Path(__file__).parents[1] / "hf_configs"

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters as the safetensors metadata on Hugging Face counts them."""

PUBLISHED_BILLIONS = {
    "qwen3-30b-a3b": (30.5, 3.3, 2),
    "qwen3-235b-a22b": (235, 22, 2),
    "mixtral-8x7b": (46.7, 12.9, 2),
    "gpt-oss-20b": (20.9, 3.6, 1),
    "gpt-oss-120b": (116.8, 5.1, 1),
    "glm-4.5-air": (106, 12, 0),
    "deepseek-v2-lite": (15.7, 2.4, 1),
    "deepseek-v3": (671, 37, 2),
}
"""All and active parameters by model cards and papers, which count active embeddings differently:
both, the output layer alone, or none. Without multi-token prediction."""


def transformers_parameters(config):
    """Parameters of transformers' model of a config, which is built without memory."""
    (name,) = config["architectures"]
    cls = getattr(transformers, name)
    rest = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        model = cls(cls.config_class(**rest))
    # The bias in the choice of experts is a parameter there and a buffer in Megatron.
    return sum(p.numel() for key, p in model.named_parameters() if "e_score" not in key)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_number_of_parameters(name):
    assert parameters(known_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_as_many_parameters_as_in_transformers(name):
    assert parameters(known_shape(name)) == transformers_parameters(MODELS[name].config)


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_experts_have_the_published_total_and_active_parameters(name):
    total, active, embeddings = PUBLISHED_BILLIONS[name]
    shape = known_shape(name)
    one = shape.model.hidden * shape.model.vocabulary
    assert parameters(shape) / 1e9 == pytest.approx(total, rel=0.01)
    counted = active_parameters(shape) - (2 - embeddings) * one
    assert counted / 1e9 == pytest.approx(active, rel=0.03)


def test_qwen3_30b_a3b_by_hand():
    attention = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128  # q, k, v, output; norms of q and k
    expert, router = 3 * 2048 * 768, 2048 * 128
    layer = attention + router + 2 * 2048
    ends = 2 * 151936 * 2048 + 2048
    shape = known_shape("qwen3-30b-a3b")
    assert parameters(shape) == 48 * (layer + 128 * expert) + ends
    assert active_parameters(shape) == 48 * (layer + 8 * expert) + ends


def test_deepseek_v3_by_hand():
    q = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    kv = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = q + kv + 128 * 128 * 7168 + 2 * 7168
    expert = 3 * 7168 * 2048
    dense, sparse = 3 * 7168 * 18432, 7168 * 256 + expert
    ends = 2 * 129280 * 7168 + 7168
    plain = 61 * attention + 3 * dense + 58 * sparse + ends
    shape = known_shape("deepseek-v3")
    assert parameters(shape) == plain + 58 * 256 * expert
    assert active_parameters(shape) == plain + 58 * 8 * expert
    predictor = attention + sparse + 256 * expert + 2 * 7168**2 + 3 * 7168
    assert parameters(shape, predictors=True) - parameters(shape) == predictor


TINY = {
    "DeepseekV3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "DeepseekV2": {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "SmolLM3": {},
    "Mistral": {},
    "Qwen3": {},
    "Qwen2": {},
    "Llama": {},
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("family", TINY)
def test_a_config_that_transformers_wrote_gives_its_model(family, tmp_path):
    cls = getattr(transformers, f"{family}ForCausalLM")
    config = cls.config_class(**SMALL | TINY[family])
    config.architectures = [cls.__name__]
    config.save_pretrained(tmp_path)
    name, shape = find_model(str(tmp_path))
    assert name == str(tmp_path)
    with torch.device("meta"):
        model = cls(config)
    assert parameters(shape) == sum(p.numel() for p in model.parameters())


def test_a_folder_is_read_as_the_converter_reads_it(tmp_path):
    config = json.loads((CONFIGS / "4.57" / "qwen2.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    name, shape = find_model(str(tmp_path))
    model = shape.model
    assert name == str(tmp_path)
    assert (model.layers, model.hidden) == (config["num_hidden_layers"], config["hidden_size"])
    assert model.qkv_bias


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_a_config_means_the_same_without_transformers(path, tmp_path, monkeypatch):
    config = json.loads(path.read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with_defaults = find_model(str(tmp_path))[1]
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    alone = find_model(str(tmp_path))[1]
    assert alone == with_defaults
    assert dict(alone.model.scaling) == dict(with_defaults.model.scaling)
    assert dict(alone.arguments) == dict(with_defaults.arguments)


@pytest.mark.parametrize(
    ("name", "change", "window"),
    [
        ("mistral-7b-v0.1", {}, 4096),
        ("mistral-7b-v0.1", {"sliding_window": None}, None),
        ("mistral-7b-v0.3", {"sliding_window": 1024}, 1024),
        ("qwen2.5-7b", {"sliding_window": 1024}, None),
        (
            "qwen2.5-7b",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 14},
            8,
        ),
        ("gpt-oss-20b", {"sliding_window": 64}, 64),
    ],
)
def test_a_window_is_there_where_transformers_has_one(name, change, window):
    shape = shape_of(dict(MODELS[name].config) | change)
    assert shape.window == window
    assert any(shape.windowed) == (window is not None)


def test_a_missing_window_is_the_familys_default():
    config = {k: v for k, v in MODELS["mistral-7b-v0.1"].config.items() if k != "sliding_window"}
    assert shape_of(config).window == 4096


def test_windows_sinks_latents_and_predictors_are_read():
    assert known_shape("mistral-7b-v0.1").windowed == (True,) * 32
    assert known_shape("mistral-7b-v0.3").window is None
    oss = known_shape("gpt-oss-20b")
    assert (oss.window, oss.windowed[:3], oss.sinks) == (128, (True, False, True), True)
    v3 = known_shape("deepseek-v3")
    assert v3.predicted == 1
    assert v3.latent == Latent(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("DeepSeek-V3", "deepseek-v3"),
        ("mistral-7b", "mistral-7b-v0.3"),
    ],
)
def test_names_of_repositories_are_understood(name, known):
    assert find_model(name)[1] == known_shape(known)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-2-8b", r"--model llama-2-8b: did you mean llama-\d-\db"),
        ("qwen3-30b", "did you mean qwen3-30b-a3b or"),
        ("deepseek-v2", "did you mean deepseek-v2-lite or"),
        ("gpt", "one of llama-2-7b"),
        ("gpt", "a folder with the model's config.json from Hugging Face"),
    ],
)
def test_unknown_models_are_refused_with_the_known_ones_and_the_way_to_give_another(name, message):
    with pytest.raises(UserError, match=message):
        find_model(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM: known are Llama"),
        ({"num_attention_heads": 0}, "is 0, expected a whole number of at least 1"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok 300 of 256 experts"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace 62 of 61 layers"),
        ({"n_routed_experts": "many"}, "n_routed_experts is 'many', expected a whole number"),
        ({"kv_lora_rank": 1.5}, "kv_lora_rank is 1.5, expected a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, expected a whole number"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor is 'x', expected a number"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_its_key(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(MODELS["deepseek-v3"].config) | change))
    with pytest.raises(UserError, match=re.escape(message)):
        find_model(str(tmp_path))


STRANGE = (None, 0, -1, 1.5, "x; rm -rf", True, [], [1], {}, {"rope_type": []}, math.nan, 10**30)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "smollm3-3b", "glm-4.5-air"])
def test_no_value_of_a_config_breaks_the_planner_or_reaches_the_command_unread(name, monkeypatch):
    """Each key in turn holds something strange: it is refused by name, or the command holds none of
    it but as one quoted word."""
    for key in {**MODELS[name].config, "layer_types": 0, "no_rope_layers": 0, "head_dim": 0}:
        for value in STRANGE:
            config = dict(MODELS[name].config) | {key: value}
            try:
                shape = shape_of(config)
                words = shlex.split(" ".join(model_flags(shape)))
            except UserError:
                continue
            assert not any(word in ("rm", "-rf") for word in words), (key, value)
            assert parameters(shape) >= active_parameters(shape) > 0, (key, value)


def test_work_is_six_operations_a_weight_and_fourteen_a_pair_and_channel():
    weights = 4096 * 4096 * 4 + 3 * 4096 * 11008
    shape = known_shape("llama-2-7b")
    work = layer_work(shape, sequence_length=100, pairs=5050)
    assert work.linear == 6 * weights * 100
    assert work.attention == 14 * 4096 * 5050
    again = layer_work(shape, sequence_length=100, pairs=5050, recompute="full")
    assert again.linear == 8 * weights * 100
    assert again.attention == 18 * 4096 * 5050
