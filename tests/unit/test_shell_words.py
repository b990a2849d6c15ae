"""Hostile text in configs, names and files stays one word, whatever the shell does with it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_anchor.checkpoint.megatron_args import argument_values, flag_lines
from megatron_anchor.errors import UserError
from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.launch import launch_command
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import Lengths
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import Question
from megatron_anchor.shell_words import is_value, passes_unquoted, path_word, quoted

HOSTILE = (
    "a b",
    "it's",
    '"quoted"',
    "$(touch hit)",
    "`touch hit`",
    "x; touch hit",
    "x' ; touch hit ; '",
    "a\ntouch hit",
    "--lr 1 --wd 2",
    "--lr",
    "*",
    "[a-z]*",
    "@(a|b)",
    "~",
    "\\",
    "\x1b[2J",
    "\x7f",
    "a b",
    "\udcff",
    "$'x'",
    "!x",
    "é",
    "",
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
few = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def with_hostile(test):
    for text in HOSTILE:
        test = example(text)(test)
    return test


def bash_words(script: str, folder: Path) -> list[str]:
    """The words that a script passes to `words`, run by bash in an empty folder."""
    show = 'words() { printf "%s\\0" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", show + script], cwd=folder, capture_output=True, check=True, timeout=20
    )
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@few
@with_hostile
@given(texts)
def test_a_quoted_word_is_that_word_in_bash(tmp_path, text):
    assert bash_words(f"words {quoted(text)} end", tmp_path) == [text, "end"]
    assert quoted(text).isprintable(), "it is shown on a terminal"
    assert not list(tmp_path.iterdir())


@few
@with_hostile
@given(texts)
def test_a_path_is_never_a_flag(tmp_path, text):
    [path] = bash_words(f"words {path_word(text)}", tmp_path)
    assert path in (text, f"./{text}")
    assert not path.startswith("-")


@few
@with_hostile
@given(texts)
def test_what_passes_unquoted_is_one_word_even_beside_files_of_any_name(tmp_path, text):
    if not passes_unquoted(text):
        return
    (tmp_path / "args").write_text(text)
    for name in ("a", "b", "x", "bb"):
        (tmp_path / name).touch()
    assert bash_words("words $(cat args)", tmp_path) == [text]


def model(**changes):
    return dataclasses.replace(known_shape("llama-2-7b").model, **changes)


def shape(**changes):
    return dataclasses.replace(known_shape("llama-2-7b"), model=model(**changes))


@few
@with_hostile
@given(texts)
def test_a_models_rope_keys_reach_the_command_line_as_one_word(tmp_path, text):
    """Keys and texts of config.json's rope_scaling are a stranger's."""
    scaling = {"rope_type": "linear", "factor": 2.0, text: 1.0, "why": text}
    values = argument_values(
        model(scaling=scaling), dtype=torch.bfloat16, tokenizer=None, anchor=None
    )
    lines = flag_lines(values)
    assert all(line.isprintable() for line in lines)
    (tmp_path / "args").write_text("\n".join(lines))
    words = bash_words("words $(cat args)", tmp_path)
    assert json.loads(words[words.index("--rope-parameters") + 1]) == scaling
    assert len(words) == sum(1 + (" " in line) for line in lines)
    assert {p.name for p in tmp_path.iterdir()} == {"args"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, text) for name in ("num_layers", "layernorm_epsilon") for text in HOSTILE[:11]],
        ("tokenizer_model", "my models/llama"),
        ("tokenizer_model", "models/*"),
        ("tokenizer_model", "--lr"),
        ("tokenizer_model", "a\n--lr 1"),
        ("tokenizer_model", ""),
        ("anchor_token", "1 --lr 2"),
        ("rope_parameters", '{"long_factor":[1.0,2.0]}'),
    ],
)
def test_a_value_that_would_be_two_is_refused(name, value):
    values = argument_values(model(), dtype=torch.bfloat16, tokenizer=None, anchor=None)
    with pytest.raises(ValueError, match="would read more than one value from it"):
        flag_lines(values | {name: value})


@few
@with_hostile
@given(texts)
def test_a_plans_command_holds_a_strangers_text_as_one_word(tmp_path, text):
    folder = tmp_path / "models"
    prefix = f"corpus/{text}"
    asked = Question(
        str(tmp_path),
        shape(scaling={"rope_type": "linear", "factor": 2.0, text: text}),
        Lengths("mine", np.array([500]), prefix=prefix),
        find_gpu("A100-80GB"),
        8,
        65536,
        8,
    )
    command = launch_command(asked, Layout(tp=2, cp=4))
    words = bash_words(command.replace("torchrun", "words"), tmp_path)
    assert words[words.index("--data-path") + 1] == prefix
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path)
    scaling = json.loads(words[words.index("--rope-parameters") + 1])
    assert scaling[text] == text
    assert words[words.index("--save") + 1] == "run"
    assert not folder.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["layers", "hidden", "epsilon", "rotary_base", "vocabulary"])
@pytest.mark.parametrize("value", ["4; touch hit", math.inf, math.nan, True, None])
def test_only_numbers_stand_where_a_plan_writes_numbers(field, value):
    asked = Question(
        "x",
        shape(**{field: value}),
        Lengths("mine", np.array([500])),
        find_gpu("A100-80GB"),
        8,
        4096,
        8,
    )
    with pytest.raises(UserError, match="where a number is expected"):
        launch_command(asked, Layout(cp=8))


def test_negative_numbers_are_values_and_flags_are_not():
    for value in ("-1", "-0.5", "-1e-05", "x", "a-b"):
        assert is_value(value)
    for flag in ("--lr", "-x", "-", "-1x"):
        assert not is_value(flag)
