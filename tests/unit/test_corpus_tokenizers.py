"""Same ids as the tokenizer's own library, and text that stays text."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import TokenizerConfig, choose_engine, hub, load_tokenizer
from megatron_anchor.tokenizers.base import EngineRecipe
from tests.corpus_fixtures import (
    HOSTILE,
    SPECIALS,
    folder,
    sentencepiece_model,
    texts,
    tiktoken_ranks,
    tokenizer_json,
)

ORDINARY = [text for text in HOSTILE if not any(special in text for special in SPECIALS)]


def load(path: Path, **config):
    return load_tokenizer(TokenizerConfig(tokenizer_model=str(path), **config))


def encode(tokenizer, documents):
    return [row.tolist() for row in tokenizer.native_engine.encode_batch(list(documents))]


def test_hugging_face_ids_equal_the_library_on_ordinary_text():
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_json()))
    documents = [*ORDINARY, *texts(), "a wordish        b"]
    theirs = [e.ids for e in library.encode_batch(documents, add_special_tokens=False)]
    assert encode(load(tokenizer_json()), documents) == theirs
    added = {library.token_to_id("        "), library.token_to_id("wordish")}
    assert added <= set(theirs[-1]), "ordinary added tokens must match, or this test is vacuous"


def test_a_folder_gives_the_ids_of_auto_tokenizer():
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(tokenizer_json().parent)
    tokenizer = load(tokenizer_json().parent)
    assert encode(tokenizer, ORDINARY) == [library(text).input_ids for text in ORDINARY]
    assert tokenizer.eod_id == library.eos_token_id
    assert tokenizer.vocab_size == len(library)


def test_literal_special_strings_are_never_control_tokens():
    tokenizer = load(tokenizer_json())
    library = json.loads(tokenizer_json().read_text())
    ids = {t["content"]: t["id"] for t in library["added_tokens"]}
    control = {ids[s] for s in (*SPECIALS, "<think>")}
    assert tokenizer.control_ids == control
    documents = [f"{a}{b} x{b}" for a in ids for b in ids]
    produced = {id_ for row in encode(tokenizer, documents) for id_ in row}
    assert not produced & control
    engine = tokenizer.native_engine
    for text in HOSTILE[9], "<think>":
        assert engine.decode(engine.encode_batch([text])[0]) == text


def test_allow_special_in_text_gives_the_library_s_control_tokens():
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_json()))
    tokenizer = load(tokenizer_json(), allow_special_in_text=True)
    theirs = library.encode(HOSTILE[9]).ids
    assert library.token_to_id("</s>") in theirs
    assert encode(tokenizer, [HOSTILE[9]]) == [theirs]


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "BPE"])
def test_control_pieces_inside_the_model_s_vocabulary_cannot_be_spelled(kind):
    from tokenizers import Tokenizer, models

    if kind == "Unigram":
        pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
        pieces += [(c, -3.0) for c in "<>/sab "]
        model = models.Unigram(pieces, unk_id=0, byte_fallback=False)
    elif kind == "WordLevel":
        model = models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    else:
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: 3 + i for i, c in enumerate("<>/sab ")}}
        vocab |= {"<s": 20, "</": 21, "</s": 22}
        merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")]
        model = models.BPE(vocab, merges, unk_token="<unk>")
    library = Tokenizer(model)
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    library.add_tokens(["bab"])
    path = folder() / f"{kind}.json"
    library.save(str(path))
    tokenizer = load(path)
    produced = {i for row in encode(tokenizer, ["<s>", "</s>", "a<s>b </s>"]) for i in row}
    assert not produced & {1, 2}
    assert encode(tokenizer, ["ab a", "bab"]) == [
        library.encode(text).ids for text in ("ab a", "bab")
    ]
    assert tokenizer.native_engine.decode([1]) == "<s>"


def test_affixes_of_the_post_processor_are_found_and_can_be_left_out():
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    library = Tokenizer.from_file(str(tokenizer_json()))
    library.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    path = folder() / "affixes.json"
    library.save(str(path))
    tokenizer = load(path)
    assert (tokenizer.prefix, tokenizer.suffix) == ((0,), (1,))
    assert "no-include-special-tokens" in tokenizer.notes[0]
    bare = load(path, tokenizer_hf_no_include_special_tokens=True)
    assert (bare.prefix, bare.suffix, bare.notes) == ((), (), ())


def test_sentencepiece_ids_equal_the_library_and_control_pieces_stay_text():
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_file=str(sentencepiece_model()))
    tokenizer = load(sentencepiece_model())
    documents = [*HOSTILE, *texts()]
    ids = encode(tokenizer, documents)
    assert ids == [library.encode(text) for text in documents]
    assert not {id_ for row in ids for id_ in row} & tokenizer.control_ids
    assert (tokenizer.bos_id, tokenizer.eod_id) == (1, 2)
    assert tokenizer.native_engine.decode([1, *ids[0], 2]).startswith("<s>")


def test_tiktoken_ids_equal_the_library_and_special_strings_stay_text():
    import tiktoken

    from megatron_anchor.tokenizers.tiktoken_ranks import PATTERNS

    config = {"tiktoken_pattern": "cl100k", "tokenizer_special_tokens": ("<s>", "</s>")}
    tokenizer = load(tiktoken_ranks(), **config)
    ranks = tokenizer.native.arguments["ranks"]
    library = tiktoken.Encoding(
        "t", pat_str=PATTERNS["cl100k"], mergeable_ranks=ranks, special_tokens={}
    )
    documents = [*HOSTILE, *texts()]
    assert encode(tokenizer, documents) == [library.encode_ordinary(text) for text in documents]
    assert tokenizer.control_ids == {len(ranks), len(ranks) + 1}
    assert tokenizer.eod_id == len(ranks) + 1
    special = load(tiktoken_ranks(), allow_special_in_text=True, **config)
    assert len(ranks) + 1 in encode(special, ["a</s>"])[0]


def test_megatron_s_json_ranks_shift_by_the_special_tokens():
    ranks = load(tiktoken_ranks(), tiktoken_pattern="v2").native.arguments["ranks"]
    import base64

    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for piece, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    path = folder() / "megatron_ranks.json"
    path.write_text(json.dumps(rows))
    tokenizer = load(path, vocab_size=len(ranks) + 20, tiktoken_num_special_tokens=20)
    plain = load(tiktoken_ranks(), tiktoken_pattern="v2")
    shifted = [[id_ + 20 for id_ in row] for row in encode(plain, ORDINARY)]
    assert encode(tokenizer, ORDINARY) == shifted
    assert (tokenizer.eod_id, tokenizer.bos_id) == (2, 1)
    assert tokenizer.vocab_size == len(ranks) + 20


def test_gaps_in_the_vocabulary_do_not_make_ids_wrap_around():
    """The dtype follows the largest id, not the number of tokens."""
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    path = folder() / "gaps.json"
    library.save(str(path))
    tokenizer = load(path)
    assert tokenizer.vocab_size == 70_001
    assert encode(tokenizer, ["b"]) == [[70_000]]


def test_truncation_and_padding_of_the_file_are_off():
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_json()))
    expected = library.encode(texts()[0], add_special_tokens=False).ids
    library.enable_truncation(5)
    library.enable_padding(length=20_000)
    path = folder() / "truncates.json"
    library.save(str(path))
    assert encode(load(path), [texts()[0]]) == [expected]


def test_unknown_ranks_need_a_pattern():
    with pytest.raises(UserError, match="--tiktoken-pattern"):
        load(tiktoken_ranks())


def test_bytes_and_numbers():
    by_bytes = load_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    assert encode(by_bytes, HOSTILE) == [list(text.encode()) for text in HOSTILE]
    assert (by_bytes.eod_id, by_bytes.vocab_size) == (256, 257)
    numbers = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    assert encode(numbers, ["0 7 99", ""]) == [[0, 7, 99], []]
    assert numbers.eod_id == 99
    with pytest.raises(UserError, match="outside --vocab-size 100"):
        encode(numbers, ["100"])
    with pytest.raises(UserError, match="reads numbers"):
        encode(numbers, ["seven"])


def test_one_fingerprint_means_the_same_ids():
    def fingerprint(**config):
        tokenizer = load_tokenizer(TokenizerConfig(**config))
        return tokenizer.fingerprint()

    file = str(tokenizer_json())
    copy = folder() / "copy.json"
    copy.write_text(json.dumps(json.loads(tokenizer_json().read_text()), indent=3))
    assert fingerprint(tokenizer_model=file) == fingerprint(
        tokenizer_model=str(tokenizer_json().parent)
    )
    assert fingerprint(tokenizer_model=file) == fingerprint(tokenizer_model=str(copy))
    others = [
        {"tokenizer_model": file, "allow_special_in_text": True},
        {"tokenizer_model": file, "eod_id": 5},
        {"tokenizer_model": str(sentencepiece_model())},
        {"tokenizer_type": "ByteLevelTokenizer"},
    ]
    digests = {fingerprint(**config) for config in others} | {fingerprint(tokenizer_model=file)}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "give --tokenizer-model"),
        ({"tokenizer_model": "/no/such/folder"}, "no such file or folder"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/no.model"},
            "expected a file",
        ),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "--vocab-file"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
        ({"tokenizer_type": "ByteLevelTokenizer", "eod_id": 9999}, "outside the vocabulary"),
        (
            {"tokenizer_type": "ByteLevelTokenizer", "null_tokenizer_eod_id": 257},
            "--null-tokenizer-eod-id 257 is outside",
        ),
        ({"tokenizer_type": "BertWordPieceCase"}, "cannot prepare a GPT corpus"),
    ],
)
def test_wrong_tokenizer_arguments_name_the_remedy(config, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(TokenizerConfig(**config))


def test_files_that_are_no_tokenizers_are_refused():
    junk = folder() / "junk.model"
    junk.write_bytes(b"\x00\x01junk")
    with pytest.raises(UserError, match="is not a SentencePiece model"):
        load(junk)
    empty = folder() / "empty.json"
    empty.write_text("{}")
    with pytest.raises(UserError, match="no 'model' entry"):
        load(empty)
    broken = folder() / "broken.tiktoken"
    broken.write_bytes(b"aGk= 0\nnonsense\n")
    with pytest.raises(UserError, match=r"broken.tiktoken:2"):
        load(broken, tiktoken_pattern="gpt2")


DAMAGES = [None, 7, "x", [], {}, [1], [{}], {"x": 1}]


def _damaged(content):
    """The content with every value, two levels down, taken out or replaced by another type."""
    for key in content:
        yield {k: v for k, v in content.items() if k != key}
        for value in DAMAGES:
            yield {**content, key: value}
        if isinstance(content[key], dict):
            for inner in list(content[key])[:12]:
                for value in DAMAGES:
                    yield {**content, key: {**content[key], inner: value}}


def test_damaged_tokenizer_files_end_in_one_message():
    """Or they load all the same; never in a traceback."""
    bare = json.loads(tokenizer_json().read_text())
    bare["model"]["vocab"] = {c: i for i, c in enumerate(sorted({*"ab", *SPECIALS}))}
    bare["model"]["merges"] = []
    bare["added_tokens"] = bare["added_tokens"][:1]
    tekken = {
        "config": {"pattern": "gpt2", "default_num_special_tokens": 2, "default_vocab_size": 9},
        "vocab": [{"rank": 0, "token_bytes": "YQ=="}],
        "special_tokens": [{"token_str": "<s>"}, {"token_str": "</s>"}],
    }
    settings = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "add_bos_token": True}
    loaded = refused = 0
    for number, (name, content) in enumerate(
        (n, c)
        for n, made in (
            ("tokenizer.json", bare),
            ("tekken.json", tekken),
            ("tokenizer_config.json", settings),
        )
        for c in (made, *_damaged(made), *DAMAGES)
    ):
        path = folder() / "damaged" / str(number)
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text(json.dumps(bare))
        (path / name).write_text(json.dumps(content))
        chosen = path / ("tokenizer.json" if name == "tokenizer_config.json" else name)
        kind = "TikTokenizer" if name == "tekken.json" else None
        try:
            load(chosen, tokenizer_type=kind)
            loaded += 1
        except UserError:
            refused += 1
    assert loaded > 20
    assert refused > 60


class _Wrong:
    """An engine that is fast and wrong."""

    name = "wrong"

    def __init__(self, *, threads: int = 1, fails: bool = False) -> None:
        self._fails = fails

    def encode_batch(self, documents):
        if self._fails:
            raise RuntimeError("no such model")
        return [np.array([7]) for _ in documents]

    def decode(self, ids):
        return ""


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_with_other_ids_is_not_used(fails):
    from dataclasses import replace

    wrong = EngineRecipe("wrong", "tests.unit.test_corpus_tokenizers:_Wrong", {"fails": fails})
    tokenizer = replace(load(tokenizer_json()), fast=wrong)
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["some text"], threads=1)
    assert recipe.name == "tokenizers"
    assert "no such model" in why if fails else "gives other ids" in why
    with pytest.raises(UserError, match="--engine native"):
        choose_engine(tokenizer, wanted="gigatoken", sample=[], threads=1)


class _Noisy:
    """An engine that fails as one in Rust does: first words on file descriptor 2, then an error."""

    name = "noisy"

    def __init__(self, *, kind, threads):
        import os

        os.write(2, b"thread panicked at src/lib.rs\n")
        raise {
            "panic": BaseException("assertion failed\n  left: 3\n right: 2"),
            "import": ModuleNotFoundError("No module named 'awkward'", name="awkward"),
        }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("panic", r"\(assertion failed left: 3 right: 2\)"), ("import", "needs the package awkward")],
)
def test_an_engine_that_fails_is_named_in_one_line_and_says_nothing_itself(kind, reason, capfd):
    from dataclasses import replace

    noisy = EngineRecipe("noisy", "tests.unit.test_corpus_tokenizers:_Noisy", {"kind": kind})
    tokenizer = replace(load(tokenizer_json()), fast=noisy)
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=[], threads=1)
    assert recipe.name == "tokenizers"
    assert "\n" not in why
    assert re.search(reason, why)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "name",
    ["/no/such/dir", "./nope", "../nope", "~/nope", "a/b/c", "no/tokenizer.json", "a b", "x/"],
)
@pytest.mark.parametrize("kind", [None, "HuggingFaceTokenizer"])
def test_a_path_that_is_not_there_is_refused_without_asking_anybody(name, kind, monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=r"no such file or folder") as caught:
        load_tokenizer(TokenizerConfig(tokenizer_model=name, tokenizer_type=kind))
    assert name in str(caught.value)


def test_a_hub_name_without_a_network_ends_at_once_with_one_message(monkeypatch, capfd):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    with pytest.raises(UserError, match=r"no such folder.*the hub cannot be reached") as caught:
        load_tokenizer(TokenizerConfig(tokenizer_model="no-such-owner/no-such-model"))
    assert "\n" not in str(caught.value)
    assert "Retry" not in capfd.readouterr().err


def test_a_hub_that_cannot_be_reached_is_noticed_in_seconds(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.is_reachable.cache_clear()
    try:
        assert not hub.is_reachable()
    finally:
        hub.is_reachable.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken not installed")
def test_gigatoken_works_without_awkward(monkeypatch):
    monkeypatch.setitem(sys.modules, "awkward", None)
    tokenizer = load(tokenizer_json())
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=texts(), threads=1)
    assert recipe.name == "gigatoken", why


@pytest.mark.skipif(
    importlib.util.find_spec("gigatoken") is not None, reason="gigatoken is installed"
)
def test_gigatoken_is_refused_with_the_reason_where_it_is_not_installed():
    tokenizer = load(tokenizer_json())
    with pytest.raises(UserError, match="pip install gigatoken"):
        choose_engine(tokenizer, wanted="gigatoken", sample=[], threads=1)


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken not installed")
def test_gigatoken_gives_the_native_ids():
    tokenizer = load(tokenizer_json())
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=texts(), threads=2)
    assert recipe.name == "gigatoken", why
    engine, native = recipe.make(threads=2), tokenizer.native_engine
    for ours, theirs in zip(
        engine.encode_batch(HOSTILE), native.encode_batch(HOSTILE), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@given(st.lists(st.text(), max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_encoding_and_decoding(documents):
    tokenizer = _CACHE.setdefault("t", load(tokenizer_json()))
    engine = _CACHE.setdefault("e", tokenizer.native_engine)
    rows = engine.encode_batch(documents)
    assert [engine.decode(row) for row in rows] == documents
    assert not {int(i) for row in rows for i in row} & tokenizer.control_ids


_CACHE: dict = {}


@pytest.mark.skipif(
    importlib.util.find_spec("mistral_common") is None, reason="mistral-common not installed"
)
def test_a_real_32k_sentencepiece_model_and_a_real_tekken_file():
    import mistral_common
    from sentencepiece import SentencePieceProcessor

    data = Path(mistral_common.__file__).parent / "data"
    model = data / "tokenizer.model.v1"
    tokenizer = load(model)
    library = SentencePieceProcessor(model_file=str(model))
    assert encode(tokenizer, HOSTILE) == [library.encode(text) for text in HOSTILE]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eod_id) == (32000, 1, 2)


@pytest.mark.skipif(
    importlib.util.find_spec("mistral_common") is None, reason="mistral-common not installed"
)
def test_a_real_tekken_file_gives_mistral_common_s_ids():
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    tokenizer, library = load(path), Tekkenizer.from_file(path)
    ours = encode(tokenizer, HOSTILE)
    assert ours == [library.encode(text, bos=False, eos=False) for text in HOSTILE]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (library.n_words, library.eos_id)
