"""Corpora and evaluation give one text the same ids, whatever kind of tokenizer a folder has."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from megatron_anchor.corpus import (
    IndexedCorpus,
    PreprocessConfig,
    TokenizerConfig,
    preprocess,
)
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.tokens import PromptTokenizer
from tests.corpus_fixtures import (
    HOSTILE,
    sentencepiece_model,
    texts,
    tiktoken_ranks,
    tokenizer_json,
    write_jsonl,
)
from tests.evaluation_models import byte_tokenizer, trained_tokenizer

SPACED = [
    " x",
    "  x",
    "x ",
    "x  y",
    "\tx",
    "\nx",
    " \n x",
    "\u00a0x",
    "x\r\n\r\ny",
    "a\u00a0\u0301b",
]


def nasty() -> list[str]:
    draw = random.Random(4)
    words = [" ", "  ", "\n", "\t", "a", "Hello", "def f(x):", "</s>", "é", "你好", "123", "😀"]
    made = ["".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(300)]
    return [*HOSTILE, *SPACED, *texts()[:20], *(f" {text}" for text in texts()[:20]), *made]


def only_sentencepiece(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(sentencepiece_model(), folder / "tokenizer.model")
    return folder


def sentencepiece_without_bos(folder: Path) -> Path:
    only_sentencepiece(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return folder


def byte_level(folder: Path) -> Path:
    return Path(shutil.copytree(tokenizer_json().parent, folder))


def gpt2_files(folder: Path) -> Path:
    folder.mkdir()
    model = json.loads(tokenizer_json().read_text())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return folder


FOLDERS = {
    "sentencepiece": only_sentencepiece,
    "sentencepiece without bos": sentencepiece_without_bos,
    "byte-level": byte_level,
    "bytes": byte_tokenizer,
    "metaspace": trained_tokenizer,
    "GPT-2's files": gpt2_files,
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, tmp_path_factory) -> Path:
    return Path(FOLDERS[request.param](tmp_path_factory.mktemp("tokenizers") / "folder"))


def corpus_ids(tmp_path: Path, folder: Path, documents: list[str]) -> list[list[int]]:
    """The ids that preprocess_data.py writes, without what it sets around a text."""
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    tokenizer = TokenizerConfig(
        tokenizer_model=str(folder), tokenizer_hf_no_include_special_tokens=True
    )
    config = {"tokenizer": tokenizer, "workers": 1, "progress": False}
    preprocess(
        PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / "out"), **config)
    )
    corpus = IndexedCorpus.open(tmp_path / "out_text_document")
    return [corpus.document(number).tolist() for number in range(len(corpus))]


def test_corpus_and_evaluation_give_the_same_ids(folder, tmp_path):
    tokenizer = PromptTokenizer(folder)
    documents = [text for text in nasty() if tokenizer.encode_text(text)]
    assert len(documents) > 300
    assert corpus_ids(tmp_path, folder, documents) == list(map(tokenizer.encode_text, documents))
    assert tokenizer.counts(documents) == [len(tokenizer.encode_text(text)) for text in documents]


def test_what_is_fed_comes_back_without_control_tokens(folder):
    tokenizer = PromptTokenizer(folder)
    ends = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    for text in ("Hello, world", "x = 1", "123 and 456"):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode([*ends, *ids, *ends, 10**9]) == tokenizer.decode(ids) == text


def test_a_lone_sentencepiece_model_gives_sentencepiece_s_own_ids(tmp_path):
    from sentencepiece import SentencePieceProcessor

    tokenizer = PromptTokenizer(only_sentencepiece(tmp_path / "a"))
    library = SentencePieceProcessor(model_file=str(sentencepiece_model()))
    for text in nasty():
        assert tokenizer.encode_text(text) == library.encode(text), text
    assert tokenizer.first == [library.bos_id()]
    assert PromptTokenizer(sentencepiece_without_bos(tmp_path / "b")).first == []
    assert tokenizer.decode([1, *library.encode("a  b"), 2]) == "a  b"


def test_lm_eval_is_refused_a_tokenizer_that_transformers_reads_otherwise(tmp_path, monkeypatch):
    import transformers

    tokenizer = PromptTokenizer(byte_level(tmp_path / "a"))
    tokenizer.require_same_in_transformers()
    load = transformers.AutoTokenizer.from_pretrained

    def other(*args, **more):
        library = load(*args, **more)
        return lambda text, **flags: library(text.lstrip(), **flags)

    lone = only_sentencepiece(tmp_path / "b")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    (lone / "tokenizer_config.json").write_text(json.dumps(settings))
    library, ours = load(str(lone)), PromptTokenizer(lone)
    differ = any(
        library(text, add_special_tokens=False)["input_ids"] != ours.encode_text(text)
        for text in (" a", "a  b", " x")
    )
    if differ:  # as of transformers 5
        with pytest.raises(UserError, match="transformers, which lm-eval uses, gives"):
            ours.require_same_in_transformers()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", other)
    with pytest.raises(UserError, match=r"gives ' a' the ids .*take --engine hf, or name"):
        tokenizer.require_same_in_transformers()

    def fails(*args, **more):
        raise ValueError("no such class")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(UserError, match=r"does not load in transformers.*--engine hf"):
        tokenizer.require_same_in_transformers()


def test_lm_eval_is_refused_a_tokenizer_with_code_of_its_own(tmp_path):
    """Its tasks load the tokenizer with trust_remote_code."""
    folder = byte_level(tmp_path / "a")
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "evil.Fast"]}}
    path.write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('this code ran')\n")
    tokenizer = PromptTokenizer(folder)
    with pytest.raises(UserError, match="code of its own"):
        tokenizer.require_same_in_transformers()


def test_ranks_in_a_folder_need_no_conversion(tmp_path):
    (tmp_path / "ranks").mkdir()
    shutil.copy(tiktoken_ranks(), tmp_path / "ranks" / "tokenizer.model")
    with pytest.raises(UserError, match=r"cannot be used \(.*--tiktoken-pattern"):
        PromptTokenizer(tmp_path / "ranks")


@pytest.mark.parametrize(
    ("first", "what"),
    [("bos", "has no bos token"), ("99999", "the tokenizer has"), ("x", "expected auto, none")],
)
def test_a_first_token_that_is_not_there_is_refused(tmp_path, first, what):
    with pytest.raises(UserError, match=what):
        PromptTokenizer(gpt2_without_bos(tmp_path / "a"), first_token=first)


def gpt2_without_bos(folder: Path) -> Path:
    byte_level(folder)
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
    return folder
