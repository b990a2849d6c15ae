"""From files to `.bin/.idx`: Megatron's bytes, every input format, every option."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.corpus import (
    IndexedCorpus,
    PreprocessConfig,
    TokenizerConfig,
    preprocess,
    read_domains,
    read_manifest,
)
from megatron_anchor.corpus.inspection import inspect_corpus
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.corpus.upsampling import make_document_list
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import (
    HOSTILE,
    copied,
    corpus_files,
    sentencepiece_model,
    texts,
    tiktoken_ranks,
    tokenizer_json,
    write_jsonl,
)

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
EOD = 256


def run(tmp_path: Path, *inputs: Path | str, name: str = "out", **config):
    config = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    return preprocess(
        PreprocessConfig(
            input=tuple(map(str, inputs)), output_prefix=str(tmp_path / name), **config
        )
    )


def documents_of(prefix: Path | str) -> list[str]:
    """The texts of a corpus of bytes."""
    corpus = IndexedCorpus.open(prefix)
    ids = [corpus.document(i) for i in range(len(corpus))]
    return [bytes(row[row < 256].astype(np.uint8)).decode() for row in ids]


def megatron_loop(prefix: Path, documents, tokenize, *, vocab_size: int, eod: int | None):
    """The loop of Megatron's slow tool, from its public parts; sentences where a list is given."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        ids, lengths = [], []
        for sentence in document if isinstance(document, list) else [document]:
            tokens = tokenize(sentence)
            if len(tokens) > 0:
                ids.extend(tokens)
                lengths.append(len(tokens))
        if ids and eod is not None:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


def hf_case():
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_json()))
    return tokenizer_json(), lambda t: library.encode(t).ids, library.get_vocab_size(), 1


def sp_case():
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_file=str(sentencepiece_model()))
    return sentencepiece_model(), library.encode_as_ids, library.get_piece_size(), 2


def test_the_bytes_are_those_of_megatron_s_slow_tool(tmp_path):
    """Hugging Face and SentencePiece, one worker and two, with and without eod."""
    clean = [text for text in (*texts(), *HOSTILE) if "</s>" not in text]
    source = write_jsonl(tmp_path / "in.jsonl", clean)
    for case, append, workers in ((hf_case, True, 2), (sp_case, True, 1), (hf_case, False, 1)):
        path, tokenize, size, eod = case()
        megatron_loop(
            tmp_path / "theirs", clean, tokenize, vocab_size=size, eod=eod if append else None
        )
        run(
            tmp_path,
            source,
            tokenizer=TokenizerConfig(tokenizer_model=str(path), engine="native"),
            append_eod=append,
            workers=workers,
            chunk_kb=8,
            overwrite=True,
        )
        for ending in ("bin", "idx"):
            ours = (tmp_path / f"out_text_document.{ending}").read_bytes()
            assert ours == (tmp_path / f"theirs.{ending}").read_bytes()


def test_lists_of_sentences_become_sequences_as_in_megatron(tmp_path):
    path, tokenize, size, eod = hf_case()
    documents = [["One.", "", "Two."], ["Three."], "four"]
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    megatron_loop(tmp_path / "theirs", documents, tokenize, vocab_size=size, eod=eod)
    run(
        tmp_path,
        source,
        tokenizer=TokenizerConfig(tokenizer_model=str(path), engine="native"),
        append_eod=True,
    )
    for ending in ("bin", "idx"):
        ours = (tmp_path / f"out_text_document.{ending}").read_bytes()
        assert ours == (tmp_path / f"theirs.{ending}").read_bytes()


def test_megatron_opens_the_corpus(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    run(tmp_path, write_jsonl(tmp_path / "in.jsonl", texts()), append_eod=True)
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert len(dataset) == len(texts())
    assert bytes(dataset[3][:-1].astype(np.uint8)).decode() == texts()[3]
    assert dataset[3][-1] == EOD


def _as_gzip(path: Path, lines: bytes) -> Path:
    path = path.with_suffix(".jsonl.gz")
    half = lines.index(b"\n", len(lines) // 2) + 1
    path.write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))  # two members
    return path


def _as_zstd(path: Path, lines: bytes) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path = path.with_suffix(".jsonl.zst")
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(lines[:99]) + compress(lines[99:]))  # two frames
    return path


