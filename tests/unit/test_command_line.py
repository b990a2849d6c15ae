"""Every command ends in one way: a line and exit code 2 for a mistake, no traceback for Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from megatron_anchor import console
from megatron_anchor.command_line import make_parser, run
from megatron_anchor.errors import UserError


def ending_with(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("--flag 3: expected 4"), 2, "error: --flag 3: expected 4\n"),
        (
            FileNotFoundError(2, "No such file", "a\nb"),
            2,
            "error: [Errno 2] No such file: 'a\\nb'\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_expected_end_is_one_line_and_its_code(error, code, said, capsys):
    assert run(ending_with(error), []) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("bug", [ValueError("x"), KeyError("x"), AssertionError("x")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)):
        run(ending_with(bug), [])


def test_sigterm_ends_a_command_like_ctrl_c_and_is_left_as_it_was(capsys):
    before = signal.getsignal(signal.SIGTERM)

    def main(argv):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        raise AssertionError("not reached")

    assert run(main, []) == 143
    assert capsys.readouterr().err == "ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_can_run_a_command():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(lambda argv: 7, [])))
    thread.start()
    thread.join()
    assert codes == [7]


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path):
    code = (
        "import sys\n"
        "from megatron_anchor.command_line import run\n"
        "from megatron_anchor.terminal import say\n"
        "def main(argv):\n"
        "    for number in range(100_000): say(number)\n"
        "    return 0\n"
        "sys.exit(run(main))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_wrong_argument_is_one_line_and_not_a_list_of_all_flags(name, capsys):
    with pytest.raises(SystemExit) as ended:
        console.main([*name.split(), "--no-such-flag"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert said.endswith(f"; `megatron-anchor {name} --help` lists all flags\n")
    assert said.count("\n") == 1


MISTAKES = {
    "preprocess": "--input none.jsonl --output-prefix out --tokenizer-type ByteLevelTokenizer",
    "merge": "--input none --output-prefix out",
    "inspect-corpus": "none",
    "upsample": "none --output list.npy",
    "inspect-packing": "none --seq-length 64 --anchor-token 1",
    "plan": "--model none --seq-length 64",
    "convert to-megatron": "--hf none --out out",
    "convert to-hf": "--megatron none --out out",
    "convert verify": "--megatron none --hf none --no-logits",
    "measure-drift": "--hf none",
    "evaluate": "--checkpoints none --output-dir out",
}
"""Command to arguments that name something that is not there."""


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_mistake_is_one_line_with_exit_code_two(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert console.main([*name.split(), *MISTAKES[name].split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "none" in said.err
    assert said.err.count("\n") == 1


def test_help_is_whole(capsys):
    with pytest.raises(SystemExit):
        make_parser("What it is.", "  do it").parse_args(["--help"])
    assert capsys.readouterr().out.endswith("example:\n  do it\n")
