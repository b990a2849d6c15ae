"""`megatron-anchor` runs the code of `tools/`, names what is near, and imports nothing early."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor import console
from megatron_anchor.corpus import IndexedCorpus
from tests.corpus_fixtures import write_jsonl

TOOLS = Path(__file__).parents[2] / "tools"


def test_every_tool_is_a_command_and_every_command_a_tool():
    assert sorted(row.tool for row in console.COMMANDS.values()) == sorted(
        path.name for path in TOOLS.glob("*.py")
    )


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_command_calls_what_its_tool_calls(name):
    row = console.COMMANDS[name]
    text = (TOOLS / row.tool).read_text()
    module, function = row.main.split(":")
    assert f"from {module} import {function}" in text
    assert "sys.exit(run(main))" in text
    assert "from megatron_anchor.command_line import run" in text


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_of_a_command_shows_an_example_of_this_command(name, capsys):
    with pytest.raises(SystemExit) as ended:
        console.main([*name.split(), "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert text.startswith(f"usage: megatron-anchor {name}")
    assert re.search(rf"example.*megatron-anchor {name} \S", text, re.DOTALL)
    assert "tools/" not in text


def test_help_lists_every_command_with_a_worked_example(capsys):
    assert console.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, row in console.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(row.summary)}$", text, re.MULTILINE)
    assert "example" in text
    shown = re.findall(r"megatron-anchor (convert [a-z-]+|[a-z-]+) --", text)
    assert shown
    assert set(shown) <= set(console.COMMANDS)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["preproces"], "preprocess"),
        (["inspect_packing"], "inspect-packing"),
        (["convrt"], "convert"),
        (["convert", "to_hf"], "convert to-hf"),
        (["convert", "verfy", "--hf", "x"], "convert verify"),
    ],
)
def test_an_unknown_command_is_answered_with_a_near_one(words, near, capsys):
    assert console.main(words) == 2
    assert f"did you mean {near!r}?" in capsys.readouterr().err


def test_a_command_without_a_near_one_is_answered_with_all(capsys):
    assert console.main(["zzz"]) == 2
    answer = capsys.readouterr().err
    assert all(name in answer for name in console.COMMANDS)


def test_who_looks_for_training_among_the_commands_is_told_where_it_is(capsys):
    for word in ("train", "pretrain", "pretrain_gpt"):
        assert console.main([word]) == 2
        assert "torchrun -m megatron_anchor.pretrain_gpt" in capsys.readouterr().err


def test_a_group_alone_lists_its_commands(capsys):
    assert console.main(["convert"]) == 2
    assert console.main(["convert", "--help"]) == 0
    assert "megatron-anchor convert to-hf --help" in capsys.readouterr().out


def test_a_corpus_is_made_in_worker_processes_too(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["a b", "c"])
    command = [sys.executable, "-m", "megatron_anchor", "preprocess", "--input"]
    command += [str(tmp_path / "in.jsonl"), "--tokenizer-type", "ByteLevelTokenizer"]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "2", "--no-progress"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    np.testing.assert_array_equal(corpus.tokens, np.frombuffer(b"a bc", dtype=np.uint8))


def test_the_table_is_shown_without_importing_numpy_or_torch():
    code = (
        "import sys; from megatron_anchor.console import main; main(['--help']); "
        "assert not {'numpy', 'torch', 'megatron.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