def _as_array(path: Path, lines: bytes) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps([json.loads(line) for line in lines.splitlines()], indent=2))
    return path


def _as_json_lines(path: Path, lines: bytes) -> Path:
    path = path.with_suffix(".json")
    path.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\n"))  # BOM, CRLF, blank lines
    return path


def _as_parquet(path: Path, lines: bytes) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = path.with_suffix(".parquet")
    table = pa.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    pq.write_table(table, path, row_group_size=7)
    return path


def _as_saved_dataset(path: Path, lines: bytes) -> Path:
    from datasets import Dataset

    path = path.with_suffix("")
    Dataset.from_list([json.loads(line) for line in lines.splitlines()]).save_to_disk(path)
    return path


def _as_saved_splits(path: Path, lines: bytes) -> Path:
    from datasets import Dataset, DatasetDict

    rows = [json.loads(line) for line in lines.splitlines()]
    path = path.with_suffix("")
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}
    DatasetDict(splits).save_to_disk(path)
    return path


def _as_hub(path: Path, lines: bytes) -> str:
    folder = path.with_suffix("") / "hub"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(lines)
    return f"hf://{folder}"


@pytest.mark.parametrize(
    "convert",
    [
        _as_gzip,
        _as_zstd,
        _as_array,
        _as_json_lines,
        _as_parquet,
        _as_saved_dataset,
        _as_saved_splits,
        _as_hub,
    ],
)
def test_every_format_gives_the_same_corpus(tmp_path, convert):
    documents = [t for t in (*texts(30), *HOSTILE) if "\x00" not in t]
    plain = tmp_path / "in.jsonl"
    rows = [{"text": t, "meta": {"set": f"d{len(t) % 3}"}} for t in documents]
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, plain, domain_key="meta.set", append_eod=True)
    other = convert(tmp_path / "other", plain.read_bytes())
    run(tmp_path, other, name="other", domain_key="meta.set", append_eod=True, chunk_kb=4)
    ours, theirs = tmp_path / "out_text_document", tmp_path / "other_text_document"
    for ending in ("bin", "idx", "domains.npy"):
        assert Path(f"{ours}.{ending}").read_bytes() == Path(f"{theirs}.{ending}").read_bytes()
    assert documents_of(ours) == documents
    assert read_manifest(ours).domains == read_manifest(theirs).domains


