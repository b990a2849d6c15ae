"""NaN stops a run with the names of the samples and documents that it came from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.jobs import Ended, run, run_ranks_until_one_ends
from tests.reliability.poison import TOKEN, poison_the_embedding, poison_the_gradient
from tests.reliability.poisoned import BATCH, Poisoned, packed

FOUND = re.compile(
    r"^error: rank (?P<rank>\d+), iteration (?P<iteration>\d+): (?P<what>.*)\n"
    r"  sample (?P<sample>\d+) of the train split of (?P<corpus>\S+): "
    r"documents (?P<documents>[^;\n]*)"
    r"(?:; not finite from slot (?P<slot>\d+) on(?:, in documents (?P<bad>.*))?)?$",
    re.MULTILINE,
)


def check_the_message(ended: Ended, poisoned: Poisoned) -> re.Match[str]:
    found = FOUND.search(ended.log)
    assert found, ended.log[-3000:]
    assert found["corpus"] == str(poisoned.prefix)
    assert int(found["iteration"]) == poisoned.iteration
    assert int(found["sample"]) == poisoned.sample
    assert str(poisoned.document) in found["documents"].split(", ")
    assert found["bad"] == str(poisoned.document)
    return found


def check_the_files(folder: Path, found: re.Match[str], poisoned: Poisoned) -> None:
    """They hold the sample as the dataset gives it."""
    name = f"iteration-{poisoned.iteration:07d}-rank-{int(found['rank']):05d}"
    described = json.loads((folder / f"{name}.json").read_text())
    [sample] = described["samples"]
    assert described["iteration"] == poisoned.iteration
    assert (sample["corpus"], sample["sample"]) == (str(poisoned.prefix), poisoned.sample)
    assert sample["documents_not_finite"] == [poisoned.document]
    [piece] = [piece for piece in sample["slices"] if piece["document"] == poisoned.document]
    assert f" {TOKEN} " in piece["text"], "NullTokenizer's text of the token is its number"
    assert int(found["slot"]) == sample["slots_not_finite"][0][0]
    expected = packed(poisoned.prefix)[poisoned.sample]
    slot = int(found["slot"])
    assert piece["slots"][0] <= slot < piece["slots"][1]
    with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
        assert arrays["sample"].tolist() == [poisoned.sample]
        for field in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
            assert np.array_equal(arrays[field][0], expected[field].numpy()), field
        assert TOKEN in arrays["tokens"][0][slice(*piece["slots"])]
        assert np.isnan(arrays["losses"]).any()
    assert {path.suffix for path in folder.iterdir()} == {".npz", ".json"}, "no part of a file"


def test_a_loss_that_is_nan_names_the_document_and_writes_the_batch(
    poisoned: Poisoned, tmp_path: Path
) -> None:
    ended = run(
        f"{poisoned.arguments(tmp_path)} --save {tmp_path / 'saved'} --save-interval 100",
        log=tmp_path / "log",
        before=poison_the_embedding,
    )
    assert ended.exit_code == 16, "Megatron's status for a result that came twice"
    assert sorted(ended.curve) == [1, 2]
    found = check_the_message(ended, poisoned)
    assert found["what"] == "found NaN in local forward loss calculation"
    check_the_files(tmp_path / "bad", found, poisoned)
    assert len(FOUND.findall(ended.log)) == 1, "said once, although the step is run again"


def test_nan_in_the_first_iteration_stops_before_it_reaches_the_weights(
    poisoned: Poisoned, tmp_path: Path
) -> None:
    ended = run(
        f"{poisoned.arguments(tmp_path)} --global-batch-size {poisoned.sample + 1} --train-iters 2 "
        f"--save {tmp_path / 'saved'} --save-interval 1",
        log=tmp_path / "log",
        before=poison_the_embedding,
    )
    assert ended.exit_code == 1
    assert not ended.curve
    assert "in the first iteration of this run" in ended.log
    found = FOUND.search(ended.log)
    assert found
    assert (int(found["sample"]), found["bad"]) == (poisoned.sample, str(poisoned.document))
    assert not list((tmp_path / "saved").glob("iter_*")), "no checkpoint of NaN"


def test_a_gradient_that_is_nan_names_the_samples_of_the_step(
    poisoned: Poisoned, tmp_path: Path
) -> None:
    ended = run(
        f"{poisoned.arguments(tmp_path)} --rerun-mode disabled",
        log=tmp_path / "log",
        before=poison_the_gradient,
    )
    assert ended.exit_code == 1
    assert sorted(ended.curve) == [1, 2]
    assert f"iteration {poisoned.iteration}: found NaN in local grad norm" in ended.log
    assert "(a gradient is the sum over all of these" in ended.log
    first = (poisoned.iteration - 1) * BATCH
    [path] = (tmp_path / "bad").glob("*.json")
    described = json.loads(path.read_text())
    assert [s["sample"] for s in described["samples"]] == list(range(first, first + BATCH))
    for sample in range(first, first + BATCH):
        assert f"  sample {sample} of the train split of {poisoned.prefix}: " in ended.log


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ],
)
def test_under_every_parallelism_the_rank_that_sees_it_names_the_document(
    poisoned: Poisoned, tmp_path: Path, layout: str
) -> None:
    ended = run_ranks_until_one_ends(
        f"{poisoned.arguments(tmp_path)} --rerun-mode disabled {layout}",
        4,
        log=tmp_path / "log",
        before=poison_the_embedding,
    )
    [first] = [one for one in ended.values() if FOUND.search(one.log)][:1]
    assert first.exit_code == 1
    found = check_the_message(first, poisoned)
    check_the_files(tmp_path / "bad", found, poisoned)
