"""README and docs name only files, modules, make targets, sections and pages that exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_anchor.attention.backends import BACKENDS, facts
from megatron_anchor.console import COMMANDS
from megatron_anchor.training import host_patches
from tests.documentation import PAGES, ROOT, page_id

OUR_FOLDERS = (
    *("megatron_anchor/", "tools/", "tests/", "examples/", "benchmarks/", "docs/"),
    "requirements/",
)
every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def anchors(page):
    """The section names of a page, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


@every_page
def test_every_link_leads_somewhere(page):
    for target, section in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if section:
            assert section in set(anchors(linked)), f"{page.name} links to {target}#{section}"


def test_quoted_measurements_have_the_figures_of_their_page():
    """A block quote that links to a page of measurements says nothing that is not there."""
    quotes = 0
    for page in PAGES:
        for quote in re.findall(r"(?:^>.*\n)+", page.read_text(), re.MULTILINE):
            for target in re.findall(r"\(([\w./-]*measurements/[\w./-]+\.md)\)", quote):
                said = set(re.findall(r"\d[\d.]*\d|\d", quote.replace(target, "")))
                there = set(re.findall(r"\d[\d.]*\d|\d", (page.parent / target).read_text()))
                assert said <= there, f"{page.name} quotes {said - there}, not in {target}"
                quotes += 1
    assert quotes >= 3


@every_page
def test_every_path_of_ours_exists(page):
    words = re.findall(r"[\w./-]+", page.read_text(encoding="utf-8"))
    for word in words:
        path = word.rstrip(".")
        if path.startswith(OUR_FOLDERS) and "..." not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"


@every_page
def test_every_module_that_is_run_exists(page):
    for module in re.findall(r"-m (megatron_anchor[\w.]*)", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), f"{page.name} runs {module}"


@every_page
def test_every_module_that_is_imported_exists_and_has_what_is_taken_from_it(page):
    pattern = r"^from (megatron_anchor[\w.]*) import ([\w, ]+)"
    for module, names in re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE):
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{page.name} imports {module}"
        source = Path(spec.origin).read_text(encoding="utf-8")
        for name in names.split(","):
            known = re.search(rf"\b{name.strip()}\b", source)
            known = known or importlib.util.find_spec(f"{module}.{name.strip()}")
            assert known, f"{page.name} imports {name} from {module}"


@every_page
def test_every_command_of_ours_exists(page):
    pattern = r"\bmegatron-anchor (convert [a-z][\w-]*|[a-z][\w-]*)"
    for name in re.findall(pattern, page.read_text(encoding="utf-8")):
        assert name in COMMANDS, f"{page.name} names megatron-anchor {name}"


@every_page
def test_every_make_target_exists(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", page.read_text(), re.MULTILINE):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"{page.name} names make {name}"


def test_the_pages_were_found():
    assert len(PAGES) > 15


def nav_pages(entries):
    for entry in entries:
        (value,) = entry.values()
        yield from nav_pages(value) if isinstance(value, list) else [value]


def test_the_navigation_names_every_page_once():
    nav = list(nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(nav) == len(set(nav))
    missing = [page for page in nav if not (ROOT / "docs" / page).exists()]
    assert missing == []
    top = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert top - set(nav) == set(), "add a line to the nav of mkdocs.yml"


def test_the_site_builds_without_a_broken_link(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed; `make docs` has an environment for it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    assert (tmp_path / "quickstart" / "index.html").exists()


def test_the_docs_environment_is_the_extra():
    needed = (ROOT / "requirements" / "docs.txt").read_text().splitlines()
    (needed,) = (line for line in needed if not line.startswith("#"))
    assert f'"docs": ["{needed}"]' in (ROOT / "setup.py").read_text()


def test_the_pictures_of_the_pages_are_what_their_scripts_draw(tmp_path):
    for script in (ROOT / "docs").glob("draw_*.py"):
        drawn = [sys.executable, str(script), str(tmp_path)]
        subprocess.run(drawn, cwd=ROOT, check=True, timeout=600)
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == sorted(path.name for path in (ROOT / "docs" / "images").glob("*.png"))
    from matplotlib.image import imread

    for name in names:
        ours, stored = imread(tmp_path / name), imread(ROOT / "docs" / "images" / name)
        assert ours.shape == stored.shape
        changed = abs(ours[..., :3] - stored[..., :3]).max(axis=-1) > 0.2
        assert changed.mean() < 0.02, f"draw docs/images/{name} again"  # fonts may differ a little


@pytest.mark.parametrize(
    ("page", "table"),
    [("design.md", host_patches.as_markdown), ("attention-backends.md", facts.as_markdown)],
)
def test_a_page_holds_the_table_that_the_code_prints(page, table):
    text = (ROOT / "docs" / page).read_text()
    shown = re.search(r"<!-- table: .*? -->\n(.*?)\n<!-- end of table -->", text, re.DOTALL)
    assert shown[1] == table(), "paste what the comment's command prints"


def test_the_table_of_kernels_has_every_backend():
    names = {row.kernel.split("`")[1] for row in facts.rows()}
    assert names == set(BACKENDS)


def test_names_of_the_host_are_replaced_through_the_tables_alone():
    """No other module assigns to an attribute of a module or class of the host."""
    for path in (ROOT / "megatron_anchor").rglob("*.py"):
        found = re.findall(
            r"^ +(?:host\w*|[A-Z]\w+)\.\w+(?:, host\.\w+)? = ", path.read_text(), re.M
        )
        assert not found, f"{path}: {found}"
