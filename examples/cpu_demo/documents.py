"""Real documents that every machine with Python and this package has, as JSON lines by domain.

Three domains with natural document boundaries and a heavy tail of lengths: the sources of Python's
library, Python's language reference, and the docstrings of installed packages.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import pydoc_data.topics
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_anchor.whole_files import atomic_write_text

PACKAGES = ("torch", "transformers", "numpy")
LARGEST_FILE, SHORTEST_DOCSTRING = 500_000, 200
"""Bytes, characters: a few generated files are larger; shorter docstrings are labels."""

Document = tuple[str, str]
"""Name and text."""


def python_files(folder: Path) -> Iterator[Document]:
    """Yield every Python source below a folder, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if "site-packages" in relative.parts or path.stat().st_size > LARGEST_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the standard library's tests hold broken encodings on purpose
        if text.strip():
            yield str(relative), text


def library_files() -> Iterator[Document]:
    """Yield the standard library's sources, its tests left out."""
    for name, text in python_files(Path(sysconfig.get_path("stdlib"))):
        if not {"test", "tests", "idlelib"} & set(Path(name).parts):
            yield name, text


def package_files(most_each: int) -> Iterator[Document]:
    """Yield sources of installed packages, up to ``most_each`` of one package."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for name, text in islice(python_files(Path(spec.submodule_search_locations[0])), most_each):
            yield f"{package}/{name}", text


def docstrings(files: Iterator[Document]) -> Iterator[Document]:
    """Yield the docstrings of classes and functions, one document each."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, text in files:
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text)
        except SyntaxError:
            continue  # templates and sources for other versions of Python
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, kinds) else None
            if docstring and len(docstring) >= SHORTEST_DOCSTRING:
                yield f"{name}:{node.name}", f"{node.name}\n\n{docstring}\n"


def domains(most_each: int) -> dict[str, Iterator[Document]]:
    """Give the documents of each domain."""
    return {
        "sources": library_files(),
        "python-reference": iter(sorted(pydoc_data.topics.topics.items())),
        "docstrings": docstrings(package_files(most_each)),
    }


def write_documents(folder: Path, most_each: int = 200) -> dict[str, tuple[Path, int]]:
    """Write one JSON-lines file a domain.

    Args:
        folder: where to write.
        most_each: files taken from each installed package.

    Returns:
        Domain to (path, number of documents).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for domain, documents in domains(most_each).items():
        path, count = folder / f"{domain}.jsonl", 0
        with atomic_write_text(path) as out:
            for name, text in documents:
                row = {"text": text, "meta": {"domain": domain, "name": name}}
                out.write(json.dumps(row) + "\n")
                count += 1
        written[domain] = (path, count)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for domain, (path, count) in write_documents(parser.parse_args().folder).items():
        print(f"{domain}: {count} documents in {path}")
