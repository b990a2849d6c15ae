"""A run can be extended: the samples that it has read do not depend on how many it asks for."""

import tempfile
from collections import Counter
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_anchor import patches
from megatron_anchor.packing import sample_index as sample_index_module
from megatron_anchor.packing.balance import BalancedDataset, Balancing
from megatron_anchor.packing.blend import PATCH as BLENDS
from megatron_anchor.packing.sample_index import blocks_of_epochs
from tests.unit.packing_oracle import (
    ANCHOR,
    PAD,
    build,
    build_case,
    build_train,
    expected_fields,
    flatten,
    make_config,
    packings,
    plain,
    slow_samples,
    targets,
    write_corpus,
)


def expected(case: dict[str, Any], num_samples: int) -> list[dict]:
    """The first whole epochs that hold so many samples, by the slow packer."""
    options = case["settings"]
    samples: list = []
    for epoch in count():
        if samples and len(samples) >= num_samples:
            break
        samples += slow_samples(case, epoch=epoch)
    return [
        expected_fields(
            sample,
            sequence_length=options["sequence_length"],
            pad=PAD,
            pattern=options["attention_pattern"],
            anchor_position=options["anchor_position"],
            first_token_loss=options["anchor_first_token_loss"],
        )
        for sample in samples
    ]


def test_the_samples_of_any_run_are_the_first_of_one_endless_sequence() -> None:
    """Also across blocks, and whatever was in the cache before."""
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=40)
    @given(packings(), st.lists(st.integers(0, 60), min_size=1, max_size=3))
    def check(case: dict[str, Any], sizes: list[int]) -> None:
        longest = expected(case, max(sizes))
        with tempfile.TemporaryDirectory() as folder:
            for size in sizes:
                ours = build_case(case, folder, size)
                fewest = len(expected(case, size))
                assert len(ours) == fewest >= size
                assert [plain(sample) for sample in ours] == longest[:fewest]
                seen["several blocks"] += len(ours._samples._blocks) > 2
                seen["one epoch"] += ours._samples.epochs == 1
                seen["epochs in the middle of a block"] += ours._samples.epochs in range(3, 9)

    check()
    assert set(+seen) == {"several blocks", "one epoch", "epochs in the middle of a block"}


@settings(deadline=None, max_examples=40)
@given(packings(unique=True), st.integers(2, 5))
def test_every_token_is_a_target_once_in_the_samples_of_every_epoch(
    case: dict[str, Any], epochs: int
) -> None:
    contents = [d[1:] if d[:1] == [ANCHOR] else d for d in flatten(case["documents"])]
    every = Counter(token for content in contents for token in content)
    if not case["settings"]["anchor_first_token_loss"]:
        every -= Counter(content[0] for content in contents if content)
    ends = [0]
    for epoch in range(epochs):
        ends.append(ends[-1] + len(slow_samples(case, epoch=epoch)))
    with tempfile.TemporaryDirectory() as folder:
        ours = build_case(case, folder, ends[-1])
        assert len(ours) == ends[-1]
        for begin, end in pairwise(ends):
            found = Counter(t for number in range(begin, end) for t in targets(ours[number]))
            assert found == every


def test_more_training_on_resume_repeats_and_skips_no_token(tmp_path: Path) -> None:
    """An epoch of 125 samples: stop at 117, then ask for 133."""
    lengths = np.random.default_rng(1).integers(1, 90, 82)
    tokens = iter(range(10, 60000))
    documents = [[list(islice(tokens, int(length)))] for length in lengths]
    prefix = write_corpus(tmp_path / "c", documents)
    epoch = build_train(prefix, sequence_length=31)
    assert len(epoch) == 125
    stopped, extended = (build_train(prefix, n, sequence_length=31) for n in (117, 133))
    read = [stopped[number] for number in range(117)]
    read += [extended[number] for number in range(117, 133)]
    found = Counter(t for sample in read[: len(epoch)] for t in targets(sample))
    assert found == Counter(t for document in flatten(documents) for t in document)
    found = Counter(t for sample in read for t in targets(sample))
    assert set(found.values()) == {1, 2}
    assert len(+(found - Counter(set(found)))) == sum(
        len(targets(sample)) for sample in read[len(epoch) :]
    )


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_longer_run_builds_only_the_epochs_it_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    prefix = write_corpus(tmp_path / "c", [[[10 * n, 10 * n + 1]] for n in range(1, 9)])
    monkeypatch.setattr(sample_index_module, "MOST_DOCUMENTS", 1)  # one epoch a block
    settings = {"packing": packing, "path_to_cache": str(tmp_path / "cache")}
    size = len(build_train(prefix, **settings))
    files: list[set[Path]] = [set(Path(tmp_path, "cache").iterdir())]
    times = {path: path.stat().st_mtime_ns for path in files[0]}
    for epochs in (2, 4):
        dataset = build_train(prefix, size * epochs, **settings)
        assert dataset._samples.epochs == len(dataset._samples._blocks) == epochs
        files.append(set(Path(tmp_path, "cache").iterdir()))
    assert [len(later - before) for before, later in pairwise(files)] == [5, 10]
    assert {path: path.stat().st_mtime_ns for path in files[0]} == times


