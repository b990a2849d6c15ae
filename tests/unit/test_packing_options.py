"""Every option of packing at once, against the slow packers and against the laws."""

import ast
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_anchor.packing.dataset import PackedDataset
from megatron_anchor.packing.interleave import Interleaving
from megatron_anchor.packing.patterns import ANCHORED, ATTENTION_PATTERNS, PLANNED_PATTERNS
from tests.unit.packing_oracle import (
    ANCHOR,
    DOMAINS,
    PAD,
    build_train,
    corpora,
    expected_fields,
    flatten,
    pack,
    plain,
    spell,
    targets,
    write_corpus,
    write_domains,
)

TAG_OF_DOMAIN = [spell(f"{name}:")[1:] if name != "unknown" else [] for name in DOMAINS]


@st.composite
def packings(draw: st.DrawFn, *, unique: bool = False) -> dict[str, Any]:
    """A corpus and all settings that say which token stands where."""
    sequence_length, documents = draw(corpora(unique=unique))
    alignment = draw(st.sampled_from([1, 1, 2, 3, 4]))
    tagged = draw(st.booleans())
    if tagged:
        sequence_length = max(sequence_length, 5)
    domains = [draw(st.sampled_from(range(len(DOMAINS)))) for _ in documents] if tagged else None
    control = "anchor-masked"  # its anchors are segments of one slot
    patterns = [p for p in ATTENTION_PATTERNS if alignment == 1 or p != control]
    pattern = draw(st.sampled_from(patterns))
    return {
        "documents": documents,
        "domains": domains,
        "settings": {
            "sequence_length": sequence_length * alignment,
            "packing": draw(st.sampled_from(["concat", "best-fit"])),
            "document_alignment": alignment,
            "attention_pattern": pattern,
            "anchor_position": draw(st.sampled_from([0, 0, 3])) if pattern in ANCHORED else 0,
            "first_token_loss": draw(st.booleans()),
            "domain_tags": tagged,
            "domain_tag_format": "{domain}:",
            "random_seed": draw(st.integers(0, 9)),
        },
    }


def build(case: dict[str, Any], folder: str, **changed: Any) -> PackedDataset:
    prefix = write_corpus(f"{folder}/c", case["documents"])
    if case["domains"] is not None:
        write_domains(prefix, case["domains"])
    return build_train(prefix, **(case["settings"] | changed))


def tags_of(case: dict[str, Any]) -> list[list[int]]:
    if case["domains"] is None:
        return [[]] * len(case["documents"])
    return [TAG_OF_DOMAIN[domain] for domain in case["domains"]]


def slow_samples(case: dict[str, Any]) -> list:
    """What the dataset must serve, in its order: the slow packer behind Megatron's shuffles."""
    options, documents = case["settings"], flatten(case["documents"])
    random_state = np.random.RandomState(options["random_seed"])
    order = np.arange(len(documents))
    random_state.shuffle(order)
    tags = tags_of(case)
    samples = pack(
        [documents[n] for n in order],
        anchor=ANCHOR,
        sequence_length=options["sequence_length"],
        packing=options["packing"],
        alignment=options["document_alignment"],
        tags=[tags[n] for n in order],
    )
    numbers = np.arange(len(samples))
    random_state.shuffle(numbers)
    return [samples[n] for n in numbers]


def test_every_sample_equals_the_slow_packer_under_all_options() -> None:
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=60)
    @given(packings())
    def check(case: dict[str, Any]) -> None:
        options = case["settings"]
        samples = slow_samples(case)
        with tempfile.TemporaryDirectory() as folder:
            ours = build(case, folder)
            assert [plain(sample) for sample in ours] == [
                expected_fields(
                    sample,
                    sequence_length=options["sequence_length"],
                    pad=PAD,
                    pattern=options["attention_pattern"],
                    anchor_position=options["anchor_position"],
                    first_token_loss=options["first_token_loss"],
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
    for pattern in PLANNED_PATTERNS:
        ours = build(case, str(tmp_path), attention_pattern=pattern)
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
            interleaving = Interleaving(max_chunks=3, min_chunk_length=1) if interleaved else None
            samples = list(build(case, folder, interleaving=interleaving))
        found = Counter(label for sample in samples for label in targets(sample))
        expected = Counter(t for content in contents for t in content)
        if not options["first_token_loss"]:
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
        seen["without first tokens"] += not options["first_token_loss"]
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
            dataset = build(case, folder)
            slices = Counter(
                int(d) for i in range(len(dataset)) for d in dataset.pieces(i).document
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
            ours = list(build(case, folder))
        for sample, slots in zip(ours, slow_samples(case), strict=True):
            bare = [slot for slot in slots if slot.kind != "filling"]
            real = [n for n, slot in enumerate(slots) if slot.kind != "filling"]
            fields = expected_fields(
                bare,
                sequence_length=options["sequence_length"],
                pad=PAD,
                pattern=options["attention_pattern"],
                anchor_position=options["anchor_position"],
                first_token_loss=options["first_token_loss"],
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
        {"interleaving": Interleaving()},
        {"anchor_position": 5},
        {"first_token_loss": False},
        {"mmap_bin_files": False},
    ):
        build_train(prefix, **common, **reading)
    assert len(list((tmp_path / "cache").glob("*train-description.json"))) == 1


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
            for piece in zip(*dataset.pieces(index), strict=True)
            for token in range(piece[1], piece[1] + piece[2])
        )
    assert len(dataset) >= number
    assert len(set(counts.values())) == 1
