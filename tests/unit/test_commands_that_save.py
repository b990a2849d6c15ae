"""Every command that we print, document or run, and that saves, can be resumed at any layout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_anchor.planner.launch import launch_command
from megatron_anchor.planner.layout import Layout
from tests.documentation import PAGES, commands, page_id, shell_commands
from tests.unit.test_planner_launch import question, words_of
from tests.unit.test_recipes import RECIPES, training

ROOT = Path(__file__).parents[2]
FLAG = "--dist-ckpt-optim-fully-reshardable"
"""Without it the distributed optimizer's states fit the layout that saved them only."""


def saves(words):
    return any("pretrain_gpt" in word for word in words) and "--save" in words


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_the_docs(page):
    for words in shell_commands(page):
        assert not saves(words) or FLAG in words, " ".join(words)


def test_commands_of_help_texts():
    found = 0
    for path in (ROOT / "megatron_anchor").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
        for text in texts:
            if isinstance(text, str) and "pretrain_gpt" in text and "--save " in text:
                for words in commands(text):
                    if saves(words):
                        assert FLAG in words, f"{path.name}: {' '.join(words)}"
                        found += 1
    assert found >= 1


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes(name, tmp_path):
    words = training(name, tmp_path)[1]
    assert "--save" in words
    assert FLAG in words


def test_the_demo():
    text = (ROOT / "examples/cpu_demo/train.sh").read_text()
    assert FLAG in text, "run.py adds --save to it"


def test_the_planner():
    words = words_of(launch_command(question(), Layout(tp=2, cp=4)))[1]
    assert "--save" in words
    assert FLAG in words


def test_the_check_sees_a_command_without_it():
    text = "torchrun -m megatron_anchor.pretrain_gpt --load x \\\n  --save y\n"
    assert [saves(words) for words in commands(text)] == [True]
    assert not saves(["python", "pretrain_gpt.py", "--save-last", "3"])
