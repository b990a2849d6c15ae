"""The cached index: reused when nothing changed, built again when anything did, written whole."""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets import blended_megatron_dataset_builder as builder_module
from megatron.core.datasets.blended_dataset import BlendedDataset as MegatronsBlendedDataset

from megatron_anchor import patches
from megatron_anchor.corpus.upsampling import make_document_list
from megatron_anchor.packing import epoch_planner as planner_module
from megatron_anchor.packing import epochs
from megatron_anchor.packing.blend import PATCH as BLENDS
from megatron_anchor.packing.cache import load_or_build
from tests.unit.packing_oracle import (
    build,
    build_train,
    make_config,
    plain,
    write_corpus,
    write_domains,
)

DOCUMENTS = [[[10 * n + k for k in range(n % 7 + 1)]] for n in range(1, 40)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "c", DOCUMENTS)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each sample index that is really built."""
    calls: list[int] = []

    def counted(*args: Any, **settings: Any) -> epochs.SamplePlan:
        calls.append(settings["sequence_length"])
        return epochs.plan_epochs(*args, **settings)

    monkeypatch.setattr(planner_module, "plan_epochs", counted)
    return calls


def contents(dataset: Any) -> list[dict]:
    return [plain(sample) for sample in dataset]


def test_a_second_run_reads_the_index_of_the_first(prefix: str, builds: list[int]) -> None:
    first, second = contents(build_train(prefix)), contents(build_train(prefix))
    assert first == second
    assert len(builds) == 1


def test_without_a_cache_path_the_index_lies_beside_the_corpus(prefix: str) -> None:
    build_train(prefix)
    folder = Path(prefix, "cache", "PackedDataset_indices")
    assert {path.suffix for path in folder.iterdir()} == {".npy", ".json"}


@pytest.mark.parametrize(
    "changed",
    [
        {"sequence_length": 9},
        {"random_seed": 5},
        {"anchor_token_id": 2},
        {"split": "1,1,0"},
        {"num_samples": 33},
        {"packing": "best-fit"},
        {"document_alignment": 4},
        {"domain_tags": True},
        {"domain_tags": True, "domain_tag_format": "{domain}"},
        {"document_lists": {"": "LIST"}},
    ],
)
def test_other_settings_have_an_index_of_their_own(
    prefix: str, builds: list[int], changed: dict[str, Any]
) -> None:
    write_domains(prefix, [0, 1, 2] * 13)
    if "document_lists" in changed:
        changed = {"document_lists": {"": write_list(prefix, [1, 1, 5, 7])}}
    before = contents(build_train(prefix))
    changed_once, changed_again = (contents(build_train(prefix, **changed)) for _ in range(2))
    assert before != changed_once == changed_again
    assert len(builds) == (3 if "split" in changed else 2)  # train, valid


def write_list(prefix: str, ids: list[int]) -> str:
    make_document_list(prefix, f"{prefix}.list.npy", overwrite=True)
    np.save(f"{prefix}.list.npy", np.array(ids, dtype=np.int64))
    described = json.loads(Path(f"{prefix}.list.json").read_text()) | {"documents": len(ids)}
    Path(f"{prefix}.list.json").write_text(json.dumps(described))
    return f"{prefix}.list.npy"


def test_other_domains_and_another_list_at_the_same_path_are_noticed(
    prefix: str, builds: list[int]
) -> None:
    """Same names, same sizes: only the contents differ."""
    settings: dict[str, Any] = {"domain_tags": True, "document_lists": {"": f"{prefix}.list.npy"}}
    found = []
    for domains, ids in (([0, 1, 2] * 13, [3, 4, 4]), ([1, 1, 2] * 13, [3, 4, 4]),
                         ([1, 1, 2] * 13, [3, 3, 4])):  # fmt: skip
        write_domains(prefix, domains)
        write_list(prefix, ids)
        found += [contents(build_train(prefix, **settings)) for _ in range(2)]
    assert found[0] == found[1] != found[2] == found[3] != found[4] == found[5]
    assert len(builds) == 3


def test_another_corpus_at_the_same_path_is_noticed(prefix: str, builds: list[int]) -> None:
    before = contents(build_train(prefix))
    changed = [[[token + 1 for token in document[0]]] for document in DOCUMENTS]
    times = [os.stat(f"{prefix}{suffix}").st_mtime_ns for suffix in (".bin", ".idx")]
    write_corpus(prefix, changed)  # same sizes
    for suffix, then in zip((".bin", ".idx"), times, strict=True):
        os.utime(f"{prefix}{suffix}", ns=(then, then))
    after = contents(build_train(prefix))
    assert len(builds) == 2
    assert [s["num_documents"] for s in before] == [s["num_documents"] for s in after]
    assert before != after


def test_a_copy_of_the_corpus_with_other_times_shares_the_index(
    prefix: str, builds: list[int]
) -> None:
    """As on nodes that hold copies of the corpus, and share the cache."""
    before = contents(build_train(prefix))
    for suffix in (".bin", ".idx"):
        os.utime(f"{prefix}{suffix}", ns=(1, 1))
    assert contents(build_train(prefix)) == before
    assert len(builds) == 1


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def reshape(path: Path) -> None:
    np.save(path, np.load(path)[:-1])


def retype(path: Path) -> None:
    np.save(path, np.load(path).astype(np.float64))


def flip_last_bit(path: Path) -> None:
    """Same shape and type, another number."""
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


def scribble(path: Path) -> None:
    path.write_bytes(b"{" + path.read_bytes())


DAMAGES = [truncate, empty, reshape, retype, flip_last_bit, scribble, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(
    "name", ["document_index", "sample_index", "shuffle_index", "figures", "own_anchors-own_anchor"]
)
def test_a_damaged_array_is_built_again_with_a_message(
    prefix: str, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    before = contents(build_train(prefix))
    [path] = Path(prefix).rglob(f"*{name}.npy")
    damage(path)
    with caplog.at_level(logging.WARNING):
        after = contents(build_train(prefix))
    assert before == after
    assert any("is damaged" in m and "building it again" in m for m in caplog.messages)
    caplog.clear()
    assert contents(build_train(prefix)) == before
    assert not caplog.messages


@pytest.mark.parametrize("damage", [truncate, empty, scribble])
def test_a_damaged_description_is_written_again_with_a_message(
    prefix: str, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    before = contents(build_train(prefix))
    [path] = Path(prefix).rglob("*train-epoch-0-description.json")
    written = json.loads(path.read_text())
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert contents(build_train(prefix)) == before
    assert any("is damaged" in message for message in caplog.messages)
    assert json.loads(path.read_text()) == written


def test_an_entry_that_describes_something_else_is_not_used(tmp_path: Path) -> None:
    def entry(value: int) -> np.ndarray:
        stored = load_or_build(
            tmp_path,
            "same-stem",
            names=("numbers",),
            description={"value": value},
            build=lambda: {"numbers": np.full(3, value)},
        )
        return np.array(stored["numbers"])

    assert entry(1).tolist() == [1, 1, 1]
    assert entry(2).tolist() == [2, 2, 2]


@pytest.mark.parametrize("damage", [truncate, empty, scribble, flip_last_bit, Path.unlink])
@pytest.mark.parametrize("name", ["dataset_index", "dataset_sample_index"])
def test_a_damaged_blend_is_built_again_with_a_message(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    patches.apply(BLENDS)
    cache = tmp_path / "cache"
    other = write_corpus(tmp_path / "d", DOCUMENTS[5:])
    config = make_config(([prefix, other], [0.5, 0.5]), path_to_cache=str(cache))

    def blend() -> list[dict]:
        return contents(build(config, [20, 0, 0])[0])

    before = blend()
    assert blend() == before
    assert not caplog.messages
    [path] = cache.glob(f"*-BlendedDataset-train-{name}.npy")
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert blend() == before
    assert any("is damaged" in message for message in caplog.messages)
    caplog.clear()
    assert blend() == before
    assert not caplog.messages


def test_a_blend_is_the_one_that_megatron_makes(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_corpus(tmp_path / "d", DOCUMENTS[5:])
    config = make_config(([prefix, other], [0.3, 0.7]), path_to_cache=str(tmp_path / "cache"))
    patches.apply(BLENDS)
    ours = build(config, [20, 0, 0])[0]
    monkeypatch.setattr(builder_module, "BlendedDataset", MegatronsBlendedDataset)
    config.path_to_cache = str(tmp_path / "theirs")
    theirs = build(config, [20, 0, 0])[0]
    assert type(theirs) is MegatronsBlendedDataset is not type(ours)
    assert ours.unique_description_hash == theirs.unique_description_hash
    for name in ("dataset_index", "dataset_sample_index"):
        ours_N, theirs_N = getattr(ours, name), getattr(theirs, name)
        assert ours_N.dtype == theirs_N.dtype
        assert ours_N.tolist() == theirs_N.tolist()


def test_a_failed_write_leaves_no_file(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"No space left on device.*--data-cache-path"):
        build_train(prefix, path_to_cache=str(cache))
    assert list(cache.iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_another_one_after_a_day(
    prefix: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    old, young = (cache / f".entry-numbers.npy.{digit * 32}.tmp" for digit in "ab")
    others = [cache / ".entry.tmp", cache / "entry.npy"]
    for path in (old, young, *others):
        path.write_bytes(b"half")
    day_before = time.time() - 25 * 3600
    for path in (old, *others):
        os.utime(path, (day_before, day_before))
    build_train(prefix, path_to_cache=str(cache))
    assert not old.exists()
    assert all(path.exists() for path in (young, *others)), "another job may be writing these"


def test_a_place_that_cannot_be_written_names_the_cache_path_flag(
    prefix: str, tmp_path: Path
) -> None:
    # A file where the directory should go: refused for every user, root included.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with pytest.raises(ValueError, match=r"cannot write the packing index to .*--data-cache-path"):
        build_train(prefix, path_to_cache=str(blocked / "cache"))
    shutil.copy(f"{prefix}.idx", prefix)  # the place beside the corpus is taken by a file
    with pytest.raises(ValueError, match="--data-cache-path"):
        build_train(prefix)
    assert len(build_train(prefix, path_to_cache=str(tmp_path / "elsewhere"))) > 0
