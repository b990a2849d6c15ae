"""Estimated times: laws of the formula, and step times of a small model recorded on a CPU."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.planner.gpus import GPUS, Gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.samples import Samples, attention_work
from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.step_time import Efficiency, expected_excess, step_time

RECORD = json.loads((Path(__file__).parent / "planner_step_times.json").read_text())
"""CPU seconds of a step of RECORD["model"], both patterns in turns on the same samples, as
benchmarks/step_time.py takes them; how and where it was recorded stands in the file."""

ONE_CORE = Gpu(
    name="one core", capability=(8, 0), tflops=0.1, memory_gib=24, nvlink=1, network=1, per_node=1
)


def estimated(row, pattern, efficiency):
    length = row["sequence_length"]
    samples = Samples([np.array(row["slices"])], 0.0)
    model = Model(**RECORD["model"])
    return step_time(
        Shape(model=model, ffn=model.ffn),
        Layout(),
        gpu=ONE_CORE,
        efficiency=efficiency,
        attention=attention_work(samples, sequence_length=length, pattern=pattern),
        sequence_length=length,
        global_batch=1,
    )


def fitted():
    """Both efficiencies, from the recorded steps of full attention alone."""
    unit = Efficiency(linear=1, attention=1)
    work, seconds = [], []
    for row in RECORD["rows"]:
        time = estimated(row, "full", unit)
        work.append([time.linear, time.attention])
        seconds.append(min(row["full"]))
    relative = np.array(work) / np.array(seconds)[:, None]
    linear, attention = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)[0]
    return Efficiency(linear=1 / linear, attention=1 / attention)


LENGTHS = sorted({row["sequence_length"] for row in RECORD["rows"]})


@pytest.mark.parametrize("length", LENGTHS)
def test_the_recorded_ratio_of_full_to_anchor_is_the_estimated_one(length):
    """The efficiencies come from full attention, so nothing of the anchored steps was fitted."""
    rows = [row for row in RECORD["rows"] if row["sequence_length"] == length]
    measured = sum(min(r["full"]) for r in rows) / sum(min(r["anchor"]) for r in rows)
    efficiency = fitted()
    full, anchor = (
        sum(estimated(row, pattern, efficiency).total for row in rows)
        for pattern in ("full", "anchor")
    )
    assert full / anchor == pytest.approx(measured, rel=0.15)
    assert measured > 1.1, "the patterns must differ for this to say anything"


SIZES = {"sequence_length": 32768, "global_batch": 16}
WORK = attention_work(
    Samples([np.full(32, 1024), np.array([32768])], 0.0), sequence_length=32768, pattern="anchor"
)


def seconds(layout, gpu="h100", **changes):
    found = dataclasses.replace(GPUS[gpu], **changes)
    return step_time(
        known_shape("llama-3-8b"),
        layout,
        gpu=found,
        efficiency=Efficiency.of(found),
        attention=WORK,
        **SIZES,
    )


def test_work_is_shared_by_ranks_and_a_pipeline_waits():
    one, shared = seconds(Layout()), seconds(Layout(tp=2, cp=4))
    assert shared.linear == pytest.approx(one.linear / 8)
    assert shared.attention == pytest.approx(one.attention / 8)
    assert one.communication == one.waiting == 0 < shared.communication
    piped = seconds(Layout(pp=4))
    busy = piped.total - piped.waiting
    assert piped.waiting == pytest.approx(busy * 3 / 16, rel=0.02)


def test_groups_beyond_a_server_pay_for_the_network():
    inside, across = Layout(tp=4, cp=2), Layout(tp=8, cp=4, dp=1)
    assert seconds(inside).total == seconds(inside, network=1).total
    assert seconds(across, network=5).communication > 2 * seconds(across).communication


def test_the_heaviest_of_many_ranks_is_waited_for():
    assert expected_excess(WORK, ranks=1, samples=4) == 0
    few, many = (expected_excess(WORK, ranks=n, samples=4) for n in (2, 64))
    assert 0 < few < many
    assert seconds(Layout(dp=8)).waiting > 0
    draws = np.random.default_rng(0).choice([0.0, 2.0], size=(500, 64, 64)).mean(axis=2)
    simulated = draws.max(axis=1).mean() - 1
    law = expected_excess(dataclasses.replace(WORK, imbalance=1.0), ranks=64, samples=64)
    assert law == pytest.approx(simulated, rel=0.25)
