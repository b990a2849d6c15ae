"""README and docs name only files, modules and flags that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUR_FOLDERS = ("megatron_anchor/", "tools/", "tests/", "examples/", "benchmarks/", "docs/")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_path_of_ours_exists(page):
    words = re.findall(r"[\w./-]+", page.read_text(encoding="utf-8"))
    for word in words:
        path = word.rstrip(".")
        if path.startswith(OUR_FOLDERS) and "..." not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_module_that_is_run_exists(page):
    for module in re.findall(r"-m (megatron_anchor[\w.]*)", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), f"{page.name} runs {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_make_target_exists(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", page.read_text(), re.MULTILINE):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name} names make {name}"


def test_the_pages_were_found():
    assert len(PAGES) > 3
