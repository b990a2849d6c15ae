"""Corpora in an object store give the samples that they give from a disk."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_anchor.errors import UserError
from megatron_anchor.packing import object_storage
from megatron_anchor.training import object_storage_rules
from tests.fake_store import Store, installed
from tests.unit.packing_oracle import build_train, write_corpus


@pytest.fixture
def store(tmp_path):
    random = np.random.default_rng(0)
    texts = [[random.integers(10, 90, size=n).tolist()] for n in random.integers(0, 40, size=50)]
    (tmp_path / "store").mkdir()
    write_corpus(tmp_path / "store/corpus", texts)
    return Store(tmp_path / "store")


@pytest.mark.parametrize("prefix", ["s3://bucket/corpus", "msc://profile/corpus"])
def test_samples_are_those_of_the_files(store, tmp_path, monkeypatch, prefix):
    monkeypatch.setattr(object_storage, "PIECE", 64)
    settings = {"sequence_length": 16, "path_to_cache": str(tmp_path / "samples")}
    local = build_train(str(store.folder / "corpus"), 40, **settings)
    with installed(store):
        found = build_train(prefix, 40, object_storage_cache_path=str(tmp_path / "idx"), **settings)
        assert len(found) == len(local) > 20
        for mine, other in zip(found, local, strict=True):
            for name in mine.keys() - {"origin"}:
                assert (mine[name] == other[name]).all(), name
    assert {name for name, _ in store.requests} == {"corpus.bin"}
    largest = max(size for _, size in store.requests[1:])  # after the documents' first tokens
    assert largest < (store.folder / "corpus.bin").stat().st_size / 4, "read in pieces"


def test_another_index_is_another_corpus(store, tmp_path):
    def number():
        with installed(store):
            cache = str(tmp_path / "idx")
            dataset = build_train(
                "s3://bucket/corpus",
                object_storage_cache_path=cache,
                path_to_cache=str(tmp_path / "samples"),
            )
            return dataset.contents_hash

    first = number()
    assert number() == first
    write_corpus(store.folder / "corpus", [[[10, 11, 12]]] * 9)
    assert number() != first


def test_a_store_needs_a_folder_for_its_index():
    with pytest.raises(UserError, match="set --object-storage-cache-path"):
        object_storage.open_stored("s3://bucket/corpus", None)


def test_a_rank_that_does_not_see_the_copy_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "PATIENCE", 0.0)
    monkeypatch.setattr(object_storage.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(object_storage.dist, "get_rank", lambda: 3)
    with pytest.raises(UserError, match=r"rank 3 does not see .*corpus\.idx"):
        object_storage.open_stored("s3://bucket/corpus", str(tmp_path))


def namespace(**changed):
    lists = ("data_args_path", "per_split_data_args_path")
    splits = [f"{split}_data_path" for split in ("train", "valid", "test")]
    usual = dict.fromkeys([*lists, *splits])
    usual |= {"data_path": ["s3://bucket/corpus"], "domain_tags": False, "enable_msc": False}
    return SimpleNamespace(
        **(usual | {"object_storage_cache_path": "a", "data_cache_path": "b"} | changed)
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"object_storage_cache_path": None}, "set --object-storage-cache-path"),
        ({"data_cache_path": None}, "set --data-cache-path"),
        ({"domain_tags": True}, "--domain-tags: s3://bucket/corpus"),
        ({"data_path": ["0.5", "msc://p/c"]}, "msc://p/c is in an object store: pass --enable-msc"),
    ],
)
def test_what_is_missing_is_said_at_start(changed, reason, monkeypatch):
    monkeypatch.setattr(object_storage_rules.compat, "is_installed", lambda module: True)
    assert list(object_storage_rules.refusals(namespace())) == []
    [said] = object_storage_rules.refusals(namespace(**changed))
    assert reason in said
    assert list(object_storage_rules.refusals(namespace(**changed | {"data_path": ["c"]}))) == []


def test_boto3_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(object_storage_rules.compat, "is_installed", lambda module: False)
    [said] = object_storage_rules.refusals(namespace())
    assert said.endswith("pip install boto3")
