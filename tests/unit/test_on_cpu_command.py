"""`python -m megatron_anchor.on_cpu`: the program runs as it would alone, but without CUDA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_anchor.on_cpu import __main__ as command
from megatron_anchor.on_cpu.rows import ROWS

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import json, sys, torch, neighbour
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__,
        "cuda": torch.ones(2, device="cuda").tolist(),
    }))
    sys.exit(int(sys.argv[-1]))
"""


def on_cpu(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command and return what came of it."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_anchor.on_cpu", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `program.py` and the `neighbour.py` that it imports."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").write_text("")
    return tmp_path


def test_a_script_runs_as_main_beside_its_neighbours(folder: Path) -> None:
    script = str(folder / "program.py")
    run = on_cpu(script, "--lr", "1e-3", "--list", "--force", "3")
    assert run.returncode == 3, run.stderr
    assert json.loads(run.stdout) == {
        "argv": [script, "--lr", "1e-3", "--list", "--force", "3"],
        "path": str(folder),
        "name": "__main__",
        "cuda": [1.0, 1.0],
    }
    banner = [line for line in run.stderr.splitlines() if line.startswith("on_cpu: ")]
    assert len(banner) == 2
    assert f"{len(ROWS)} replacements" in banner[0]
    assert "nothing about kernels, NCCL, memory or speed" in banner[1]


def test_a_module_runs_as_main_and_only_rank_0_speaks(folder: Path) -> None:
    run = on_cpu("-m", "program", "-m", "0", cwd=folder, RANK="1")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["argv"][1:] == ["-m", "0"]
    assert answer["name"] == "__main__"
    assert "on_cpu" not in run.stderr


def test_list_shows_every_row_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_cpu", "--list"])
    command.main()
    words = capsys.readouterr().out.split()
    for row in ROWS:
        assert row.target in words
        assert row.reason in " ".join(words)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    run = on_cpu("no_such.py", cwd=tmp_path)
    assert run.returncode == 2
    assert "no such script: 'no_such.py'; give a path, or -m and a module" in run.stderr


def test_help_has_a_worked_example() -> None:
    run = on_cpu("--help")
    assert run.returncode == 0
    assert "torchrun --nproc-per-node 2 -m megatron_anchor.on_cpu pretrain_gpt.py" in run.stdout
