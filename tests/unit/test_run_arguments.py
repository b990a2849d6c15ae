"""Every argument of the host has a row, and what has none is refused by name."""

import dataclasses
from argparse import ArgumentParser, Namespace

import pytest
import torch

from megatron_anchor import compat
from megatron_anchor.checkpoint import argument_check
from megatron_anchor.checkpoint.argument_check import (
    HARMLESS,
    check_representable,
    unrepresentable,
)
from megatron_anchor.checkpoint.model_arguments import (
    CARRIED,
    DEPENDENT,
    REQUIRED,
    WITHOUT_EFFECT,
)
from megatron_anchor.checkpoint.training_arguments import NOT_OF_THE_MODEL
from megatron_anchor.errors import UserError
from megatron_anchor.training.arguments import add_anchor_arguments

OF_THE_MODEL = CARRIED | set(REQUIRED) | frozenset().union(*WITHOUT_EFFECT.values())
ROWS = OF_THE_MODEL | frozenset().union(*NOT_OF_THE_MODEL.values())
ELSEWHERE = (
    DEPENDENT["modelopt_enabled"]
    | NOT_OF_THE_MODEL["what the run counted and found out by itself"]
    | {"modelopt_enabled", "enable_gpt_oss", "kitchen_config_file", "kitchen_recipe_number"}
    | {"apply_layernorm_1p"}
)
"""Rows of names that the host adds only in some runs, or had in earlier versions."""
PINNED = pytest.mark.skipif(
    not compat.host_version().startswith("0.19."),
    reason="rows are held against the pinned Megatron; others' additions are refused when set",
)
NOT_THE_DEFAULT = {"swiglu", "normalization", "position_embedding_type"}
"""Flags that a run must set to be one of the families."""


@pytest.fixture(scope="module")
def host():
    """Names of the model config's fields, of the flags, and the flags' defaults."""
    compat.quiet_imports_without_gpu()
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    parser = add_anchor_arguments(add_megatron_arguments(ArgumentParser()))
    flags = vars(parser.parse_args([]))
    return {field.name for field in dataclasses.fields(TransformerConfig)}, flags


@PINNED
def test_every_field_of_the_model_config_and_every_flag_has_a_row(host):
    fields, flags = host
    assert len(fields) > 300
    assert len(flags) > 800
    assert not fields - OF_THE_MODEL
    assert not set(flags) - ROWS


@PINNED
def test_no_row_is_stale_and_no_name_has_two(host):
    fields, flags = host
    assert not ROWS - fields - set(flags) - ELSEWHERE
    kinds = [CARRIED, frozenset(REQUIRED), *WITHOUT_EFFECT.values(), *NOT_OF_THE_MODEL.values()]
    assert sum(map(len, kinds)) == len(ROWS)


@PINNED
def test_what_the_host_reads_to_build_a_model_is_not_called_training(host):
    """Megatron's own translation of arguments is watched while it reads them."""
    fields, flags = host
    read = set()

    class Watched(Namespace):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "padded_vocab_size": 64}
    usual = {"params_dtype": torch.float32, "apply_rope_fusion": False, "cp_comm_type": ["a2a"]}
    args = Watched(**{**flags, **sizes, **usual, "transformer_impl": "local"})
    read.clear()
    compat.gpt_model_config(args)
    read = {name for name in read if not name.startswith("__")}
    assert len(read) > len(fields)
    assert not read - OF_THE_MODEL


def test_the_hosts_defaults_are_what_the_families_need(host):
    _, flags = host
    problems = unrepresentable({**flags, "num_experts": 4})
    assert set(problems) == NOT_THE_DEFAULT


def test_what_has_a_dependent_row_is_itself_required():
    assert set(DEPENDENT) <= set(REQUIRED)


FAMILY = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
EXPERTS = {**FAMILY, "num_experts": 4}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"no_rope_freq": [0, 1, 0, 1]}, r"no_rope_freq \[0, 1, 0, 1\] \(.* expected None"),
        ({"window_size": (7, 0)}, r"window_size \(7, 0\) \(.* expected None"),
        ({"softmax_scale": 0.5}, r"softmax_scale 0\.5 \(.* expected None"),
        ({"use_mup": True}, r"use_mup True \(.* expected None or False"),
        ({"spec": ["os", "system"]}, r"spec \['os', 'system'\]"),
        ({**EXPERTS, "moe_router_topk_scaling_factor": 2.5}, r"scaling_factor 2\.5 .*or 1\.0"),
        ({**EXPERTS, "moe_layer_freq": [1, 0]}, r"moe_layer_freq \[1, 0\] \(.* expected 1"),
        ({**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "sinkhorn"),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            r"factor 32\.0 \(.* expected 8\.0",
        ),
    ],
)
def test_what_a_family_cannot_say_is_refused_with_both_values(given, said):
    with pytest.raises(UserError, match=said) as caught:
        check_representable(FAMILY | given)
    assert "--ignore-arguments" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"no_rope_freq": [0, 0]},
        {"moe_router_topk_scaling_factor": 2.5},  # without experts nothing reads it
        {**EXPERTS, "moe_layer_freq": [1, 1]},
        {**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rope_parameters": None},
        {"hidden_dropout": 0.1, "fp8": "hybrid", "tensor_model_parallel_size": 8},
        {"something_of_tomorrow": None},
    ],
)
def test_what_changes_nothing_is_not_refused(given):
    assert check_representable(FAMILY | given) == []


def test_a_field_that_a_later_host_adds_is_refused_unless_it_is_at_its_default(monkeypatch):
    defaults = {**compat.argument_defaults(), "attention_twist": 0}
    monkeypatch.setattr(compat, "argument_defaults", lambda: defaults)
    assert check_representable({**FAMILY, "attention_twist": 0}) == []
    with pytest.raises(UserError, match=r"attention_twist 3 \(.* default: 0\)"):
        check_representable({**FAMILY, "attention_twist": 3})
    with pytest.raises(UserError, match=r"of_a_fork 3 \(.* not an argument of this"):
        check_representable({**FAMILY, "of_a_fork": 3})


def test_an_argument_is_ignored_by_name_only_where_it_is_a_problem():
    given = {**FAMILY, "of_a_fork": 3, "window_size": (7, 0)}
    [first, second] = check_representable(given, ignored=["of_a_fork", "window_size"])
    assert "of_a_fork 3" in first
    assert "window_size (7, 0)" in second
    with pytest.raises(UserError, match=r"--ignore-arguments of_a_fork$"):
        check_representable(given, ignored=["window_size"])
    with pytest.raises(UserError, match="--ignore-arguments lr: the export depends on no"):
        check_representable(given, ignored=["of_a_fork", "window_size", "lr"])


def test_every_harmless_name_has_a_reason():
    assert len(HARMLESS) > 700
    assert all(HARMLESS.values())
    assert not set(HARMLESS) & (CARRIED | set(REQUIRED))
    assert argument_check.HARMLESS["lr"] == "the optimizer's steps and number formats"
