"""Biases that Megatron trains because its linear layers have all of them or none."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_anchor.checkpoint.families import BIASED, FAMILIES
from megatron_anchor.checkpoint.hugging_face_config import config_for, model_of
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from megatron_anchor.errors import UserError
from tests.conversion_models import SHAPE, hugging_face_model, weights_of

QUIET = {"progress": False}
CONFIG = {"architectures": ["Qwen3ForCausalLM"], **SHAPE, "rms_norm_eps": 1e-6, "head_dim": 8}


def train_biases(folder):
    """Set every bias of a checkpoint to numbers, in place, as training does."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with Files() as files:
        checkpoint = TorchDistCheckpoint(folder, files)
        for index in metadata.storage_data:
            if not index.fqn.endswith(".bias") or index.offset is None:
                continue
            shape, dtype = checkpoint.tensors()[index.fqn]
            rows = checkpoint.rows(index.fqn, tuple(index.offset)[:1])
            extent = rows._pieces[0].extent
            values = torch.randn(shape[1:]).to(dtype)
            with open(extent.path, "r+b") as file:
                file.seek(extent.offset)
                file.write(values.view(torch.uint8).numpy().tobytes())


@pytest.fixture
def trained(tmp_path, request):
    """A conversion of a model with its config beside it, whose biases were all trained."""
    model = hugging_face_model(request.param)
    model.save_pretrained(tmp_path / "hf")
    vocabulary = {f"t{i}": i for i in range(131)}
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(
        str(tmp_path / "hf/tokenizer.json")
    )
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    train_biases(tmp_path / "megatron/release")
    return tmp_path


@pytest.mark.parametrize("trained", ["llama yarn, attention bias", "llama mlp bias"], indirect=True)
def test_trained_biases_are_all_exported_without_like(trained):
    done = convert_to_hugging_face(trained / "megatron", trained / "back", **QUIET)
    assert done.like == str(trained / "megatron/hugging_face")
    config = json.loads((trained / "back/config.json").read_text())
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    weights = weights_of(trained / "back")
    biases = [name for name in weights if name.endswith(".bias")]
    assert len(biases) == 4 * 7
    assert all(weights[name].abs().sum() > 0 for name in biases)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(trained / "back").state_dict()
    assert loaded.keys() == weights.keys()
    with pytest.raises(UserError, match=r"was trained, but LlamaForCausalLM .* without --like"):
        convert_to_hugging_face(trained / "megatron", trained / "x", like=trained / "hf", **QUIET)


@pytest.mark.parametrize("trained", ["qwen2"], indirect=True)
def test_a_family_whose_biases_have_their_place_keeps_it(trained):
    convert_to_hugging_face(trained / "megatron", trained / "back", **QUIET)
    assert weights_of(trained / "back").keys() == weights_of(trained / "hf").keys()


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_attention_biases_that_bring_biases_without_a_place_are_refused(name):
    config = {**CONFIG, "architectures": [name], "attention_bias": True}
    if "Moe" in name:
        config |= {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    with pytest.raises(UserError, match=r"attention_bias true .* has no mlp_bias"):
        model_of(config)


def test_a_run_with_biases_is_not_exported_as_a_family_without_them(tmp_path):
    hugging_face_model("qwen3").save_pretrained(tmp_path / "hf")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    path = tmp_path / "megatron/release"
    with Files() as files:
        state = TorchDistCheckpoint(path, files).common_state()
    state["args"].add_bias_linear = True
    torch.save(state, path / "common.pt")
    with pytest.raises(UserError, match="mlp_bias, for which Qwen3ForCausalLM has no place"):
        convert_to_hugging_face(tmp_path / "megatron", tmp_path / "back", **QUIET)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_biases_of_queries_alone_are_not_exported_as_a_family_with_more(name):
    model = replace(model_of(CONFIG | {"architectures": [name]}), qkv_bias=True)
    with pytest.raises(UserError, match=r"--add-qkv-bias: .* begin with a Qwen2 model"):
        config_for(model, dtype=torch.bfloat16)


def test_the_tables_give_every_bias_that_a_config_asks_for_a_place():
    for family in FAMILIES.values():
        asked = family.biases(SimpleNamespace(attention_bias=True, mlp_bias=True))
        assert set(asked) <= set(family.bias_places) <= set(BIASED)
