"""Fields of config.json that are missing or of the wrong kind."""

import json
from pathlib import Path

import pytest

from megatron_anchor.checkpoint.hugging_face_config import model_of, sliding_window
from megatron_anchor.checkpoint.transformers_config import DEFAULTED, ROPE, SIZES
from megatron_anchor.errors import UserError

CONFIGS = Path(__file__).parents[1] / "hf_configs"
OURS = {
    "num_key_value_heads": "groups",
    "rms_norm_eps": "epsilon",
    "max_position_embeddings": "positions",
    "tie_word_embeddings": "tied",
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalized_router",
    "moe_intermediate_size": "ffn",
    "router_aux_loss_coef": "router_loss_coefficient",
    "head_dim": "head",
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "smollm3", "gpt_oss")


def stored(name, version="5.24"):
    return json.loads((CONFIGS / version / f"{name}.json").read_text())


@pytest.mark.parametrize("version", ["4.57", "5.24"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_is_what_transformers_makes_of_it(family, version, tmp_path):
    from transformers import AutoConfig

    config = stored(family, version)
    optional = [k for k in (*DEFAULTED, *ROPE) if k in config]
    alone = [
        name for name in optional if name not in ("num_key_value_heads", "num_experts_per_tok")
    ]
    for gone in [[name] for name in alone] + [optional]:
        left = {k: v for k, v in config.items() if k not in gone}
        if gone == optional:
            left["num_attention_heads"] = 32  # a multiple of every family's default groups
        (tmp_path / "config.json").write_text(json.dumps(left))
        theirs = AutoConfig.from_pretrained(tmp_path)
        model = model_of(left)
        for name, ours in OURS.items():
            if hasattr(theirs, name) and getattr(theirs, name) is not None:
                assert getattr(model, ours) == getattr(theirs, name), (gone, name)
        rope = getattr(theirs, "rope_parameters", None) or theirs
        theta = rope["rope_theta"] if isinstance(rope, dict) else rope.rope_theta
        assert model.rotary_base == theta, gone
        assert sliding_window(left) == getattr(theirs, "sliding_window", None), gone


@pytest.mark.parametrize("value", [None, "4", [], {}, -1, 0, True, float("nan"), float("inf"), 2.5])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_no_value_of_a_field_ends_in_a_traceback(family, value):
    refused = 0
    for name in (*SIZES, *DEFAULTED, *ROPE, "architectures", "model_type"):
        try:
            model_of(stored(family) | {name: value})
        except UserError as error:
            refused += "config.json" in str(error) or "unknown architecture" in str(error)
    assert refused >= len(SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is None, expected a number > 0"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads is '4', expected int"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', expected dict"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4'"),
        ({"rope_scaling": {"type": "linear", "factor": None, "rope_type": 3}}, "rope_type is 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected bool"),
    ],
)
def test_the_field_and_its_value_are_named(change, message):
    with pytest.raises(UserError, match=message):
        model_of(stored("llama") | change)
