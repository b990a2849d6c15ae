"""tools/make_venv.sh replaces an environment, and never loses one that works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """\
#!{python}
# Stands for python and pip: makes an environment in a moment, or fails as it is told.
import os, pathlib, shutil, sys, time

if sys.argv[1] == "-c":
    pass
elif sys.argv[1] == "--version":
    print("Python 3.12.0")
elif sys.argv[1:3] == ["-m", "venv"]:
    folder = pathlib.Path(sys.argv[3])
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("new")
    shutil.copy(__file__, folder / "bin/python")
else:
    with open("pip.log", "a") as log:
        print(*sys.argv[1:], file=log)
    pathlib.Path("installing").touch()
    time.sleep(float(os.environ.get("SECONDS_OF_PIP", "0")))
    sys.exit(int(os.environ.get("STATUS_OF_PIP", "0")))
"""


@pytest.fixture
def clone(tmp_path):
    """A scratch folder with the scripts, an environment that works and one stand-in for python."""
    (tmp_path / "tools").mkdir()
    for name in ("make_venv.sh", "make_venv_te.sh", "venv_aside.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    works(tmp_path / ".venv")
    return tmp_path


def works(folder):
    folder.mkdir()
    for name, text in (("pyvenv.cfg", "old"), (".ready", ""), ("precious", "")):
        (folder / name).write_text(text)
    (folder / "bin").mkdir()
    shutil.copy(folder.parent / "python", folder / "bin/python")


def environment(clone, **settings):
    return {"PATH": os.environ["PATH"], "PYTHON": str(clone / "python")} | settings


def make(clone, *words, script="make_venv.sh", **settings):
    return subprocess.run(
        [clone / "tools" / script, *words],
        cwd=clone,
        env=environment(clone, **settings),
        capture_output=True,
        text=True,
        timeout=60,
    )


def version(folder):
    return (folder / "pyvenv.cfg").read_text()


@pytest.mark.parametrize("words", [(".venv", "--help"), ("--help",), ("-h",), (".venv", "x", "-h")])
@pytest.mark.parametrize("script", ["make_venv.sh", "make_venv_te.sh"])
def test_help_is_help_and_touches_nothing(words, script, clone):
    done = make(clone, *words, script=script)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: tools/{script} ")
    assert (clone / ".venv/precious").exists()
    assert not (clone / "pip.log").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((".venv", "--halp"), "unknown option --halp"),
        (("--venv", ".venv"), "unknown option --venv"),
        ((), "usage: tools/make_venv.sh DIR"),
        (("tools",), "tools holds something else than an environment (no pyvenv.cfg)"),
        ((".",), ". holds something else than an environment"),
        (("",), "'' is no folder for an environment"),
    ],
)
def test_what_is_not_understood_touches_nothing(words, message, clone):
    done = make(clone, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert (clone / ".venv/precious").exists()
    assert (clone / "tools/make_venv.sh").exists()


@pytest.mark.parametrize("python", ["nowhere/python", "3.99"])
def test_a_python_that_is_not_there_is_no_other_one(python, clone):
    done = make(clone, ".venv", PYTHON=python)
    assert done.returncode == 2
    assert f"PYTHON={python}: no such Python" in done.stderr
    assert version(clone / ".venv") == "old"


def test_a_version_names_the_python_of_pyenv(clone):
    for name in ("3.42.0", "3.12.9"):
        (clone / "pyenv/versions" / name / "bin").mkdir(parents=True)
    shutil.copy(clone / "python", clone / "pyenv/versions/3.42.0/bin/python")
    path = "/usr/bin:/bin"
    done = make(clone, ".venv", PYTHON="3.42", PYENV_ROOT=str(clone / "pyenv"), PATH=path)
    assert done.returncode == 0, done.stderr
    assert "pyenv/versions/3.42.0/bin/python" in done.stdout


def test_an_environment_is_replaced_by_a_new_one(clone):
    done = make(clone, ".venv")
    assert done.returncode == 0, done.stderr
    assert version(clone / ".venv") == "new"
    assert (clone / ".venv/.ready").exists()
    assert not (clone / ".venv/precious").exists()
    assert not (clone / ".venv.set-aside").exists()
    assert "-c requirements/constraints.txt -e .[dev,plot,fast]" in (clone / "pip.log").read_text()


@pytest.mark.parametrize("folder", [".venv-docs", "new/", "deep"])
def test_a_new_environment_needs_no_old_one(folder, clone):
    done = make(clone, folder, "-r", "requirements/docs.txt")
    assert done.returncode == 0, done.stderr
    assert version(clone / folder) == "new"
    assert "constraints.txt -r requirements/docs.txt" in (clone / "pip.log").read_text()
    assert version(clone / ".venv") == "old"


def test_an_environment_that_works_stays_when_the_new_one_cannot_be_made(clone):
    done = make(clone, ".venv", STATUS_OF_PIP="3")
    assert done.returncode == 3
    assert ".venv is the old one again" in done.stderr
    assert version(clone / ".venv") == "old"
    assert (clone / ".venv/.ready").exists()
    assert not (clone / ".venv.set-aside").exists()
    done = make(clone, "other", STATUS_OF_PIP="3")
    assert done.returncode == 3
    assert not (clone / "other/.ready").exists()
    assert make(clone, "other").returncode == 0, "what a failed one left is no obstacle"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_environment_that_works_survives_a_kill(number, clone):
    job = subprocess.Popen(
        [clone / "tools/make_venv.sh", ".venv"],
        cwd=clone,
        env=environment(clone, SECONDS_OF_PIP="60"),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    while not (clone / "installing").exists():
        assert job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, number)
    assert job.wait(30) != 0
    if number == signal.SIGKILL:  # nothing can put it back; the next start does not lose it
        assert version(clone / ".venv.set-aside") == "old"
        assert make(clone, ".venv", STATUS_OF_PIP="3").returncode == 3
    assert version(clone / ".venv") == "old"
    assert (clone / ".venv/precious").exists()


def test_a_link_is_replaced_and_what_it_names_is_kept(clone):
    (clone / ".venv").rename(clone / "elsewhere")
    (clone / ".venv").symlink_to("elsewhere")
    assert make(clone, ".venv").returncode == 0
    assert version(clone / ".venv") == "new"
    assert not (clone / ".venv").is_symlink()
    assert version(clone / "elsewhere") == "old"


def test_the_environment_over_another_one_is_kept_too(clone):
    works(clone / ".venv-te")
    done = make(clone, "nowhere", ".venv-te", script="make_venv_te.sh")
    assert done.returncode == 2
    assert "nowhere is no environment" in done.stderr
    done = make(clone, ".venv", ".venv-te", script="make_venv_te.sh", STATUS_OF_PIP="3")
    assert done.returncode != 0
    assert version(clone / ".venv-te") == "old"
