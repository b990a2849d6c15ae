"""Nothing that others wrote reaches a terminal with its control characters."""

from __future__ import annotations

import ast
import json
import logging
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron_anchor
from megatron_anchor.command_line import make_parser
from megatron_anchor.terminal import escaped, logger_of, say, say_block, say_json

PACKAGE = Path(megatron_anchor.__file__).parent
HOSTILE = (
    "\x1b]0;title\x07\x1b[2J\x1b[31mred\nerror: FORGED\r"
    "\u202e\u2066\u061c\x9b1m\x7f\u2028\x85\udc80"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 你好 😀 עברית", "plain äöü 你好 😀 עברית"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("\u202eabc\u202c\u2066\u200f\u061c", r"\u202eabc\u202c\u2066\u200f\u061c"),
        ("\u2028\u2029\u200b\ufeff", r"\u2028\u2029\u200b\ufeff"),
        ("\U000e0041\udcff", r"\U000e0041\udcff"),
        (Path("a\nb"), r"a\nb"),
        (ValueError("a\x00"), r"a\x00"),
    ],
)
def test_controls_are_spelled_and_letters_are_not(text, shown):
    assert escaped(text) == shown


@given(st.text())
def test_what_is_shown_has_no_control_of_any_kind(text):
    shown = escaped(text)
    assert shown.isprintable()
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.encode("utf-8").decode("unicode_escape") is not None
    kept = escaped(text, keep="\n\t")
    assert kept.replace("\n", "").replace("\t", "").isprintable()
    assert kept.count("\n") == text.count("\n")


def test_every_way_to_print_escapes(capsys, caplog):
    say("a" + HOSTILE, HOSTILE)
    say_block(f"one\n\ttwo{HOSTILE.replace(chr(10), '')}")
    say_json({HOSTILE: HOSTILE})
    logger = logger_of("megatron_anchor.a_test")
    assert logger_of("megatron_anchor.a_test").filters == logger.filters
    with caplog.at_level(logging.INFO):
        logger.info("of %s and %d", HOSTILE, 7)
    with pytest.raises(SystemExit):
        make_parser("d", "e").parse_args([HOSTILE])
    captured = capsys.readouterr()
    lines = captured.out.split("\n")
    assert len(lines) == 6
    assert "\ttwo" in lines[3]
    assert [line for line in lines if not line.replace("\t", "").isprintable()] == []
    assert json.loads(lines[4]) == {HOSTILE: HOSTILE}
    assert caplog.records[-1].getMessage() == f"of {escaped(HOSTILE)} and 7"
    assert "FORGED" in captured.err
    assert not any(line.startswith("error: FORGED") for line in captured.err.splitlines())
    assert captured.err.replace("\n", "").isprintable()


def _calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


_PRINTS = ("print", "sys.stdout.write", "sys.stderr.write", "warnings.warn")


def _shown(node: ast.Call, name: str) -> list[ast.expr]:
    """What a progress bar shows beside its numbers."""
    if name.endswith((".set_description", ".set_postfix")):
        return node.args
    if name == "tqdm":
        return [*node.args[1:], *(k.value for k in node.keywords if k.arg == "desc")]
    return []


def _is_safe(shown: ast.expr) -> bool:
    return isinstance(shown, ast.Constant) or ast.unparse(shown).startswith("escaped(")


def test_the_package_prints_and_logs_from_one_place_only():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node, name in _calls(path):
            own_logger = name == "logging.getLogger" and ast.unparse(node.args[0]) == "__name__"
            own_parser = name == "argparse.ArgumentParser" and path.parent.name != "on_cpu"
            safe = all(map(_is_safe, _shown(node, name)))
            if name in _PRINTS or own_logger or own_parser or not safe:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                found.append(f"{place}: {ast.unparse(node)[:80]}")
    assert found == []
