"""Help and mistakes are the same in every command: all of them are walked through here."""

import argparse
import importlib
import re
import subprocess
import sys
from argparse import SUPPRESS

import pytest

from megatron_anchor import console
from megatron_anchor.evaluation.tasks import TASKS
from megatron_anchor.on_cpu.__main__ import _parser as on_cpu_parser

every_command = pytest.mark.parametrize("name", console.COMMANDS)


def parser_of(name):
    return importlib.import_module(console.COMMANDS[name].main.split(":")[0]).parser()


def shown_default(action):
    """What help has to say of a flag, None where there is nothing to say."""
    default = action.default
    if not action.option_strings or default in (None, SUPPRESS, (), "") or default == []:
        return None
    if isinstance(default, bool) and not isinstance(action, argparse.BooleanOptionalAction):
        return None
    return "default"


def help_of_flags(parser):
    """Each action with its part of the formatted help."""
    parser.format_help()  # tells the defaults
    return [(action, action.help or "") for action in parser._actions]


@every_command
def test_every_flag_with_a_default_tells_it(name):
    parser = parser_of(name)
    text = parser.format_help()
    for action, told in help_of_flags(parser):
        if shown_default(action):
            assert "default" in told, f"{name} {action.option_strings[0]}: {told!r}"
            assert action.option_strings[0] in text


@every_command
def test_a_default_that_is_told_is_the_one_that_counts(name):
    """Numbers and words in `(default ...)` or `(default: ...)` are the parser's own."""
    for action, told in help_of_flags(parser_of(name)):
        if shown_default(action) and (found := re.search(r"\(default:? ([\w.+-]+)\)$", told)):
            value = action.default
            if isinstance(value, bool):
                assert found[1] == action.option_strings[0 if value else 1]
            elif isinstance(value, int | float) and found[1] not in ("all",):
                assert float(found[1]) == value, (name, action.option_strings)
            elif isinstance(value, str):
                assert found[1] == value, (name, action.option_strings)


def test_the_flags_of_training_tell_their_defaults():
    from megatron.training.arguments import add_megatron_arguments

    from megatron_anchor.training.arguments import add_anchor_arguments

    parser = add_anchor_arguments(
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    )
    [group] = [g for g in parser._action_groups if g.title == "megatron_anchor"]
    assert len(group._group_actions) > 15
    for action in group._group_actions:
        if shown_default(action):
            assert "default" in action.help, action.option_strings


def test_evaluate_names_its_tasks_in_its_help(capsys):
    with pytest.raises(SystemExit):
        console.main(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in TASKS)


@every_command
def test_usage_names_what_must_be_given_and_no_more(name):
    parser = parser_of(name)
    usage, _, _ = parser.format_help().partition("\n\n")
    needed = {a.option_strings[-1] for a in parser._actions if a.required and a.option_strings}
    assert set(re.findall(r"--[\w-]+", usage)) == needed
    assert usage.endswith("[flags]")


MISTAKES = {
    "an unknown flag": ["--no-such-flag"],
    "nothing at all": [],
}


@every_command
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name, mistake, capsys):
    if mistake == "nothing at all" and not any(a.required for a in parser_of(name)._actions):
        pytest.skip("it runs without arguments")
    try:
        code = console.main([*name.split(), *MISTAKES[mistake]])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert "usage:" not in said.err


def test_on_cpu_answers_a_mistake_like_every_command():
    command = [sys.executable, "-m", "megatron_anchor.on_cpu"]
    for words in ([], ["no_such_script.py"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "usage:" not in done.stderr
    assert on_cpu_parser().format_usage().startswith("usage: python -m megatron_anchor.on_cpu")


def test_help_that_is_cut_off_by_its_reader_leaves_no_traceback():
    code = "from megatron_anchor.console import main; import sys; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "preprocess", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said
    assert process.returncode == 141
