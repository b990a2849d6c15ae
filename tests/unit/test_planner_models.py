"""Shapes and counts of models against published figures."""

import json
import re
from pathlib import Path

import pytest

from megatron_anchor.errors import UserError
from megatron_anchor.planner.models import MODELS, find_model
from megatron_anchor.planner.work import layer_work, linear_weights, parameters

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


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_published_number_of_parameters(name):
    assert parameters(MODELS[name][0]) == PUBLISHED[name]


def test_a_folder_is_read_as_the_converter_reads_it(tmp_path):
    config = json.loads((CONFIGS / "4.57" / "qwen2.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    name, model = find_model(str(tmp_path))
    assert name == str(tmp_path)
    assert (model.layers, model.hidden) == (config["num_hidden_layers"], config["hidden_size"])
    assert model.qkv_bias


def test_names_of_repositories_are_understood():
    assert find_model("meta-llama/Llama-2-7b-hf")[1] == MODELS["llama-2-7b"][0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-2-8b", r"--model llama-2-8b: did you mean llama-\d-\db\?"),
        ("gpt", "give a folder with a config.json, or one of llama-2-7b"),
    ],
)
def test_unknown_models_are_refused_with_the_known_ones(name, message):
    with pytest.raises(UserError, match=message):
        find_model(name)


def test_mixtures_of_experts_are_refused(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "4.57" / "mixtral.json").read_text())
    with pytest.raises(UserError, match=re.escape("dense models only")):
        find_model(str(tmp_path))


def test_work_is_six_operations_a_weight_and_fourteen_a_pair_and_channel():
    model = MODELS["llama-2-7b"][0]
    work = layer_work(model, sequence_length=100, pairs=5050)
    assert work.linear == 6 * linear_weights(model) * 100
    assert work.attention == 14 * model.hidden * 5050
    again = layer_work(model, sequence_length=100, pairs=5050, recompute="full")
    assert again.linear == 8 * linear_weights(model) * 100
    assert again.attention == 18 * model.hidden * 5050
