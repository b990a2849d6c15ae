"""Merging: any number of corpora, checked, with offsets and domains that stay right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.corpus import (
    IndexedCorpus,
    PreprocessConfig,
    TokenizerConfig,
    preprocess,
    read_domains,
)
from megatron_anchor.corpus.cli_merge import expand
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import corpus_files, texts, write_jsonl
from tests.unit.test_corpus_indexed import make

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def build(tmp_path, name, documents, **config):
    source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
    settings = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    preprocess(
        PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / name), **settings)
    )
    return tmp_path / f"{name}_text_document"


def test_domains_are_united_by_name(tmp_path):
    parts = [
        build(tmp_path, "a", texts()[:3], domain=("web",)),
        build(tmp_path, "b", texts()[3:5], domain=("books",)),
        build(tmp_path, "c", texts()[5:6], domain=("web",)),
    ]
    manifest = merge_corpora(parts, tmp_path / "all", progress=False)
    names, ids = read_domains(tmp_path / "all")
    assert [names[i] for i in ids] == ["web"] * 3 + ["books"] * 2 + ["web"]
    assert manifest.documents == 6
    assert [d.documents for d in manifest.domains] == [4, 2]
    assert sum(d.tokens for d in manifest.domains) == manifest.tokens
    merged = IndexedCorpus.open(tmp_path / "all")
    whole = np.concatenate([IndexedCorpus.open(part).tokens for part in parts])
    np.testing.assert_array_equal(merged.tokens, whole)


def test_the_result_is_megatron_s_merge(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    parts = [
        make(tmp_path / "a", [[], [[1, 2]]]).prefix,  # an empty first document
        make(tmp_path / "b", []).prefix,
        make(tmp_path / "c", [[[3], [4, 5]], [[6]]]).prefix,
    ]
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        builder.add_index(str(part))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert merge_corpora(parts, tmp_path / "ours", progress=False) is None
    for ending in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{ending}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_offsets_beyond_2_to_32_survive_merging(tmp_path, monkeypatch):
    """Two corpora of 6 GB as holes; only the copying of their tokens is left out."""
    from megatron_anchor.corpus import merge
    from megatron_anchor.indexed.pair import write_index

    lengths = np.array([2**30, 2**29, 3], np.int32)
    for name in "ab":
        lengths.tofile(tmp_path / "l")
        np.array([1, 3], np.int64).tofile(tmp_path / "e")
        with open(tmp_path / f"{name}.bin", "wb") as stream:
            stream.truncate(4 * int(lengths.sum(dtype=np.int64)))
        write_index(
            tmp_path / f"{name}.idx",
            dtype=np.dtype(np.int32),
            lengths_file=tmp_path / "l",
            document_ends_file=tmp_path / "e",
        )

    class Hole:
        def read(self, size):
            return b""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    real = open
    monkeypatch.setattr(
        merge,
        "open",
        lambda path, mode: (
            Hole() if mode == "rb" and str(path).endswith(".bin") else real(path, mode)
        ),
        raising=False,
    )
    merge_corpora([tmp_path / "a", tmp_path / "b"], tmp_path / "all", progress=False)
    with real(tmp_path / "all.bin", "wb") as stream:
        stream.truncate(8 * int(lengths.sum(dtype=np.int64)))
    merged = IndexedCorpus.open(tmp_path / "all")
    assert merged.document_indices.tolist() == [0, 1, 3, 4, 6]
    starts = np.concatenate(([0], np.cumsum(np.tile(lengths, 2), dtype=np.int64)))
    assert merged.pointers.tolist() == (4 * starts[:-1]).tolist()
    assert int(merged.pointers[-1]) > 2**32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"append_eod": True}, "has eod_id"),
        (
            {"tokenizer": TokenizerConfig(tokenizer_type="ByteLevelTokenizer", eod_id=7)},
            "tokenizer fingerprint",
        ),
        (
            {"tokenizer": TokenizerConfig(tokenizer_type="ByteLevelTokenizer", vocab_size=70000)},
            "dtype",
        ),
    ],
)
def test_corpora_that_differ_are_refused(tmp_path, change, message):
    parts = [build(tmp_path, "a", ["x"]), build(tmp_path, "b", ["y"], **change)]
    with pytest.raises(UserError, match=message):
        merge_corpora(parts, tmp_path / "all", progress=False)
    assert not (tmp_path / "all.idx").exists()
    assert not (tmp_path / "all.merging").exists()


def test_wrong_calls_are_refused(tmp_path):
    part = build(tmp_path, "a", ["x", "y"])
    foreign = make(tmp_path / "foreign", [[[1]]]).prefix
    for parts, output, message in (
        ([], "all", "nothing to merge"),
        ([part], "a_text_document", "both an input and the output"),
        ([part, tmp_path / "none"], "all", "does not exist"),
        ([part, foreign], "all", "manifest.json is missing"),
    ):
        with pytest.raises(UserError, match=message):
            merge_corpora(parts, tmp_path / output, progress=False)
    merge_corpora([part], tmp_path / "all", progress=False)
    with pytest.raises(UserError, match="exists"):
        merge_corpora([part], tmp_path / "all", progress=False)
    other = build(tmp_path, "b", ["z", "u"])
    merge_corpora([part, other], tmp_path / "all", overwrite=True, progress=False)
    assert len(IndexedCorpus.open(tmp_path / "all")) == 4
    with open(tmp_path / "a_text_document.bin", "ab") as stream:
        stream.write(b"\x00\x00")
    with pytest.raises(UserError, match="holds 3 tokens, the index states 2"):
        merge_corpora([part], tmp_path / "again", progress=False)


def test_patterns_are_sorted_by_their_numbers(tmp_path):
    for number in (10, 9, 1):
        make(tmp_path / f"part{number}", [[[number]]])
    found = expand([str(tmp_path / "part*")])
    assert [path.rsplit("part")[-1] for path in found] == ["1", "9", "10"]
    with pytest.raises(UserError, match=r"no .idx file matches"):
        expand([str(tmp_path / "other*")])


def test_one_part_is_copied_as_it_is(tmp_path):
    part = build(tmp_path, "a", texts()[:4], domain=("d",))
    merge_corpora([part], tmp_path / "z_text_document", progress=False)
    ours = {k: v for k, v in corpus_files(tmp_path / "a").items() if k != ".jsonl"}
    assert corpus_files(tmp_path / "z") == ours


def shards(tmp_path, name="in", count=3, **config):
    """Finished shards of one run over a file, in order."""
    documents = [f"{name} {number} " + "x" * 30 for number in range(12)]
    source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
    prefixes = []
    for number in range(count):
        prefix = tmp_path / f"{name}_{number}_of_{count}"
        preprocess(
            PreprocessConfig(
                input=(str(source),),
                output_prefix=str(prefix),
                tokenizer=BYTES,
                shard=f"{number}/{count}",
                workers=1,
                progress=False,
                **config,
            )
        )
        prefixes.append(f"{prefix}_text_document")
    return prefixes


def test_shards_are_merged_in_their_order_whatever_the_order_given(tmp_path):
    first, second, third = shards(tmp_path)
    other = shards(tmp_path, "other", 2)
    single = build(tmp_path, "single", ["whole"])
    merge_corpora([first, second, third], tmp_path / "right", progress=False)
    merge_corpora([third, first, second], tmp_path / "mixed", progress=False)
    assert corpus_files(tmp_path / "mixed") == corpus_files(tmp_path / "right")
    given = [third, other[1], single, first, other[0], second]
    merge_corpora(given, tmp_path / "many", progress=False)
    right = [first, other[0], single, second, other[1], third]
    expected = np.concatenate([IndexedCorpus.open(part).tokens for part in right])
    np.testing.assert_array_equal(IndexedCorpus.open(tmp_path / "many").tokens, expected)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_missing_shards_are_refused_unless_that_is_wanted(tmp_path, absent):
    parts = shards(tmp_path)
    del parts[absent]
    with pytest.raises(UserError, match=f"{absent}/3 are not given.*--allow-missing-shards"):
        merge_corpora(parts, tmp_path / "all", progress=False)
    assert not (tmp_path / "all.idx").exists()
    manifest = merge_corpora(parts, tmp_path / "all", allow_missing_shards=True, progress=False)
    assert 0 < manifest.documents < 12
    assert "inputs" not in manifest.settings, "this is no run's corpus"


def test_a_shard_given_twice_is_refused(tmp_path):
    import shutil

    parts = shards(tmp_path)
    for ending in ("bin", "idx", "manifest.json", "domains.npy"):
        shutil.copy(f"{parts[1]}.{ending}", tmp_path / f"copy.{ending}")
    for doubled in (parts[1], tmp_path / "copy"):
        for allow in (False, True):
            with pytest.raises(UserError, match="are both shard 1/3"):
                merge_corpora(
                    [*parts, doubled],
                    tmp_path / "all",
                    allow_missing_shards=allow,
                    progress=False,
                )


@pytest.mark.parametrize("how", ["same", "relative", "link"])
def test_a_corpus_given_twice_is_refused(tmp_path, how):
    part = shards(tmp_path)[0]
    for ending in ("manifest.json",):
        Path(f"{part}.{ending}").unlink()  # made by another tool: no shard
    again = {"same": part, "relative": f"{tmp_path}/./{Path(part).name}"}.get(how)
    if again is None:
        again = tmp_path / "link"
        for ending in ("bin", "idx", "domains.npy"):
            Path(f"{again}.{ending}").symlink_to(f"{part}.{ending}")
    with pytest.raises(UserError, match=r"given twice.*documents would be doubled"):
        merge_corpora([part, again], tmp_path / "all", progress=False)


def _damage_domains(path):
    """Every way in which the domains of two documents can be wrong."""
    good = np.load(path)

    def raw(data):
        return lambda: path.write_bytes(data)

    def saved(array, **options):
        return lambda: np.save(path, array, **options)

    return {
        "missing": path.unlink,
        "empty": raw(b""),
        "garbage": raw(b"no numbers"),
        "cut short": raw(path.read_bytes()[:-3]),
        "pickled": saved(np.array([{}, []], dtype=object), allow_pickle=True),
        "floats": saved(good.astype(float)),
        "too few": saved(good[:1]),
        "too many": saved(np.append(good, 0)),
        "id above": saved(np.array([0, 99])),
        "id below": saved(np.array([-1, 0])),
    }


WRONG_DOMAINS = ["missing", "empty", "garbage", "cut short", "pickled", "floats"]
WRONG_DOMAINS += ["too few", "too many", "id above", "id below"]


@pytest.mark.parametrize("damage", WRONG_DOMAINS)
def test_wrong_domains_are_told_by_every_tool(tmp_path, damage):
    from megatron_anchor.corpus.inspection import inspect_corpus
    from megatron_anchor.corpus.upsampling import make_document_list

    part = build(tmp_path, "a", ["x", "yy"], domain=("web",))
    _damage_domains(tmp_path / "a_text_document.domains.npy")[damage]()
    [problem, *_] = inspect_corpus(part).problems
    assert "domains.npy" in problem
    with pytest.raises(UserError, match=r"domains.npy"):
        merge_corpora([part], tmp_path / "all", progress=False)
    with pytest.raises(UserError, match=r"domains.npy"):
        make_document_list(part, tmp_path / "list.npy")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(("all", "list"))]


def test_domains_that_fit_but_are_others_are_told_by_inspection(tmp_path):
    from megatron_anchor.corpus.inspection import inspect_corpus

    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a", "d": "one"}\n{"text": "bb", "d": "two"}\n')
    config = {"tokenizer": BYTES, "domain_key": "d", "workers": 1, "progress": False}
    preprocess(PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "c"), **config))
    part = tmp_path / "c_text_document"
    assert inspect_corpus(part).problems == ()
    np.save(f"{part}.domains.npy", np.array([1, 0], dtype=np.int32))
    first, second = inspect_corpus(part).problems
    assert "'one', the corpus holds 1 and 2" in first
    assert "'two', the corpus holds 1 and 1" in second


WRONG_INDICES = {
    "length": lambda c: c.lengths.__setitem__(1, 2**31 - 1),
    "negative length": lambda c: c.lengths.__setitem__(0, -5),
    "offset": lambda c: c.pointers.__setitem__(1, 2**40),
    "negative offset": lambda c: c.pointers.__setitem__(1, -2),
    "document": lambda c: c.document_indices.__setitem__(1, 77),
    "negative document": lambda c: c.document_indices.__setitem__(1, -1),
    "falling documents": lambda c: c.document_indices.__setitem__(slice(1, 3), (2, 1)),
    "last document": lambda c: c.document_indices.__setitem__(3, 2),
}


@pytest.mark.parametrize("damage", WRONG_INDICES)
def test_a_damaged_index_is_told_by_every_tool(tmp_path, damage, capsys):
    from dataclasses import replace

    from megatron_anchor.command_line import run
    from megatron_anchor.corpus import cli_inspect, cli_merge, cli_upsample

    corpus = make(tmp_path / "c", [[[1, 2]], [[3]], [[4, 5, 6]]])
    parts = ("lengths", "pointers", "document_indices")
    arrays = {name: np.array(getattr(corpus, name)) for name in parts}
    WRONG_INDICES[damage](replace(corpus, **arrays))
    index = tmp_path / "c.idx"
    head = index.read_bytes()[: -sum(array.nbytes for array in arrays.values())]
    index.write_bytes(head + b"".join(array.tobytes() for array in arrays.values()))
    prefix, out = str(tmp_path / "c"), str(tmp_path / "out")
    assert run(cli_inspect.main, [prefix]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert run(cli_merge.main, ["--input", prefix, "--output-prefix", out, "--no-progress"]) == 2
    assert "do not agree" in capsys.readouterr().err
    assert run(cli_upsample.main, [prefix, "--output", f"{out}.npy"]) == 2
    assert "do not agree" in capsys.readouterr().err
    for document in range(3):
        flags = [prefix, "--document", str(document), "--tokenizer-type", "ByteLevelTokenizer"]
        assert run(cli_inspect.main, flags) in (0, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]