def test_text_files_are_one_document_each_and_patterns_are_sorted(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number, text in enumerate(texts()[:12]):
        (folder / f"{number:02}.txt").write_bytes(text.encode())
    (folder / "notes.md").write_text("not a corpus")
    expected = [text for text in texts()[:12]]
    run(tmp_path, str(folder / "*.txt"), name="pattern")
    run(tmp_path, folder, name="folder")
    assert documents_of(tmp_path / "pattern_text_document") == expected
    assert documents_of(tmp_path / "folder_text_document") == expected


def test_one_json_object_is_one_document(tmp_path):
    source = tmp_path / "one.json"
    source.write_text(json.dumps({"text": "hello", "n": [1, {"a": None}]}, indent=1))
    run(tmp_path, source)
    assert documents_of(tmp_path / "out_text_document") == ["hello"]


def test_several_keys_make_several_finished_corpora(tmp_path):
    source = tmp_path / "in.jsonl"
    rows = [{"title": f"t{i}", "body": {"text": "x" * i}} for i in range(5)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(tmp_path, source, json_keys=("title", "body.text"))
    assert documents_of(tmp_path / "out_title_document") == [f"t{i}" for i in range(5)]
    assert documents_of(tmp_path / "out_body.text_document") == ["x" * i for i in range(5)]
    assert (summary.empty_documents, summary.empty_kept) == ([0, 0], [0, 1])
    assert not (tmp_path / "out.partial").exists()


CELLS = st.one_of(
    st.sampled_from(["", "a", "bc"]), st.lists(st.sampled_from(["", "d"]), max_size=3)
)


@given(st.lists(st.fixed_dictionaries({"text": CELLS, "title": CELLS, "more": CELLS}), max_size=9))
@settings(max_examples=25, deadline=None)
def test_rows_stay_paired_under_all_keys_and_are_those_of_megatron(tmp_path_factory, rows):
    keys = ("text", "title", "more")
    folder = tmp_path_factory.mktemp("keys")
    kept = [row for row in rows if any("".join(row[key]) for key in keys)]
    if not all(any("".join(row[key]) for row in rows) for key in keys):
        return  # a corpus without any token is an error
    source = folder / "in.jsonl"
    lines = [json.dumps({**row, "d": f"d{n % 2}"}) for n, row in enumerate(rows)]
    source.write_text("".join(line + "\n" for line in lines))
    summary = run(
        folder, source, json_keys=keys, append_eod=True, domain_key="d", chunk_kb=1, tokenizer=BYTES
    )
    assert summary.documents == [len(kept)] * 3
    assert summary.empty_documents == [len(rows) - len(kept)] * 3
    for key in keys:
        prefix = folder / f"out_{key}_document"
        documents = [row[key] for row in kept]
        megatron_loop(
            folder / "theirs", documents, lambda t: list(t.encode()), vocab_size=257, eod=EOD
        )
        for ending in ("bin", "idx"):
            ours = Path(f"{prefix}.{ending}").read_bytes()
            assert ours == (folder / f"theirs.{ending}").read_bytes()
        assert inspect_corpus(prefix).problems == ()
        empty = sum(not "".join(cell) for cell in documents)
        assert read_manifest(prefix).empty_kept == empty
        merge_corpora([prefix, copied(prefix)], folder / "twice", overwrite=True, progress=False)
        assert inspect_corpus(folder / "twice").problems == ()
        listed = make_document_list(prefix, folder / "list.npy", overwrite=True)
        assert listed.tokens > 0
        ids = np.load(folder / "list.npy")
        assert all(len(IndexedCorpus.open(prefix).document(int(i))) for i in ids)


def test_documents_that_lost_their_tokens_are_told(tmp_path):
    source = tmp_path / "in.jsonl"
    rows = [{"text": "a", "title": "t"}, {"text": "b", "title": ""}, {"text": "c", "title": "u"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, source, json_keys=("text", "title"), append_eod=True)
    path = tmp_path / "out_title_document.manifest.json"
    path.write_text(path.read_text().replace('"empty_kept": 1', '"empty_kept": 2'))
    [problem] = inspect_corpus(tmp_path / "out_title_document").problems
    assert problem == "1 documents without tokens (the manifest states 2), at 1"
    source.write_text('{"text": "a", "more": ""}\n')
    with pytest.raises(UserError, match="no document was written for 'more'"):
        run(tmp_path, source, json_keys=("text", "more"), name="none")


def test_domains_by_key_by_input_and_by_fallback(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", ["a", "b"])
    two = tmp_path / "two.jsonl"
    two.write_text('{"text": "c", "m": {"s": "web"}}\n{"text": "d"}\n{"text": "e", "m": 3}\n')
    run(tmp_path, one, two, name="each", domain=("books", "rest"))
    names, ids = read_domains(tmp_path / "each_text_document")
    assert [names[i] for i in ids] == ["books"] * 2 + ["rest"] * 3
    run(tmp_path, one, two, name="key", domain=("books", "rest"), domain_key="m.s")
    names, ids = read_domains(tmp_path / "key_text_document")
    assert [names[i] for i in ids] == ["books", "books", "web", "rest", "rest"]
    counts = read_manifest(tmp_path / "key_text_document").domains
    assert [(d.name, d.documents, d.tokens) for d in counts] == [
        ("books", 2, 2),
        ("web", 1, 1),
        ("rest", 2, 2),
    ]
    with pytest.raises(UserError, match=r"two.jsonl:2.*--domain NAME gives a fallback"):
        run(tmp_path, two, name="none", domain_key="m.s")
    with pytest.raises(UserError, match="--domain has 3 names for 2"):
        run(tmp_path, one, two, name="three", domain=("a", "b", "c"))


def test_anchor_context_s_rows_become_documents(tmp_path):
    source = tmp_path / "packed.jsonl"
    row = {
        "input_ids": [1, 5, 6, 256, 1, 7, 8],
        "labels": 9,
        "source": [
            {"source": "RedPajamaC4", "start": 0, "end": 4},
            {"source": "RedPajamaArXiv", "start": 4, "end": 7},
        ],
    }
    source.write_text(json.dumps(row) + "\n" + json.dumps({"input_ids": [3, 4]}) + "\n")
    summary = run(tmp_path, source, json_keys=("input_ids",), pretokenized=True, append_eod=True)
    prefix = tmp_path / "out_input_ids_document"
    corpus = IndexedCorpus.open(prefix)
    found = [corpus.document(i).tolist() for i in range(len(corpus))]
    assert found == [[1, 5, 6, 256], [1, 7, 8, 256], [3, 4, 256]]
    names, ids = read_domains(prefix)
    assert [names[i] for i in ids] == ["RedPajamaC4", "RedPajamaArXiv", "default"]
    assert summary.rows_read == 2


def test_manifest_says_what_the_corpus_is(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["one", "", "three"])
    run(tmp_path, source, append_eod=True)
    manifest = read_manifest(tmp_path / "out_text_document")
    assert (manifest.documents, manifest.tokens, manifest.rows_read) == (2, 10, 3)
    assert (manifest.empty_documents, manifest.eod_id, manifest.dtype) == (1, EOD, "uint16")
    assert manifest.sources == [{"path": str(source), "bytes": source.stat().st_size, "rows": 3}]
    assert manifest.tokenizer["kind"] == "bytes"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk_kb", [1, 64])
def test_workers_and_chunks_do_not_change_a_byte(tmp_path, workers, chunk_kb):
    rows = [{"text": t, "d": f"d{i % 5}"} for i, t in enumerate(texts())]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"domain_key": "d", "append_eod": True}
    run(tmp_path, source, name="a", **config)
    run(tmp_path, source, name="b", workers=workers, chunk_kb=chunk_kb, **config)
    assert corpus_files(tmp_path / "a") == corpus_files(tmp_path / "b")


def test_tiktoken_corpus_with_large_vocabulary_is_int32(tmp_path):
    tokenizer = TokenizerConfig(
        tokenizer_model=str(tiktoken_ranks()),
        tiktoken_pattern="gpt2",
        tokenizer_special_tokens=("</s>",),
        engine="native",
    )
    run(tmp_path, write_jsonl(tmp_path / "in.jsonl", texts()[:3]), tokenizer=tokenizer)
    assert IndexedCorpus.open(tmp_path / "out_text_document").dtype == np.uint16
    big = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=65500)
    run(tmp_path, write_jsonl(tmp_path / "n.jsonl", ["1 2"]), name="n", tokenizer=big)
    assert IndexedCorpus.open(tmp_path / "n_text_document").dtype == np.int32


def test_affixes_stand_around_every_text(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    library = Tokenizer.from_file(str(tokenizer_json()))
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    source = write_jsonl(tmp_path / "in.jsonl", ["abc", "", "de"])
    tokenizer = TokenizerConfig(tokenizer_model=str(path), engine="native", eod_token="</s>")
    run(tmp_path, source, tokenizer=tokenizer, append_eod=True)
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == [
        [*library.encode(text).ids, 1] for text in ("abc", "de")
    ]


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_shards_together_read_every_row_once(tmp_path, count):
    """Also with more shards than rows: an empty shard is a corpus that merges."""
    from megatron_anchor.corpus.merge import merge_corpora

    first = write_jsonl(tmp_path / "a.jsonl", texts()[:9], d="x")
    second = _as_parquet(
        tmp_path / "b", write_jsonl(tmp_path / "t", texts()[9:14], d="y").read_bytes()
    )
    third = _as_gzip(
        tmp_path / "c", write_jsonl(tmp_path / "t", texts()[14:16], d="x").read_bytes()
    )
    inputs = (first, second, third)
    config = {"domain_key": "d", "append_eod": True}
    run(tmp_path, *inputs, name="whole", **config)
    for shard in range(count):
        run(tmp_path, *inputs, name=f"part{shard}", shard=f"{shard}/{count}", **config)
    merge_corpora(
        [tmp_path / f"part{shard}_text_document" for shard in range(count)],
        tmp_path / "merged_text_document",
        progress=False,
    )
    assert corpus_files(tmp_path / "merged") == corpus_files(tmp_path / "whole")
