"""The inspection tool: its figures by counting over the samples, its picture, its errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_anchor.command_line import run as run_command
from megatron_anchor.packing.cli import main
from megatron_anchor.packing.statistics import attention_work_share
from tests.unit.packing_oracle import ANCHOR, build_train, write_corpus

DOCUMENTS = [[[10 * n + k for k in range(n * n % 23 + 1)]] for n in range(1, 60)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "c", DOCUMENTS)


def run(prefix: str, capsys: pytest.CaptureFixture, *flags: str) -> Any:
    length, anchor = ("--seq-length", "16"), ("--anchor-token-id", str(ANCHOR))
    assert main([prefix, *length, *anchor, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("pattern", ["anchor", "full"])
def test_the_figures_are_those_of_the_samples(
    prefix: str, capsys: pytest.CaptureFixture, packing: str, pattern: str
) -> None:
    flags = ("--packing", packing, "--attention-pattern", pattern, "--document-alignment", "2")
    report = run(prefix, capsys, *flags)
    samples = list(
        build_train(prefix, sequence_length=16, packing=packing, attention_pattern=pattern,
                    document_alignment=2)
    )  # fmt: skip
    found = [
        (
            sample["num_documents"],
            sample["num_padding"] / 16,
            attention_work_share(np.diff(sample["cu_seqlens"].numpy()), sequence_length=16),
        )
        for sample in samples
    ]
    assert report["samples"] == report["samples_read"] == len(samples)
    assert report["documents"] == len(DOCUMENTS) == sum(report["document_lengths"])
    for name, key in (("documents_per_sample", 0), ("padding_share", 1)):
        assert report[name] == pytest.approx(np.mean([figures[key] for figures in found]))
    assert report["attention_work_share"] == pytest.approx(np.mean([f[2] for f in found]))
    longer = sum(len(document[0]) > 15 for document in DOCUMENTS)
    assert (
        report["cut_documents"] == longer
        if packing == "best-fit"
        else longer <= report["cut_documents"]
    )
    least = -(-sum(len(d[0]) + 1 + (len(d[0]) + 1) % 2 for d in DOCUMENTS) // 16)
    assert report["samples"] >= report["fewest_samples"] >= least


@pytest.mark.parametrize("pattern", ["anchor", "full"])
def test_a_shown_sample_is_the_one_of_the_dataset(
    prefix: str, capsys: pytest.CaptureFixture, pattern: str
) -> None:
    rows = run(prefix, capsys, "--sample", "3", "--attention-pattern", pattern)
    sample = build_train(prefix, sequence_length=16, attention_pattern=pattern)[3]
    for row in rows:
        begin, end = row["slots"]
        assert row["tokens"] == sample["tokens"][begin:end].tolist()
        assert row["positions"] == sample["position_ids"][begin:end].tolist()
        text = DOCUMENTS[row["document"]][0]
        assert set(row["tokens"][1:]) <= set(text)
    assert len(rows) == sample["num_documents"]
    assert main([prefix, "--seq-length", "16", "--anchor-token-id", "1", "--sample", "3"]) == 0
    assert "positions" in capsys.readouterr().out


def test_a_picture_and_a_table_are_made(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    picture = tmp_path / "p.png"
    flags = ["--seq-length", "16", "--anchor-token-id", "1", "--png", str(picture)]
    assert main([prefix, *flags, "--interleave-chunks"]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "documents             59" in out
    assert "of full attention" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-length", "16"], "or a token id with --anchor-token"),
        (["--seq-length", "16", "--anchor-token", "eos"], "does not say what its eos is"),
        (["--seq-length", "16", "--anchor-token", "<s>"], "--anchor-token <s>: expected bos, eos"),
        (["--seq-length", "16", "--anchor-token", "1", "--sample", "9999"], "--sample 9999: there"),
        (["--seq-length", "16", "--anchor-token", "1", "--sample", "-1"], "--sample -1: there are"),
        (["--seq-length", "16", "--anchor-token", "1", "--seed", "-1"], "--seed -1: expected 0"),
        (["--seq-length", "1", "--anchor-token-id", "1"], "got sequence_length 1"),
        (["--seq-length", "16", "--domain-tags"], "give --tokenizer-model"),
    ],
)
def test_errors_name_value_and_remedy(
    prefix: str, capsys: pytest.CaptureFixture, flags: list[str], message: str
) -> None:
    assert run_command(main, [prefix, *flags]) == 2
    assert message in capsys.readouterr().err
