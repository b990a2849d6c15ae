"""tools/install_in_container.sh keeps what a container has, or says that pip did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH, ENGINE = "torch==2.13.0a0+9186a08b2c.nv26.7", "transformer_engine==2.17.0+2e559f06"

PYTHON = """\
#!{python}
# Stands for the container's python and pip: lists packages, and installs as it is told.
import os, pathlib, sys

packages, words = pathlib.Path("packages"), sys.argv[1:]
if words == ["-"]:
    code = sys.stdin.read().replace('version("torch")', 'version(os.environ["HAS"])')
    exec("import os\\n" + code)
elif words[:3] == ["-m", "pip", "list"]:
    print(packages.read_text(), end="")
else:
    assert words[:3] == ["-m", "pip", "install"], words
    files = [words[i + 1] for i, word in enumerate(words) if word == "-c"]
    held = "".join(pathlib.Path(name).read_text() for name in files)
    pathlib.Path("held").write_text(held)
    told = [*words, os.environ.get("PIP_CONSTRAINT", "unset")]
    pathlib.Path("call").write_text(" ".join(told))
    if os.environ.get("REPLACES"):
        before, after = os.environ["REPLACES"].split(" by ")
        packages.write_text(packages.read_text().replace(before, after))
"""


@pytest.fixture
def container(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tools / "install_in_container.sh"
    script.write_bytes((ROOT / "tools/install_in_container.sh").read_bytes())
    script.chmod(0o755)
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    lines = [TORCH, ENGINE, "numpy==2.3.5", "setuptools==70.3.0", "pip==25.0"]
    (tmp_path / "packages").write_text("".join(f"{line}\n" for line in lines))

    def run(*arguments, **environment):
        settings = {"PYTHON": str(tmp_path / "python"), "HAS": "numpy", **environment}
        return subprocess.run(
            [script, *arguments], env=os.environ | settings, capture_output=True, text=True
        )

    return run


def test_everything_installed_is_a_constraint_but_what_builds_our_wheel(container, tmp_path):
    done = container("plot", "zstd")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "held").read_text().splitlines() == [TORCH, ENGINE, "numpy==2.3.5"]
    call = (tmp_path / "call").read_text()
    assert call.endswith(" .[plot,zstd] unset")
    assert "nothing that was installed was replaced (3 packages)" in done.stdout


def test_the_constraints_that_the_container_sets_are_kept(container, tmp_path):
    given = tmp_path / "given.txt"
    given.write_text("scipy==1.16.3\nsetuptools==70.3.0\n")
    done = container("--dry-run", PIP_CONSTRAINT=str(given))
    assert done.returncode == 0, done.stderr
    held = (tmp_path / "held").read_text()
    assert "scipy==1.16.3\n" in held
    assert "setuptools" not in held
    call = (tmp_path / "call").read_text()
    assert " --dry-run " in call
    assert call.endswith(" . unset")


@pytest.mark.parametrize("package", [TORCH, ENGINE])
def test_a_package_that_was_replaced_fails_the_build_by_name(container, package):
    name = package.split("==")[0]
    done = container(REPLACES=f"{package} by {name}==9.9")
    assert done.returncode == 1
    assert f"replaced what the container had; throw this image away:\n{package}" in done.stderr


def test_a_python_without_torch_is_refused(container):
    done = container(HAS="no-such-package")
    assert done.returncode == 2
    assert "has no torch to keep" in done.stderr


@pytest.mark.parametrize("extra", ["te", "flash", "--bogus"])
def test_extras_that_the_container_has_are_refused(container, extra):
    done = container(extra)
    assert done.returncode == 2
    assert "Not te and flash: the container has them" in done.stderr


def test_the_dockerfile_installs_by_the_script_alone():
    text = (ROOT / "Dockerfile").read_text()
    assert "nvcr.io/nvidia/pytorch:" in text
    assert "tools/install_in_container.sh" in text
    assert "pip install" not in text
