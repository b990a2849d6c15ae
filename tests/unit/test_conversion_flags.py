"""megatron_args.txt against Megatron's own parser, and what the checkpoint records."""

import json
import sys

import pytest
import torch

from megatron_anchor.checkpoint.argument_check import check_representable
from megatron_anchor.checkpoint.hugging_face_config import config_for, model_of
from megatron_anchor.checkpoint.megatron_args import (
    argument_values,
    flag_lines,
    model_from_args,
    namespace,
)
from megatron_anchor.errors import UserError
from megatron_anchor.training.arguments import add_anchor_arguments, rope_scaling
from tests.conversion_models import MODELS, hugging_face_model


@pytest.fixture
def parse(monkeypatch):
    def parse(lines):
        from megatron.training.arguments import parse_args

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *" ".join(lines).split()])
        return parse_args(add_anchor_arguments)

    return parse


@pytest.mark.parametrize("name", MODELS)
def test_flags_and_recorded_arguments_say_the_same_to_megatron(name, parse):
    config = hugging_face_model(name).config
    model = model_of(
        {**config.to_dict(), "architectures": [type(config).__name__[:-6] + "ForCausalLM"]}
    )
    values = argument_values(model, dtype=torch.bfloat16, tokenizer=None, anchor=1)
    parsed, recorded = parse(flag_lines(values)), namespace(values, dtype=torch.bfloat16)
    for key, value in vars(recorded).items():
        if key in vars(parsed) and key not in OF_THE_CHECKPOINT and value is not None:
            assert getattr(parsed, key) == value, key
    assert parsed.bf16
    assert rope_scaling(parsed) == dict(model.scaling)
    # What a run records leads back to the model.
    again = model_from_args(parsed, family=model.family, padded_vocabulary=model.padded_rows)
    for field in ("layers", "head", "groups", "rotary_base", "positions", "tied", "qk_norm"):
        assert getattr(again, field) == getattr(model, field), field
    for field in ("experts", "ffn", "vocabulary", "normalized_router", "experts_per_token"):
        assert getattr(again, field) == getattr(model, field), field
    assert (again.megatron_qkv_bias, again.linear_bias) == (
        model.megatron_qkv_bias,
        model.linear_bias,
    )


OF_THE_CHECKPOINT = {"params_dtype", "consumed_train_samples", "no_save_optim", "no_save_rng"}
"""Recorded for the loader, not for the command line."""
RUN = (
    "--num-layers 2",
    "--hidden-size 64",
    "--num-attention-heads 8",
    "--swiglu",
    "--normalization RMSNorm",
    "--position-embedding-type rope",
    "--max-position-embeddings 64",
)


def test_a_run_of_stock_megatron_has_none_of_our_flags(parse):
    args = parse([*RUN, "--disable-bias-linear", "--use-rope-scaling"])
    del args.rope_parameters
    model = model_from_args(args, family=None, padded_vocabulary=128)
    assert model.family == "LlamaForCausalLM"
    assert model.scaling["rope_type"] == "llama3"
    assert model.vocabulary == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--normalization LayerNorm", "normalization 'LayerNorm'"),
        ("--rotary-percent 0.5", "rotary_percent 0.5"),
        (
            "--position-embedding-type learned_absolute",
            "position_embedding_type 'learned_absolute'",
        ),
    ],
)
def test_a_run_that_is_none_of_the_families_is_refused(flags, message, parse):
    with pytest.raises(UserError, match=message):
        check_representable(vars(parse([*RUN, flags])))


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_an_export_has_one_base_where_the_rope_parameters_name_it_too(kind, parse):
    form = {"rope_type": kind, "rope_theta": 5e5}
    if kind == "yarn":
        form |= {"factor": 4.0, "original_max_position_embeddings": 16}
    args = parse(RUN)
    args.rotary_base, args.rope_parameters = 500000, json.dumps(form)
    model = model_from_args(args, family=None, padded_vocabulary=128)
    assert model.rotary_base == 5e5
    config = config_for(model, dtype="float32")
    assert "rope_theta" not in (config["rope_scaling"] or {})
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert (config["rope_scaling"] is None) == (kind == "default")
    assert model_of(config).scaling == model.scaling


def test_two_bases_are_refused_with_both_unless_one_is_ignored(parse):
    args = parse([*RUN, "--disable-bias-linear"])
    args.rope_parameters = '{"rope_type": "default", "rope_theta": 5000000}'
    with pytest.raises(UserError, match=r"rope_theta 5000000 .* expected 10000"):
        check_representable(vars(args))
    [note] = check_representable(vars(args), ignored=["rope_parameters"])
    assert "rope_theta 5000000" in note
    model = model_from_args(args, family=None, padded_vocabulary=128)
    assert (model.rotary_base, model.scaling) == (10000.0, {})
