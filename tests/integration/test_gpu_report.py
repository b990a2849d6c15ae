"""`make gpu-report`, rehearsed to its last line on the CPU at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
REHEARSAL = ("--device", "cpu", "--quick")

NOT_BESIDE_MEGATRON = (
    *("numba", "transformers", "tokenizers", "sentencepiece", "tiktoken", "safetensors"),
    *("datasets", "nltk", "tqdm", "psutil", "pytest", "hypothesis", "tensorboard"),
)
"""Packages that someone with torch and the megatron-core wheel alone need not have."""


def report(*arguments, path=()):
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu_report.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )


def hide(folder, names):
    """Modules of these names that cannot be imported, for the programs that the report starts."""
    code = "import sys\nsys.modules.update(dict.fromkeys({!r}))\n"
    (folder / "sitecustomize.py").write_text(code.format(names))
    return folder


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    output = folder / "2026-01-01-gpu-none"
    hidden = hide(folder, NOT_BESIDE_MEGATRON)
    # The minutes are those of a busy machine: nothing here is judged by its time.
    done = report(*REHEARSAL, "--minutes", "40", "--output", str(output), path=[hidden])
    return done, output


def test_a_rehearsal_runs_every_part_and_says_that_it_is_none(rehearsal):
    done, output = rehearsal
    page = output.with_name(f"{output.name}.md").read_text()
    assert done.returncode == 0, page + done.stderr[-3000:]
    assert page.startswith("# Rehearsal on a CPU, no measurement")
    content = json.loads(output.with_name(f"{output.name}.json").read_text())
    titles = [part["title"] for part in content["parts"]]
    assert titles == [
        "Kernels against float64",
        "Rotation",
        "Five training steps",
        "Attention",
        "Layer stack",
        "Two ranks",
    ]
    assert content["rehearsal"]
    for part in content["parts"]:
        assert not part["trouble"]
        ran = [row for row in part["rows"] if row.get("result", "passed") == "passed"]
        assert ran, f"{part['title']}: {part['rows']}"
        assert f"## {part['title']}" in page
    assert output.with_name(f"{output.name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"![speed]({output.name}.png)" in page


def test_each_backend_is_judged_or_has_its_reason(rehearsal):
    from megatron_anchor.attention.backends import BACKENDS

    _, output = rehearsal
    content = json.loads(output.with_name(f"{output.name}.json").read_text())
    kernels, steps = content["parts"][0]["rows"], content["parts"][2]["rows"]
    for name in BACKENDS:
        for rows in (
            [row for row in kernels if row["check"] == name],
            [row for row in steps if row["check"] == f"five steps, {name}"],
        ):
            assert rows, name
            assert all(row["result"] == "passed" or "CPU" in row["note"] for row in rows)


BROKEN = """
import sys
sys.path.insert(0, {benchmarks!r})
import gpu_report
part = gpu_report.Part
gpu_report.PARTS = (
    part("Fails", "missing_program.py", 60, "It has no program."),
    part("Hangs", {hanging!r}, 20, "It does not end."),
    part("Goes on", "gpu_ranks.py", 1800, "It runs."),
)
sys.argv = ["r", "--device", "cpu", "--quick", "--minutes", "30", "--output", {output!r}]
gpu_report.GRACE = 1.0
sys.exit(gpu_report.main())
"""


def test_a_part_that_fails_or_hangs_is_named_and_the_others_go_on(tmp_path):
    hanging = tmp_path / "hang.py"
    hanging.write_text("import time\ntime.sleep(3600)\n")
    output = tmp_path / "broken"
    code = BROKEN.format(benchmarks=str(BENCHMARKS), hanging=str(hanging), output=str(output))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    page = output.with_suffix(".md").read_text()
    assert "| Fails | nothing ran, ended with exit code 2: " in page
    assert "| Hangs | nothing ran, ended after " in page
    assert "| Goes on | 6 of 6 passed |" in page
    assert "No picture: nothing was measured." in page


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("torch", "PYTHON="), ("megatron.core", "pip install --no-deps 'megatron-core")],
)
def test_what_is_missing_is_named_with_its_remedy(missing, remedy, tmp_path):
    code = "import importlib.util as u\nfind = u.find_spec\n"
    code += f"u.find_spec = lambda name, *a: None if name == {missing!r} else find(name, *a)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    done = report(*REHEARSAL, "--output", str(tmp_path / "x"), path=[tmp_path])
    assert done.returncode == 2
    assert f"has no {missing}; " in done.stderr
    assert remedy in done.stderr


def test_a_rehearsal_is_never_written_among_the_measurements():
    done = report("--device", "cpu", "--quick")
    assert done.returncode == 2
    assert "is a rehearsal and no measurement; give it an --output PATH" in done.stderr


def test_the_make_target_hands_on_python_and_minutes():
    command = ["make", "-n", "gpu-report", "PYTHON=/opt/py", "MINUTES=3"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/opt/py benchmarks/gpu_report.py --minutes 3"