def test_blocks_hold_every_epoch_once_and_few_documents() -> None:
    for documents in (1, 7, 1000, 10**6, 10**9):
        blocks = list(islice(blocks_of_epochs(documents), 12))
        assert [epoch for block in blocks[:4] for epoch in block] == list(range(blocks[3].stop))
        assert blocks[0] == range(1)
        assert all(len(b) == 1 or len(b) * documents <= 1 << 20 for b in blocks)
        assert all(len(a) <= len(b) for a, b in pairwise(blocks))


@pytest.mark.parametrize("weights", [None, [0.5, 0.5], [0.9, 0.1], [0.013, 0.987]])
def test_a_blend_is_extended_without_another_order(
    tmp_path: Path, weights: list[float] | None
) -> None:
    patches.apply(BLENDS)
    corpora = [[[[100 * n + k for k in range(n % 9 + 1)]] for n in range(1, c)] for c in (40, 25)]
    prefixes = [write_corpus(tmp_path / f"c{n}", corpus) for n, corpus in enumerate(corpora)]
    config = make_config((prefixes, weights), path_to_cache=str(tmp_path / "cache"))
    total = 400 if weights else len(build(config)[0])
    longest = [plain(sample) for sample in build(config, [total, 0, 0])[0]]
    for number in (1, 2, 7, total // 3, total - 1):
        blend = build(config, [number, 0, 0])[0]
        assert len(blend) >= number
        assert [plain(sample) for sample in blend] == longest[: len(blend)]


def test_balanced_batches_and_interleaved_documents_stay_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    documents = [[[*range(10, 10 + int(n))]] for n in generator.integers(1, 30, 50)]
    prefix = write_corpus(tmp_path / "c", documents)
    settings = {
        "sequence_length": 32,
        "interleave_chunks": True,
        "interleave_max_chunks": 3,
        "interleave_min_chunk_length": 1,
    }
    sizes = Balancing(global_batch_size=4, micro_batch_size=1, ranks=2)
    size = len(build_train(prefix, **settings))
    runs = [
        BalancedDataset(build_train(prefix, n, **settings), sizes) for n in (size - 3, 3 * size)
    ]
    whole_batches = (size - 3) // 4 * 4
    first, second = ([plain(run[n]) for n in range(whole_batches)] for run in runs)
    assert first == second
    in_order = [plain(runs[0].dataset[n]) for n in range(whole_batches)]
    assert first != in_order


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 14), min_size=1, max_size=20), st.integers(0, 40))
@example([3, 3, 3], 9)
def test_a_document_list_is_an_epoch_of_its_own(listed: list[int], num_samples: int) -> None:
    documents = [[[10 * n + k for k in range(n % 4 + 1)]] for n in range(1, 16)]
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(f"{folder}/c", documents)
        np.save(f"{folder}/list.npy", np.array(listed))
        lists = {"document_lists": {"": f"{folder}/list.npy"}}
        epoch = build_train(prefix, **lists)
        ours = build_train(prefix, num_samples, **lists)
        assert len(ours) >= num_samples
        assert [plain(ours[n]) for n in range(len(epoch))] == [plain(sample) for sample in epoch]
        found = Counter(t for sample in epoch for t in targets(sample))
    assert found == Counter(t for n in listed for t in documents[n][0])
