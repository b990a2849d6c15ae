"""Real documents that every machine with Python and this package has, as JSON lines by domain.

Three domains with natural document boundaries and a heavy tail of lengths: Python's own sources,
Python's language reference, and the sources of installed packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy")
LARGEST_FILE = 2_000_000
"""Bytes; a few generated files are larger and say little."""


def python_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every Python source below a folder, in a fixed order."""
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


def domains(most_per_package: int) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    """Yield (domain, documents)."""
    yield "python-library", python_files(Path(sysconfig.get_path("stdlib")))
    yield "python-reference", iter(sorted(pydoc_data.topics.topics.items()))
    yield "packages", _package_files(most_per_package)


def _package_files(most: int) -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        files = python_files(Path(spec.submodule_search_locations[0]))
        for _, (name, text) in zip(range(most), files, strict=False):
            yield f"{package}/{name}", text


def write_documents(folder: Path, most_per_package: int = 1000) -> dict[str, tuple[Path, int]]:
    """Write one JSON-lines file a domain.

    Args:
        folder: where to write.
        most_per_package: files taken from each installed package.

    Returns:
        Domain to (path, number of documents).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for domain, documents in domains(most_per_package):
        path, count = folder / f"{domain}.jsonl", 0
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("w", encoding="utf-8") as out:
            for name, text in documents:
                row = {"text": text, "meta": {"domain": domain, "name": name}}
                out.write(json.dumps(row) + "\n")
                count += 1
        os.replace(unfinished, path)
        written[domain] = (path, count)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for domain, (path, count) in write_documents(parser.parse_args().folder).items():
        print(f"{domain}: {count} documents in {path}")
