"""config.json in the forms of transformers 4.57 and 5.x: the same model in, both forms out.

The stored configs were written by ``save_pretrained`` of the version that names their folder.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_anchor.checkpoint.extension import BASES, extended
from megatron_anchor.checkpoint.hugging_face_config import config_for, model_of
from megatron_anchor.errors import UserError

CONFIGS = Path(__file__).parents[1] / "hf_configs"
NAMES = sorted(path.stem for path in (CONFIGS / "4.57").glob("*.json"))
VERSIONS = ("4.57", "5.24")


def stored(version, name):
    return json.loads((CONFIGS / version / f"{name}.json").read_text())


def test_both_versions_store_the_same_cases_in_different_forms():
    assert len(NAMES) >= 7
    assert sorted(path.stem for path in (CONFIGS / "5.24").glob("*.json")) == NAMES
    assert "rope_theta" in stored("4.57", "llama3")
    assert "rope_theta" not in stored("5.24", "llama3")
    assert "rope_parameters" in stored("5.24", "llama3")


@pytest.mark.parametrize("name", NAMES)
def test_both_versions_describe_the_same_model(name):
    assert model_of(stored("4.57", name)) == model_of(stored("5.24", name))
    assert dict(model_of(stored("4.57", name)).scaling) == dict(
        model_of(stored("5.24", name)).scaling
    )


@pytest.mark.parametrize("like", [None, *VERSIONS])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_reads_as_the_same_model_under_both_forms(name, like):
    model = model_of(stored("5.24", name))
    config = config_for(model, dtype="bfloat16", like=stored(like, name) if like else None)
    only_old = {k: v for k, v in config.items() if k != "rope_parameters"}
    only_new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    for form in (config, only_old, only_new):
        again = model_of(form)
        assert again == model
        assert dict(again.scaling) == dict(model.scaling)


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_transformers_rotates_by_the_written_config_as_by_its_own(name, tmp_path):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    version = "5.24" if hasattr(AutoConfig.for_model("llama"), "rope_parameters") else "4.57"
    frequencies = []
    for folder, config in (
        ("own", stored(version, name)),
        ("written", config_for(model_of(stored("4.57", name)), dtype="bfloat16")),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path / folder))
        frequencies.append((rotary.inv_freq, rotary.attention_scaling))
    assert torch.equal(frequencies[0][0], frequencies[1][0])
    assert frequencies[0][1] == frequencies[1][1]


def test_the_oldest_form_of_scaling_is_understood():
    config = stored("4.57", "llama_linear")
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert model_of(config) == model_of(stored("4.57", "llama_linear"))


def test_contradicting_forms_are_refused_with_both_values():
    config = stored("5.24", "llama") | {"rope_theta": 5e6}
    with pytest.raises(UserError, match=r"contradicts rope_theta 5000000\.0"):
        model_of(config)


def test_a_sliding_window_is_carried():
    config = stored("4.57", "mistral") | {"sliding_window": 128}
    model = model_of(config)
    assert model.windows == model.windows_in_force == (128,) * 4
    assert config_for(model, dtype="bfloat16", like=config)["sliding_window"] == 128


def test_a_sliding_window_that_is_off_or_as_long_as_the_model_is_no_window():
    qwen = stored("4.57", "qwen2") | {"sliding_window": 64, "use_sliding_window": False}
    assert model_of(qwen) == model_of(stored("4.57", "qwen2"))
    mistral = stored("4.57", "mistral") | {"sliding_window": 256}
    assert model_of(mistral).windows_in_force == ()
    assert extended(model_of(mistral), positions=257).windows_in_force == (256,) * 4


def test_a_window_that_the_class_has_by_default_is_a_window():
    config = stored("4.57", "mistral") | {"max_position_embeddings": 32768}
    del config["sliding_window"]
    assert model_of(config).windows_in_force == (4096,) * 4


def test_the_original_length_of_a_scaling_stays_when_the_length_is_extended():
    config = stored("4.57", "qwen2_yarn")
    del config["rope_scaling"]["original_max_position_embeddings"]
    model = extended(model_of(config), extend_to=65536)
    assert model.scaling["original_max_position_embeddings"] == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausallm"]}, "did you mean LlamaForCausalLM"),
        ({"architectures": ["Qwen4ForCausalLM"]}, "did you mean Qwen"),
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture 'GPT2LMHeadModel'; Known"),
        ({"architectures": ["BloomForCausalLM"]}, "unknown architecture 'BloomForCausalLM'; Known"),
        ({"architectures": "LlamaForCausalLM"}, r"expected a list of names such as \['Llama"),
        ({"architectures": ["Olmo2ForCausalLM"]}, "normalises what attention and MLP give"),
        ({"architectures": ["GraniteForCausalLM"]}, "residual_multiplier"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "Deepseek.* is not converted: training has"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope type 'longrope'"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_value(change, message):
    with pytest.raises(UserError, match=message):
        model_of(stored("4.57", "llama") | change)


def test_extension_takes_the_papers_bases():
    model = model_of(stored("4.57", "llama"))
    assert {n: extended(model, extend_to=n).rotary_base for n in BASES} == {
        16384: 1e6,
        32768: 1e6,
        65536: 5e6,
        131072: 1e7,
        262144: 5e7,
    }
    assert extended(model, extend_to=65536).positions == 65536
    assert extended(model, extend_to=65536, rotary_base=3e6).rotary_base == 3e6
    assert extended(model) == model
    with pytest.raises(UserError, match="--extend-to 50000"):
        extended(model, extend_to=50000)
