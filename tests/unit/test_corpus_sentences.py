"""Sentence splitting: nltk's own sentences, nothing lost, a clear word where data is missing."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from megatron_anchor.corpus import IndexedCorpus, PreprocessConfig, TokenizerConfig, preprocess
from megatron_anchor.corpus.sentences import SplitterConfig, make_splitter, model_digest
from megatron_anchor.errors import UserError

PROSE = (
    "Dr. Smith went to Washington. He met Mr. Jones there.\n\n"
    "They talked of many things: of shoes, etc. and ships! Was it late? It was.\n"
    '"Yes," said the other. The end.'
)


@pytest.fixture(scope="module")
def punkt(tmp_path_factory) -> Path:
    """A Punkt model in nltk's file format, trained here."""
    from nltk.tabdata import TabEncoder
    from nltk.tokenize.punkt import PunktTrainer

    text = "Dr. Smith met Mr. Jones. Dr. Brown saw Mr. White. It was etc. and so on. " * 50
    trainer = PunktTrainer()
    trainer.train(text, finalize=True)
    parameters, encoder = trainer.get_params(), TabEncoder()
    folder = tmp_path_factory.mktemp("nltk") / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in (
        ("collocations.tab", encoder.tups2tab(parameters.collocations)),
        ("sent_starters.txt", encoder.set2txt(parameters.sent_starters)),
        ("abbrev_types.txt", encoder.set2txt(parameters.abbrev_types)),
        ("ortho_context.tab", encoder.ivdict2tab(parameters.ortho_context)),
    ):
        (folder / name).write_text(content, encoding="utf-8")
    return folder.parent


def test_sentences_are_those_of_nltk(punkt, monkeypatch):
    from nltk.tokenize.punkt import PunktTokenizer

    monkeypatch.setattr("nltk.data.path", [str(punkt.parent.parent)])
    library = PunktTokenizer("english")
    split = make_splitter(SplitterConfig(punkt_path=str(punkt)))
    assert split(PROSE) == library.tokenize(PROSE)
    assert make_splitter(SplitterConfig())(PROSE) == library.tokenize(PROSE)
    assert "Dr. Smith went to Washington." in split(PROSE)


def test_newlines_are_kept_on_wish(punkt):
    split = make_splitter(SplitterConfig(punkt_path=str(punkt), keep_newlines=True))
    sentences = split(PROSE)
    assert "".join(sentences) == PROSE
    assert any(sentence.endswith("\n\n") for sentence in sentences)


def test_long_texts_lose_nothing(punkt, monkeypatch):
    monkeypatch.setattr("megatron_anchor.corpus.sentences._PIECE", 1000)
    split = make_splitter(SplitterConfig(punkt_path=str(punkt), keep_newlines=True))
    text = "\n".join([PROSE] * 40)
    assert "".join(split(text)) == text


@pytest.mark.parametrize("form", ["language folder", "zip"])
def test_the_model_may_lie_anywhere(punkt, tmp_path, form):
    if form == "zip":
        path = tmp_path / "punkt_tab.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in punkt.rglob("*.*"):
                archive.write(file, f"punkt_tab/{file.relative_to(punkt)}")
    else:
        path = punkt / "english"
    split = make_splitter(SplitterConfig(punkt_path=str(path)))
    assert split(PROSE) == make_splitter(SplitterConfig(punkt_path=str(punkt)))(PROSE)


def test_models_are_told_apart_by_what_they_hold(punkt, tmp_path):
    other = shutil.copytree(punkt, tmp_path / "other")
    same = model_digest(SplitterConfig(punkt_path=str(punkt)))
    assert model_digest(SplitterConfig(punkt_path=str(other))) == same
    with open(other / "english" / "abbrev_types.txt", "a") as stream:
        stream.write("\nprof")
    assert model_digest(SplitterConfig(punkt_path=str(other))) != same


def test_a_missing_model_is_told_with_the_remedy(punkt, tmp_path, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"nltk.downloader punkt_tab.*--punkt-path"):
        make_splitter(SplitterConfig())
    with pytest.raises(UserError, match="no Punkt model for --lang german"):
        make_splitter(SplitterConfig(language="german", punkt_path=str(punkt)))
    with pytest.raises(UserError, match="no Punkt model"):
        make_splitter(SplitterConfig(punkt_path=str(tmp_path)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_has_its_sentences_as_sequences(punkt, tmp_path, workers):
    source = tmp_path / "in.jsonl"
    documents = [PROSE, "", "One. Two. Three."]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = PreprocessConfig(
        input=(str(source),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=TokenizerConfig(tokenizer_type="ByteLevelTokenizer"),
        split_sentences=True,
        append_eod=True,
        punkt_path=str(punkt),
        workers=workers,
        progress=False,
    )
    preprocess(config)
    corpus = IndexedCorpus.open(tmp_path / "out_text_sentence")
    split = make_splitter(SplitterConfig(punkt_path=str(punkt)))
    sequences = [list(s.encode()) for text in documents for s in split(text)]
    sequences[len(split(PROSE)) - 1].append(256)
    sequences[-1].append(256)
    assert len(corpus) == 2
    assert corpus.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert corpus.tokens.tolist() == [token for s in sequences for token in s]
