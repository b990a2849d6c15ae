"""A run's arguments against those that a checkpoint records: no difference stays unseen."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _StoreFalseAction, _StoreTrueAction
from enum import Enum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_anchor.checkpoint.megatron_args import argument_values, namespace
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.training.arguments import AnchorArguments, add_anchor_arguments
from megatron_anchor.training.command_line import CommandLine
from megatron_anchor.training.model_fields import may_change, model_fields, switch_of
from megatron_anchor.training.same_model import (
    NOT_RESTORED,
    SCALING,
    VOCABULARY,
    differences,
    lost_query_norm,
    lost_vocabulary,
    meant_values,
    restore,
)
from tests.distributed.pretraining import MODEL, TRAINING

WORDS = (MODEL + TRAINING).split()

QWEN_3 = Model(
    family="Qwen3ForCausalLM",
    layers=2,
    hidden=64,
    ffn=96,
    heads=4,
    groups=2,
    head=32,
    vocabulary=128,
    padded_vocabulary=128,
    tied=True,
    qk_norm=True,
    epsilon=1e-6,
    rotary_base=1e6,
    positions=64,
)


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser("pretrain_gpt", allow_abbrev=False)
    return add_anchor_arguments(add_megatron_arguments(parser))


@pytest.fixture(scope="module")
def run(parser):
    """A command line and its validated namespace, without the process that Megatron wants."""

    def run(*words):
        words = (*WORDS, *words)
        args = parser.parse_args(words)
        args.rank, args.world_size = 0, 1
        args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
        args.padded_vocab_size = args.padded_vocab_size or 128
        return args, CommandLine(parser, words)

    return run


def found(ours, theirs, line):
    return {d.name: (d.theirs, d.ours) for d in differences(ours, theirs, line)}


def other_value(parser, name, value):
    """A value of this argument that says something else, None where the parser cannot tell."""
    action = next((a for a in parser._actions if a.dest == name), None)
    if action is None:
        return None
    if isinstance(action, (_StoreTrueAction, _StoreFalseAction)) or isinstance(value, bool):
        return not value
    if action.choices:
        return next(c for c in action.choices if c != value and str(c) != str(value))
    if isinstance(value, (int, float)):
        return value + 1
    return "something" if action.type in (str, None) else 3


def test_every_argument_of_the_model_is_seen_when_it_differs(parser, run):
    """Whatever a checkpoint records otherwise is named, for all of them one after another."""
    args, line = run()
    seen = 0
    for name in sorted(model_fields()):
        if not hasattr(args, name) or name in (*SCALING, "group_query_attention"):
            continue
        theirs = Namespace(**vars(args))
        value = other_value(parser, name, getattr(args, name))
        setattr(theirs, name, value)
        if switch := switch_of(name):
            setattr(theirs, switch, getattr(args, switch) or 4)
        assert name in found(args, theirs, line), name
        seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("--rope-parameters", "--use-rope-scaling"),
        ("--use-rope-scaling", "--use-rope-scaling --rope-scaling-factor 4"),
        ("--rotary-seq-len-interpolation-factor 2", ""),
        ("", "--num-query-groups 4"),
    ],
)
def test_scaled_positions_and_groups_are_compared_by_what_they_mean(run, here, there):
    linear = '{"rope_type":"linear","factor":3.0}'
    ours, line = run(*here.split(), *([linear] if here == "--rope-parameters" else []))
    theirs, _ = run(*there.split())
    assert len(found(ours, theirs, line)) == 1
    assert not found(ours, Namespace(**vars(ours)), line)


def test_two_ways_to_say_one_thing_are_no_difference(run):
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    ours, line = run("--rope-parameters", str(llama).replace("'", '"'))
    theirs, _ = run("--use-rope-scaling")
    assert not found(ours, theirs, line)
    theirs, _ = run("--rotary-seq-len-interpolation-factor", "2")
    ours, line = run("--rope-parameters", '{"factor": 2.0, "rope_type": "linear"}')
    assert not found(ours, theirs, line)
    ours, line = run("--num-query-groups", "8")
    theirs = Namespace(**{**vars(ours), "group_query_attention": False, "num_query_groups": 1})
    assert not found(ours, theirs, line)
    theirs = Namespace(**{**vars(ours), "moe_aux_loss_coeff": [0.0], "qk_l2_norm": None})
    assert not found(ours, theirs, line)


def test_an_argument_without_meaning_is_no_difference(run):
    ours, line = run("--moe-router-topk", "4", "--moe-router-score-function", "sigmoid")
    theirs, _ = run()
    assert not found(ours, theirs, line)
    theirs.num_experts = 8
    assert {"num_experts", "moe_router_topk", "moe_router_score_function"} <= set(
        found(ours, theirs, line)
    )


def stock(args):
    """The record of Megatron's own program: it knows none of our flags."""
    ours = AnchorArguments.__dataclass_fields__
    return Namespace(**{name: value for name, value in vars(args).items() if name not in ours})


