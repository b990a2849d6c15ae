"""The words say the numbers: findings, CSV and JSON are recomputed from made-up results."""

import csv
import re

import numpy as np
import pytest

from megatron_anchor.precision.files import as_json, write_csv
from megatron_anchor.precision.findings import findings
from megatron_anchor.precision.measurement import STATES, Drift
from megatron_anchor.precision.run import Far, Results
from megatron_anchor.precision.settings import Settings

LAYERS, HEADS, KEYS = 3, 2, 10
ASKED = Settings(
    arms=("bf16", "float32"), num_texts=1, length=KEYS, shifts=(0, 16, 99), lengths=(5, 10)
)


def drift(arm, states, size):
    """Token 4 carries half of D, the first token a tenth; layer 2 twice what the others do."""
    keys = np.full(KEYS, 0.4 / 8)
    keys[4], keys[0] = 0.5, 0.1
    by_shift = size * np.array([1.0, 0.0, 2.0])
    heads = np.array([[1.0, 1.0], [1.0, 1.0], [2.5, 1.5]]) / 8
    return Drift(
        arm=arm,
        states=states,
        shifts=ASKED.shifts,
        reference_shift=16,
        by_text_TC=by_shift[None],
        by_head_CLH=by_shift[:, None, None] * heads,
        first_key_CLH=by_shift[:, None, None] * heads * 0.1,
        first_weight_LH=np.full((LAYERS, HEADS), 0.3),
        by_key_CS=by_shift[:, None] * keys,
        first_logit_CS=by_shift[:, None] * np.ones(KEYS),
    )


@pytest.fixture(scope="module")
def results():
    drifts = [
        drift(arm, states, size * (0.25 if states == "shared" else 1.0))
        for arm, size in (("bf16", 8.0), ("float32", 0.002))
        for states in STATES
    ]
    bands = np.array([[0.1, 0.2, 0.3, 0.4]] * 2)
    far = Far(np.array([64, 128]), np.array([1.0, 1.5]), bands, bands[0], np.array([6, 20, 60, 99]))
    both = {"bf16": far, "float32": far}
    return Results("tiny", "3 layers", ASKED, ("a",), tuple(drifts), {}, both)


def test_findings_say_what_was_measured(results):
    said = findings(results)
    assert "| bf16 (bf16, as transformers computes it) | 8 to 16 |" in said
    assert "| 4e+03 |" in said  # times float32
    assert "0.133 to 0.267" in said  # 8 / (3 layers x 2 heads x 10 keys)
    assert "bf16 25%" in said  # shared of end-to-end
    assert "token 4 with 50.0%" in said
    assert "first token carries 10.0% of D, 1 times" in said
    assert "holds 30.0% of the attention" in said
    assert "Layers 2 (50.0%)" in said
    assert "head is 0 of layer 2 with 31.2%" in said
    assert "| bf16 | 8 | 8 | 1 | 1.5 |" in said
    assert re.search(r"frequencies 0 \(10%\), 1 \(20%\), 2 \(30%\), 3 \(40%\)", said)
    assert "the 1 of 4 that turn within 10 positions have 10%" in said


def test_the_shift_that_is_the_reference_is_left_out_of_ranges(results):
    assert "| 0 to" not in findings(results)


def test_csv_holds_every_number_and_its_sums_are_the_json(results, tmp_path):
    write_csv(tmp_path / "x.csv", results)
    with open(tmp_path / "x.csv") as file:
        rows = list(csv.DictReader(file))
    mine = [r for r in rows if (r["arm"], r["states"]) == ("bf16", "end-to-end")]
    keys = sum(float(r["value"]) for r in mine if r["key"])
    heads = sum(float(r["value"]) for r in mine if r["head"])
    totals = [float(r["value"]) for r in mine if not r["key"] and not r["head"]]
    assert keys == pytest.approx(8) == heads
    assert totals == as_json(results)["arms"]["bf16"]["end-to-end"]["D"] == [8, 0, 16]
    assert list(tmp_path.iterdir()) == [tmp_path / "x.csv"]
