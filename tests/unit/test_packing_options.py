"""Every option of packing at once, against the slow packers and against the laws."""

import ast
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_anchor.packing.patterns import planned_patterns
from tests.unit.packing_oracle import (
    ANCHOR,
    PAD,
    build_case,
    build_train,
    expected_fields,
    flatten,
    packings,
    plain,
    slow_samples,
    tags_of,
    targets,
    write_corpus,
    write_domains,
)


def test_every_sample_equals_the_slow_packer_under_all_options() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=60)
    @given(packings())
    def check(case: dict[str, Any]) -> None:
        options = case["settings"]
        samples = slow_samples(case)
        with tempfile.TemporaryDirectory() as folder:
            ours = build_case(case, folder)
            assert [plain(sample) for sample in ours] == [
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
        slots = [slot for sample in samples for slot in sample]
        seen[options["packing"]] += len(samples) > 1
        seen["filling"] += any(slot.kind == "filling" for slot in slots)
        seen["tag"] += any(slot.kind == "tag" for slot in slots)
        seen["several documents"] += any(len({s.piece for s in sample}) > 2 for sample in samples)
        figures = ours.figures
        assert figures.samples == len(samples)
        assert figures.occupied == sum(slot.kind != "filling" for slot in slots)
        assert figures.slices == sum(slot.kind == "anchor" for slot in slots)
        assert figures.fewest_samples <= len(samples)
        seen["cut"] += figures.cut_documents > 0

    check()
    assert set(+seen) == {"concat", "best-fit", "filling", "tag", "several documents", "cut"}


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_ten_samples_of_public_text_equal_the_slow_packer(tmp_path: Path, packing: str) -> None:
    """Sources of Python's standard library, one byte a token, under all patterns."""
    files = sorted(Path(ast.__file__).parent.glob("[a-d]*.py"))
    assert len(files) > 20
    documents = [[[*path.read_bytes()[:4000], 256]] for path in files[:20]]
    case = {
        "documents": documents,
        "domains": None,
        "settings": {
            "sequence_length": 2048,
            "packing": packing,
            "document_alignment": 4,
            "random_seed": 3,
        },
    }
    expected = slow_samples(case)[:10]
    for pattern in planned_patterns():
        ours = build_case(case, str(tmp_path), attention_pattern=pattern)
        assert [plain(ours[number]) for number in range(10)] == [
            expected_fields(sample, sequence_length=2048, pad=PAD, pattern=pattern)
            for sample in expected
        ]


def test_the_loss_law_under_all_options() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=80)
    @given(packings(unique=True), st.booleans())
    def check(case: dict[str, Any], interleaved: bool) -> None:
        options = case["settings"]
        contents = [d[1:] if d[:1] == [ANCHOR] else d for d in flatten(case["documents"])]
        after = {a: b for content in contents for a, b in itertools.pairwise(content)}
        firsts = {content[0] for content in contents if content}
        interleaved &= options["attention_pattern"] != "intra-document-reset"
        with tempfile.TemporaryDirectory() as folder:
            chunks = {"interleave_max_chunks": 3, "interleave_min_chunk_length": 1}
            samples = list(build_case(case, folder, interleave_chunks=interleaved, **chunks))
        found = Counter(label for sample in samples for label in targets(sample))
        expected = Counter(t for content in contents for t in content)
        if not options["anchor_first_token_loss"]:
            expected -= Counter(firsts)
        assert found == expected
        text = Counter(t for sample in samples for t in sample["tokens"].tolist() if 9 < t < 50000)
        assert text == Counter(t for content in contents for t in content)
        for sample in samples:
            for token, label, counts in zip(
                *(sample[name].tolist() for name in ("tokens", "labels", "loss_mask")), strict=True
            ):
                assert (
                    not counts
                    or label == after.get(token)
                    or (label in firsts and (token == ANCHOR or token > 50000))
                )
        seen["interleaved"] += interleaved
        seen["without first tokens"] += not options["anchor_first_token_loss"]
        seen[options["packing"]] += len(samples) > 1

    check()
    assert set(+seen) == {"interleaved", "without first tokens", "concat", "best-fit"}


def test_best_fit_cuts_only_what_does_not_fit() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=30)
    @given(packings(unique=True))
    def check(case: dict[str, Any]) -> None:
        case["settings"]["packing"] = "best-fit"
        tags, length = tags_of(case), case["settings"]["sequence_length"]
        with tempfile.TemporaryDirectory() as folder:
            dataset = build_case(case, folder)
            slices = Counter(
                int(d) for i in range(len(dataset)) for d in dataset.slices(i).document
            )
        for number, document in enumerate(flatten(case["documents"])):
            content = len(document) - (document[:1] == [ANCHOR])
            most = length - 1 - len(tags[number])
            assert slices[number] == -(-content // most)
            seen["long" if content > most else "fits"] += 1

    check()
    assert seen["long"] > 2
    assert seen["fits"] > 20


def test_filling_changes_no_token_of_a_masked_sample() -> None:
    """Without its filling an aligned sample is what the same slices are without alignment."""
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=30)
    @given(packings().filter(lambda case: case["settings"]["attention_pattern"] != "full"))
    def check(case: dict[str, Any]) -> None:
        options = case["settings"]
        with tempfile.TemporaryDirectory() as folder:
            ours = list(build_case(case, folder))
        for sample, slots in zip(ours, slow_samples(case), strict=True):
            bare = [slot for slot in slots if slot.kind != "filling"]
            real = [n for n, slot in enumerate(slots) if slot.kind != "filling"]
            fields = expected_fields(
                bare,
                sequence_length=options["sequence_length"],
                pad=PAD,
                pattern=options["attention_pattern"],
                anchor_position=options["anchor_position"],
                first_token_loss=options["anchor_first_token_loss"],
            )
            for name in ("tokens", "labels", "loss_mask", "position_ids", "router_mask"):
                assert sample[name][real].tolist() == fields[name][: len(bare)]
            assert all(b % options["document_alignment"] == 0 for b in sample["cu_seqlens"])
            seen["filled"] += len(bare) < len(slots)

    check()
    assert seen["filled"] > 3


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_one_index_serves_all_ways_of_reading(tmp_path: Any, packing: str) -> None:
    prefix = write_corpus(tmp_path / "c", [[[10 * n, 10 * n + 1, 10 * n + 2]] for n in range(1, 9)])
    common = {"packing": packing, "path_to_cache": str(tmp_path / "cache")}
    for reading in (
        {},
        {"attention_pattern": "full"},
        {"interleave_chunks": True},
        {"anchor_position": 5},
        {"anchor_first_token_loss": False},
        {"mmap_bin_files": False},
    ):
        build_train(prefix, **common, **reading)
    assert len(list((tmp_path / "cache").glob("*train-epoch-0-description.json"))) == 1


@settings(deadline=None, max_examples=30)
@given(packings(), st.integers(1, 40))
@example(
    {
        "documents": [[[10, 11, 12]]] * 7,
        "domains": None,
        "settings": {"sequence_length": 8, "packing": "best-fit"},
    },
    30,
)
def test_whole_epochs_serve_as_many_samples_as_asked_for(case: dict, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(f"{folder}/c", case["documents"])
        if case["domains"] is not None:
            write_domains(prefix, case["domains"])
        dataset = build_train(prefix, number, **case["settings"])
        counts = Counter(
            token
            for index in range(len(dataset))
            for piece in zip(*dataset.slices(index), strict=True)
            for token in range(piece[1], piece[1] + piece[2])
        )
    assert len(dataset) >= number
    assert len(set(counts.values())) == 1