def test_stock_megatron_records_are_compared_too(run):
    args, line = run("--norm-epsilon", "1e-6", "--qk-layernorm")
    assert not found(args, stock(args), line)
    theirs, _ = run()
    assert found(args, stock(theirs), line) == {
        "layernorm_epsilon": (1e-5, 1e-6),
        "qk_layernorm": (False, True),
    }


def test_older_megatrons_names_are_understood(run):
    args, line = run()
    theirs = stock(args)
    for name in ("layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear"):
        delattr(theirs, name)
    theirs.norm_epsilon, theirs.apply_layernorm_1p, theirs.disable_bias_linear = 1e-5, False, True
    assert not found(args, theirs, line)
    theirs.norm_epsilon, theirs.apply_layernorm_1p, theirs.disable_bias_linear = 1e-6, True, False
    assert found(args, theirs, line) == {
        "layernorm_epsilon": (1e-6, 1e-5),
        "layernorm_zero_centered_gamma": (True, False),
        "add_bias_linear": (True, False),
    }


def test_what_the_checkpoint_does_not_record_must_not_be_set(run):
    """An older host's argument at its default is the same model; one that the user sets is not."""
    args, line = run()
    theirs = stock(args)
    for name in ("moe_router_topk_scaling_factor", "qk_l2_norm", "softmax_type", "rotary_base"):
        delattr(theirs, name)
    assert not found(args, theirs, line)
    ours, line = run("--moe-router-topk-scaling-factor", "2.5", "--num-experts", "4")
    assert found(ours, theirs, line) == {
        "num_experts": (None, 4),
        "moe_router_topk_scaling_factor": (None, 2.5),
    }
    ours, line = run("--attention-pattern", "full", "--rotary-base", "500000")
    assert not found(ours, theirs, line), "these may change, and nothing says from what"


def test_a_converted_model_has_the_flags_that_its_args_file_has(run):
    """The converter's record and its megatron_args.txt say the same of the model."""
    values = argument_values(QWEN_3, dtype=torch.float32, tokenizer=None, anchor=1)
    record = namespace(values, dtype=torch.float32)
    words = "--num-layers 2 --num-attention-heads 4 --kv-channels 32 --qk-layernorm "
    words += "--norm-epsilon 1e-06 --rotary-base 1000000 --anchor-token 1"
    args, line = run(*words.split())
    args.untie_embeddings_and_output_weights = False
    assert not found(args, record, line)
    args.layernorm_epsilon = 1e-5
    assert found(args, record, line) == {"layernorm_epsilon": (1e-6, 1e-5)}


def test_restoring_takes_all_of_the_model_and_leaves_what_was_meant(run):
    words = "--norm-epsilon 1e-6 --qk-layernorm --no-rope-freq 2 --rotary-percent 0.5 --bf16 "
    words += "--attention-pattern full --anchor-token 7 --rope-angle-dtype float64 "
    words += '--rope-parameters {"rope_type":"linear","factor":2.0}'
    theirs, _ = run(*words.split())
    ours, line = run()
    taken = restore(ours, theirs, line)
    assert not found(ours, theirs, line)
    for flag in ("--norm-epsilon 1e-06", "--qk-layernorm", "--bf16", "--attention-pattern full"):
        assert flag in taken
    meant = (
        "--attention-pattern",
        "intra-document",
        "--use-rope-scaling",
        "--norm-epsilon",
        "1e-3",
    )
    ours, line = run(*meant)
    assert set(meant_values(ours, line)) >= {"attention_pattern", "use_rope_scaling", "seq_length"}
    assert "layernorm_epsilon" not in meant_values(ours, line)
    taken = restore(ours, theirs, line)
    assert set(found(ours, theirs, line)) == {"attention_pattern", "rope_parameters"}
    assert "--norm-epsilon 1e-06 (instead of 0.001)" in taken
    ours, line = run("--fp16")
    restore(ours, theirs, line)
    assert (ours.fp16, ours.bf16) == (True, False)


