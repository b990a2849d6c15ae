"""What a changed blend means on resume, against counting the samples one by one."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_anchor import patches
from megatron_anchor.packing.blend import PATCH as BLENDS
from megatron_anchor.packing.blend import order_of_blend
from megatron_anchor.training.samples_read import FILE, Blend, _changes, note, read, write
from tests.unit.packing_oracle import build, build_train, make_config, write_corpus

DOCUMENTS = {
    name: [[[base + 10 * n, base + 10 * n + 1, base + 10 * n + 2]] for n in range(60)]
    for name, base in (("a", 100), ("b", 2000), ("c", 9000))
}


def arguments(folder: Path, read_so_far: int, **changed: Any) -> Namespace:
    settings = {"save": str(folder), "load": str(folder), "skip_train": False}
    return Namespace(**settings | {"consumed_train_samples": read_so_far} | changed)


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    patches.apply(BLENDS)
    return {name: write_corpus(tmp_path / name, corpus) for name, corpus in DOCUMENTS.items()}


def blend(corpora: dict[str, str], weights: dict[str, float], **settings: Any) -> Any:
    config = make_config(([corpora[n] for n in weights], [*weights.values()]), **settings)
    return build(config, [100, 0, 0])[0]


def test_an_extended_run_has_nothing_to_say(corpora: dict[str, str], tmp_path: Path) -> None:
    train = blend(corpora, {"a": 0.5, "b": 0.5})
    folder = tmp_path / "saved"
    assert note(train, arguments(folder, 0), needed=60) == []
    written = (folder / FILE).read_text()
    assert note(train, arguments(folder, 60), needed=100) == []
    assert (folder / FILE).read_text() == written
    assert [b.first for b in read(folder / FILE)] == [0]


def test_changed_weights_are_said_with_the_numbers(corpora: dict[str, str], tmp_path: Path) -> None:
    """0.5 to 0.3 of a after 35 samples: 18 of a were read, and it goes on at its sample 11."""
    folder = tmp_path / "saved"
    note(blend(corpora, {"a": 0.5, "b": 0.5}), arguments(folder, 0), needed=60)
    [said] = note(blend(corpora, {"a": 0.3, "b": 0.7}), arguments(folder, 35), needed=60)
    assert f"{corpora['a']} goes on at its sample 11: 7 samples that were read come again" in said
    assert f"{corpora['b']} goes on at its sample 24: 0 samples that were read come again" in said
    assert "7 earlier ones never come" in said
    assert "in the first 35 samples" in said
    assert f"weights 0.5 {corpora['a']} 0.5 {corpora['b']} before, 0.3 " in said
    assert "--finetune" in said
    again = note(blend(corpora, {"a": 0.3, "b": 0.7}), arguments(folder, 50), needed=60)
    assert again == [], "said once; the file knows both blends"
    assert [b.first for b in read(folder / FILE)] == [0, 35]


def test_a_change_before_any_sample_or_after_an_older_checkpoint_counts_what_was_read(
    corpora: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    first, second = (blend(corpora, {"a": w, "b": 1 - w}) for w in (0.5, 0.3))
    note(first, arguments(folder, 0), needed=60)
    assert note(second, arguments(folder, 0), needed=60) == []  # a new run in the same folder
    assert note(first, arguments(folder, 20), needed=60) != []
    assert note(second, arguments(folder, 12), needed=60) == []  # of an older checkpoint
    assert [b.first for b in read(folder / FILE)] == [0]


def test_other_corpora_and_settings(corpora: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    note(build_train(corpora["a"], 60), arguments(folder, 0), needed=60)
    [said] = note(blend(corpora, {"a": 0.5, "b": 0.5}), arguments(folder, 20), needed=60)
    assert f"{corpora['a']} goes on at its sample 10: 10 samples" in said
    assert f"{corpora['b']} goes on at its sample 10: 0 samples that were read" in said
    for other, words in (
        ({"sequence_length": 16}, "sequence_length 8 before, 16 now"),
        ({"packing": "best-fit"}, "packing concat before, best-fit now"),
    ):
        [said] = note(build_train(corpora["a"], 60, **other), arguments(folder, 20), needed=60)
        assert "none of the training data is that of the first 20 samples" in said
        assert words in said
    [said] = note(build_train(corpora["c"], 60), arguments(folder, 20), needed=60)
    assert "none of the training data" in said


def test_a_moved_corpus_is_the_same_data(corpora: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    note(build_train(corpora["a"], 60), arguments(folder, 0), needed=60)
    (tmp_path / "moved").mkdir()
    moved = write_corpus(tmp_path / "moved" / "other", DOCUMENTS["a"])
    assert note(build_train(moved, 90), arguments(folder, 20), needed=90) == []


def test_files_that_cannot_be_used_are_said_and_stop_nothing(
    corpora: dict[str, str], tmp_path: Path
) -> None:
    train = build_train(corpora["a"], 60)
    folder = tmp_path / "saved"
    folder.mkdir()
    for text in ("", "{", "[]", '{"blends": [{"first": 0}]}'):
        (folder / FILE).write_text(text)
        [said] = note(train, arguments(folder, 20), needed=60)
        assert f"{folder / FILE} cannot be read" in said
    (tmp_path / "file").write_text("")
    [said] = note(train, arguments(tmp_path / "file", 0), needed=60)
    assert "cannot be written" in said
    for quiet in ({"save": None, "load": None}, {"load": str(tmp_path / "new")}):
        assert note(train, arguments(folder, 20, **quiet), needed=60) == []
    for quiet in ({"skip_train": True}, {"phase_transition_iterations": [5]}):
        assert note(train, arguments(tmp_path / "none", 20, **quiet), needed=60) == []
    assert not (tmp_path / "none").exists()


def made_up(first: int, weights: dict[str, int]) -> Blend:
    total = sum(weights.values())
    return Blend(
        first=first,
        weights=tuple(weight / total for weight in weights.values()),
        paths=tuple(weights),
        corpora=tuple({"name": name} for name in weights),
    )


weights_strategy = st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1)


@settings(deadline=None, max_examples=200)
@given(st.lists(weights_strategy, min_size=2, max_size=4), st.lists(st.integers(1, 40), min_size=4))
def test_the_numbers_are_those_of_counting(blends: list[dict[str, int]], steps: list[int]) -> None:
    firsts = [sum(steps[:n]) for n in range(len(blends) + 1)]
    parts = [made_up(first, weights) for first, weights in zip(firsts, blends, strict=False)]
    *before, now = parts
    assume(set(now.paths) & {path for part in before for path in part.paths})

    def samples(part: Blend, last: int) -> list[tuple[str, int]]:
        corpus_N, sample_N = order_of_blend(list(part.weights), last)
        drawn = zip(corpus_N.tolist(), sample_N.tolist(), strict=True)
        return [(part.paths[corpus], sample) for corpus, sample in drawn][part.first :]

    done = {s for n, part in enumerate(before) for s in samples(part, firsts[n + 1])}
    later = samples(now, firsts[-1])
    again = Counter(path for path, sample in later if (path, sample) in done)
    skipped = order_of_blend(list(now.weights), now.first)
    never = Counter(
        now.paths[corpus]
        for corpus, sample in zip(*map(list, skipped), strict=True)
        if (now.paths[corpus], sample) not in done
    )
    said = "".join(_changes(before, now, needed=firsts[-1]))
    for path in now.paths:
        line = f"{again[path]} samples that were read come again, {never[path]} earlier ones never"
        assert (line in said) == bool(again[path] or never[path])
    assert bool(said) == bool(again or never)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    blends = [made_up(0, {"a": 1, "b": 2}), made_up(7, {"c": 1})]
    write(tmp_path / "new" / FILE, blends)
    assert read(tmp_path / "new" / FILE) == blends
    assert json.loads((tmp_path / "new" / FILE).read_text())["blends"][1]["first"] == 7
    assert read(tmp_path / "missing") == []
