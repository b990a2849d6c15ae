"""The table of the CPU benchmarks: which way ratios point, what is written, what is run."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def side_by_side():
    return load("side_by_side")


@given(ours=st.integers(1, 1000), theirs=st.integers(1, 1000), repeats=st.integers(1, 5))
def test_a_ratio_is_the_peers_time_over_ours(ours, theirs, repeats):
    now, side_by_side = [0.0], load("side_by_side")

    def work(seconds):
        now[0] += seconds

    row = side_by_side.compare(
        "x",
        lambda: work(ours),
        lambda: work(theirs),
        peer="p",
        repeats=repeats,
        clock=lambda: now[0],
    )
    assert row.ratio == row.ratio_min == row.ratio_max == pytest.approx(theirs / ours)
    assert (row.ours, row.theirs) == (f"{ours:.3g} s", f"{theirs:.3g} s")


def test_what_is_written_is_read_back(side_by_side, tmp_path):
    rows = [
        side_by_side.Comparison(what="a", peer="b", ours="1 s", theirs="2 s", ratio=2.0, repeats=3),
        side_by_side.Comparison(
            **dict(what="c", peer="d", ours="1 s", theirs="2 s", ratio=2.0, repeats=3),
            **dict(ratio_min=1.5, ratio_max=2.5, note="n"),
        ),
    ]
    found = side_by_side.Findings(
        comparisons=rows, figures=[side_by_side.Figure(what="e", value="5")]
    )
    found.write(tmp_path / "x.json")
    assert side_by_side.Findings.read(tmp_path / "x.json") == found
    assert "| c | d | 2 s | 1 s | 2.00 x | 1.50 to 2.50 | n |" in found.table()
    assert "| e | 5 |" in found.table()


@pytest.mark.parametrize("quick", [True, False])
def test_every_benchmark_that_runs_on_a_cpu_is_in_the_table(side_by_side, tmp_path, quick):
    run_all = load("run_all")
    programs = {b.program for b in run_all.benchmarks(tmp_path, quick=quick)}
    shared = {"side_by_side.py", "run_all.py"}
    needs_a_checkout = {"argument_sets.py"}  # of Megatron-LM, and measures no speed
    here = {path.name for path in BENCHMARKS.glob("*.py") if not path.name.startswith("gpu_")}
    assert programs == here - shared - needs_a_checkout


def test_a_failed_benchmark_stands_in_the_report(side_by_side, tmp_path):
    run_all = load("run_all")
    benchmark = run_all.Benchmark("Broken", "no_such_program.py", ())
    run = run_all.run(benchmark, tmp_path)
    assert run.findings is None
    assert "It failed." in run_all.report([run], command="x")


@pytest.mark.parametrize("turns", ["0", "-1", "x", "1.5"])
def test_no_turn_at_all_is_refused(side_by_side, turns):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{turns}', expected a whole number"):
        side_by_side.at_least_one(turns)


def test_the_peer_of_the_converters_copies_all_whatever_the_folder_is_called(
    side_by_side, tmp_path
):
    source, out = tmp_path / "a b; $c", tmp_path / "ö ut"
    source.mkdir()
    (source / "x y").write_bytes(b"1")
    load("convert").copy(source, out)
    assert (out / "x y").read_bytes() == b"1"


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    side_by_side, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    page = tmp_path / "file" / "page.md"
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--report", str(page)])
    with pytest.raises(SystemExit) as refused:
        load("run_all").main()
    assert refused.value.code == 2
    assert f"--report {page}: " in capsys.readouterr().err
