"""The blocks of README and docs that are marked as runnable do run, in an empty folder."""

import os
import subprocess
import sys

import pytest

from tests.documentation import PAGES, ROOT, fences, page_id

BLOCKS = [
    pytest.param(fence, id=f"{page_id(page)}-{number}")
    for page in PAGES
    for number, fence in enumerate(fences(page))
    if fence.runnable
]
SEEN_FROM_THE_ROOT = ("tools", "docs", "examples", "benchmarks", "megatron_anchor")


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a clone with its environment activated."""
    for name in SEEN_FROM_THE_ROOT:
        (tmp_path / name).symlink_to(ROOT / name)
    bin_folder = tmp_path / ".bin"
    bin_folder.mkdir()
    for name, words in (("python", '"$@"'), ("megatron-anchor", '-m megatron_anchor "$@"')):
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("fence", BLOCKS)
def test_a_runnable_block_runs(fence, folder):
    if fence.language == "python":
        command = [sys.executable, "-c", fence.text]
    else:
        assert fence.language == "bash"
        command = ["bash", "-euo", "pipefail", "-c", fence.text]
    path = f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_blocks_were_found():
    assert len(BLOCKS) >= 3
