"""Megatron's own argument sets, where a checkout of Megatron-LM is at hand (MEGATRON_CHECKOUT)."""

from __future__ import annotations

import re

import pytest

from tests.host_argument_sets import (
    ArgumentSet,
    Tally,
    checkout,
    functional_tests,
    kind_of,
    launch_lines,
    launch_scripts,
    reasons,
)

GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 4 --lr 1e-3 "
    "--eval-interval 10 --data-path ${DATA} --position-embedding-type rope --bf16"
)
MISSING = pytest.mark.skipif(checkout() is None, reason="MEGATRON_CHECKOUT names no checkout")


@MISSING
@pytest.mark.parametrize("source", [functional_tests, launch_scripts, launch_lines])
def test_every_set_is_accepted_or_refused_by_a_flag(source):
    tally = Tally()
    for one in source(checkout()):
        tally.add(one)
    assert tally.accepted or tally.refused
    for name, found in tally.refused.items():
        for reason in found:
            assert re.match("--|not parsed: ", reason), (name, reason)
            assert "knows nothing of this argument" not in reason, name


@MISSING
def test_sets_with_rotary_positions_are_refused_for_what_is_not_there_only():
    """Of GPT and Mixtral with nothing but plain attention, all start."""
    tally = Tally()
    for one in functional_tests(checkout()):
        rope = ["--position-embedding-type", "rope"]
        tally.add(one._replace(words=[*one.words, *rope]))
    assert len(tally.accepted) > 0.8 * (len(tally.accepted) + len(tally.refused)), tally.counts()


def test_a_set_is_judged_by_its_arguments_alone():
    words = GOOD.split()
    assert reasons(words) == [], "files are not looked at, and Transformer Engine is there"
    [reason] = reasons([*words, "--heterogeneous-layers-config-path", "x"])
    assert kind_of(reason).startswith("--heterogeneous-layers-config-path")
    assert reasons(["--packign"]) == ["not parsed: unrecognized arguments: --packign"]


def test_counts_tell_which_reason_stands_alone():
    tally = Tally()
    tally.refused = {
        "a": ["--seq-length 63 is not a multiple of 4"],
        "b": ["--seq-length 65 is not a multiple of 4", "--lr is missing"],
    }
    assert tally.counts() == [
        ("--seq-length N is not a multiple of N", 2, 1),
        ("--lr is missing", 1, 0),
    ]
    assert ArgumentSet("x", []).words == []