def test_restoring_never_takes_code_to_import(run):
    ours, line = run()
    theirs = Namespace(**{**vars(ours), **dict.fromkeys(NOT_RESTORED, "os.system")})
    restore(ours, theirs, line)
    assert {getattr(ours, name) for name in NOT_RESTORED} == {None}


def test_the_vocabulary_may_lose_its_padding_and_no_token(run):
    args, _ = run()
    args.padded_vocab_size = 128
    record = Namespace(
        vocab_size=None,
        padded_vocab_size=256,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
    )
    assert lost_vocabulary(args, record) is None, "another tensor-parallel size pads otherwise"
    record.vocab_size = 129
    assert "128 rows of the embedding here" in lost_vocabulary(args, record)
    record.vocab_size, record.padded_vocab_size = None, 384
    assert "--padded-vocab-size 384" in lost_vocabulary(args, record)
    assert lost_vocabulary(args, Namespace()) is None
    assert vars(args).keys() >= VOCABULARY


def test_only_what_is_on_the_command_line_is_given(parser):
    line = CommandLine(parser, ["--lr", "0.00015", "--hidden-dropout", "0.1", "--no-rope-fusion"])
    assert line.given == {"lr", "hidden_dropout", "apply_rope_fusion"}
    assert line.default("hidden_dropout") == 0.1
    assert line.named(["norm-epsilon", "--qk-layernorm", "nrm"]) == {
        "norm-epsilon": "layernorm_epsilon",
        "--qk-layernorm": "qk_layernorm",
    }


class Kind(Enum):
    one = 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("layernorm_epsilon", 1e-6, "--norm-epsilon 1e-06"),
        ("qk_layernorm", True, "--qk-layernorm"),
        ("qk_layernorm", None, "no --qk-layernorm"),
        ("add_bias_linear", False, "--disable-bias-linear"),
        ("add_bias_linear", True, "no --disable-bias-linear"),
        ("window_size", None, "no --window-size"),
        ("window_size", (8, 0), "--window-size 8 0"),
        ("attention_backend", Kind.one, "--attention-backend one"),
        ("rope_parameters", '{"a": 1}', "--rope-parameters '{\"a\": 1}'"),
    ],
)
def test_values_are_written_as_flags(parser, name, value, text):
    assert CommandLine(parser, []).write(name, value) == text


@given(st.text())
def test_a_strangers_text_cannot_reach_the_terminal(text):
    """Neither escape sequences nor line ends; and it stays one word."""
    import shlex

    written = CommandLine(ArgumentParser(), []).write("--x", text)
    assert written.isprintable()
    if text.isprintable():
        assert shlex.split(written)[1:] == [text]


def test_arguments_of_samples_and_run_are_never_compared(run):
    args, line = run()
    theirs = Namespace(**vars(args))
    theirs.packing, theirs.seed, theirs.lr = "best-fit", 1, 5.0
    theirs.tensor_model_parallel_size, theirs.recompute_granularity = 4, "full"
    assert not found(args, theirs, line)
    assert all(may_change(name) for name in ("seq_length", "attention_dropout", "rotary_base"))


NORMED = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": None,
    "transformer_impl": "transformer_engine",
}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, True),
        ({"q_lora_rank": 512}, False),
        ({"qk_layernorm": False}, False),
        ({"transformer_impl": "local"}, False),
        ({"multi_latent_attention": False}, False),
        ({"attention_pattern": "anchor"}, False),
    ],
)
def test_a_norm_that_only_megatrons_layers_have_is_not_left_behind(change, lost):
    reason = lost_query_norm(Namespace(**NORMED | change))
    assert (reason is not None) == lost
    assert not lost or "a norm in front of the query projection" in reason
