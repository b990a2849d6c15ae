"""What `pip install .` installs: built from the sources that git would hand out, and listed."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_anchor

ROOT = Path(__file__).parents[2]
SOURCES = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "megatron_anchor",
    "tests",
    "tools",
)
BUILD = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without the network in a copy of the tree."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=600)
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def members(wheel, *, metadata):
    return {name for name in wheel.namelist() if (".dist-info/" in name) == metadata}


def read_metadata(wheel, file):
    (name,) = (name for name in members(wheel, metadata=True) if name.endswith(f"/{file}"))
    return wheel.read(name).decode()


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    package = ROOT / "megatron_anchor"
    expected = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in (".nbi", ".nbc")
    }
    assert "megatron_anchor/py.typed" in expected
    assert members(wheel, metadata=False) == expected


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in (ROOT / "megatron_anchor").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_wheel_brings_the_command_and_the_licence(wheel):
    assert "megatron-anchor = megatron_anchor.console:main" in read_metadata(
        wheel, "entry_points.txt"
    )
    assert "Apache License" in read_metadata(wheel, "LICENSE")


def test_the_wheel_says_what_the_package_says(wheel):
    said = email.message_from_string(read_metadata(wheel, "METADATA"))
    assert said["Version"] == megatron_anchor.__version__
    assert said["License"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    assert said["Requires-Python"] == ">=3.12"
    assert "docs" in said.get_all("Provides-Extra")


def test_every_version_bound_of_the_package_lets_the_pinned_version_pass(wheel):
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    needed = [
        Requirement(text)
        for text in email.message_from_string(read_metadata(wheel, "METADATA")).get_all(
            "Requires-Dist"
        )
    ]
    installed = {"", "dev", "docs", "plot", "fast", "zstd"}
    for requirement in needed:
        extras = [
            x
            for x in installed
            if not requirement.marker or requirement.marker.evaluate({"extra": x})
        ]
        if extras:
            assert requirement.name in pins, f"{requirement} has no pin in constraints.txt"
            assert requirement.specifier.contains(pins[requirement.name]), str(requirement)
