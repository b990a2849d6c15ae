"""Versions that are written in more than one place agree."""

import re

import yaml

from tests.documentation import ROOT


def pins():
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_pins_are_sorted_and_unique():
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()[1:]
    names = [line.split("==")[0] for line in lines]
    assert len(names) == len(set(names))
    assert lines == sorted(lines)


def test_pre_commit_uses_the_pinned_versions():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    given = {text for hook in repo["hooks"] for text in hook.get("additional_dependencies", ())}
    assert {name.split("==")[0] for name in given} == {"ruff", "pre-commit-hooks"}
    for text in given:
        name, version = text.split("==")
        if name in pins():
            assert version == pins()[name], text


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", v) for v in versions[1:])
