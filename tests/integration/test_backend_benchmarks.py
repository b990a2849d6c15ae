"""The GPU benchmarks at toy size on the CPU: arguments, length tables, and the files written."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

BOTH = """
import sys
sys.path.insert(0, {benchmarks!r})
import gpu_attention, gpu_train
for program in (gpu_attention, gpu_train):
    name = program.__name__
    sys.argv = [name, "--device", "cpu", "--quick", "--output", f"{folder}/{{name}}"]
    program.main()
"""


@pytest.fixture(scope="module")
def lengths_module():
    spec = importlib.util.spec_from_file_location("gpu_lengths", BENCHMARKS / "gpu_lengths.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_lengths"] = module
    spec.loader.exec_module(module)
    return module


def test_both_benchmarks_write_a_table_a_picture_and_json(tmp_path):
    code = BOTH.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "without te: its kernels need a CUDA device" in done.stdout
    for name, tokens in (("gpu_attention", {256, 1024}), ("gpu_train", {256, 512})):
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert {row["tokens"] for row in content["rows"]} == tokens
        assert {row["pattern"] for row in content["rows"]} == {"full", "anchor"}
        assert all(row["TFLOP/s"] > 0 and row["full / this"] > 0 for row in content["rows"])
        assert content["machine"]["capability"] == "the CPU"
        lines = (tmp_path / f"{name}.md").read_text().splitlines()
        assert len([line for line in lines if line.startswith("|")]) == len(content["rows"]) + 2
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


FAILING = """
import gpu_attention, gpu_lengths
bind = gpu_attention.bind
def broken(name, options):
    if name == "broken":
        raise RuntimeError("no kernel | image\\nfor this device")
    return bind(name, options)
gpu_attention.bind = broken
gpu_attention.serving_backends = lambda options: ["broken", "sdpa"]
sys.argv = ["b", "--device", "cpu", "--quick", "--seq-lengths", "256", "--output", {output!r}]
gpu_attention.main()
"""


def test_a_kernel_that_fails_leaves_its_reason_in_the_table_and_the_others_their_figures(tmp_path):
    head = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})"
    code = head + FAILING.format(output=str(tmp_path / "b"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    notes = {row["note"] for row in rows if row["kernel"] == "broken"}
    assert notes == {"failed: RuntimeError: no kernel / image"}
    assert all(row["TFLOP/s"] > 0 for row in rows if row["kernel"] == "sdpa")


def test_no_panel_cuts_lines_off(lengths_module, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    rows = [
        {"tokens": 1024, "lengths": panel, "pattern": "anchor", "kernel": "k", "rate": rate}
        for panel, rate in (("low", 1.0), ("high", 50.0))
    ]
    lengths_module.draw(tmp_path / "x.png", rows, title="t", value="rate", label="r")
    for axes in figures[0].axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 50


def test_length_tables_have_the_mean_of_their_source(lengths_module):
    lengths = lengths_module.slimpajama_like().lengths
    assert abs(lengths.mean() / lengths_module.tables.SLIMPAJAMA_MEAN - 1) < 0.02
    assert round(lengths_module.tables.SLIMPAJAMA_MEAN) == 1089
    long = lengths_module.long_documents().lengths
    share = long[long >= 32768].sum() / long.sum()
    assert abs(share - lengths_module.tables.LONG_SHARE) < 0.05


def test_samples_are_full_and_the_same_every_time(lengths_module):
    source = lengths_module.slimpajama_like()
    for tokens in (256, 16384, 131072):
        packed = source.pack(tokens)
        assert sum(packed) == tokens
        assert min(packed) >= 1
        assert packed == source.pack(tokens)


def test_lengths_of_a_corpus_are_those_of_its_documents(lengths_module, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "few.bin"), dtype=np.uint16)
    builder.add_document(torch.arange(7), [4, 3])
    builder.add_document(torch.arange(5), [5])
    builder.finalize(str(tmp_path / "few.idx"))
    found = lengths_module.from_corpus(str(tmp_path / "few"))
    assert found.lengths.tolist() == [7, 5]
    assert found.name == "few"
