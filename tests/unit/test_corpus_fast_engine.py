"""gigatoken is used where its ids are known to be those of the tokenizer's own library."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import random

import numpy as np
import pytest

from megatron_anchor.corpus import TokenizerConfig, load_tokenizer
from megatron_anchor.errors import UserError
from megatron_anchor.tokenizers import choose_engine
from megatron_anchor.tokenizers.base import EngineRecipe
from megatron_anchor.tokenizers.byte_level import TextProof, unproven
from megatron_anchor.tokenizers.tiktoken_ranks import PATTERNS
from tests.corpus_fixtures import HOSTILE, folder

gigatoken = pytest.importorskip("gigatoken")

LETTERS = [
    *"aAsl1\n\r\t ./'",
    "\u00a0",
    "\u3000",
    "\u0301",
    "你",
    "\u017f",
    "\u0345",
    "٣",
    "\x00",
    "😀",
]
CONTEXTS = ("a{}b", "1{}1", "'{}.", " {} ", "\n{}\n")
KNOWN = ("gpt2", "llama3", "qwen2", "o200k", "qwen35", "v2")
"""Patterns that gigatoken has, of those in a tokenizer.json."""


@functools.cache
def nasty(length: int = 3, count: int = 8_000) -> tuple[str, ...]:
    """All short strings over letters that split patterns tell apart, and longer random ones."""
    short = ("".join(p) for n in range(length + 1) for p in itertools.product(LETTERS, repeat=n))
    draw = random.Random(0)
    long = ("".join(draw.choices(LETTERS, k=draw.randint(4, 14))) for _ in range(count))
    return (*HOSTILE, *short, *long, "a\u00a0\u0301b")


@functools.cache
def characters(step: int) -> tuple[str, ...]:
    """Every so many characters of Unicode, each where a split before and behind it shows."""
    codes = [c for c in range(0x80, 0x110000, step) if not 0xD800 <= c < 0xE000]
    return tuple(context.format(chr(code)) for code in codes for context in CONTEXTS)


@functools.cache
def merges() -> tuple[dict[str, int], list[list[str]]]:
    """A vocabulary and merges in which any split between two letters changes the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(1)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=10,
    )
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 10))) for _ in range(30_000)]
    library.train_from_iterator(words, trainer)
    model = json.loads(library.to_str())["model"]
    vocab, pairs = model["vocab"], model["merges"]
    spell = library.pre_tokenizer.pre_tokenize_str
    for letter in "ab1'. \n":
        own = spell(letter)[0][0]
        for other in pre_tokenizers.ByteLevel.alphabet():
            for pair in ([own, other], [other, own]):
                if "".join(pair) not in vocab:
                    vocab["".join(pair)] = len(vocab)
                    pairs.append(pair)
    return vocab, pairs


def tokenizer_config(pattern: str | None, **model) -> dict:
    """A tokenizer.json of a byte-level BPE with a split pattern (None: GPT-2's own)."""
    vocab, pairs = merges()
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [{**split, "invert": False}, {**last, "use_regex": False}]
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}
        if pattern
        else {**last, "use_regex": True},
        "post_processor": None,
        "decoder": {**last, "use_regex": True},
        "model": {"type": "BPE", "vocab": dict(vocab), "merges": list(pairs), **model},
    }


def load(config: dict, **more):
    path = folder() / "fast" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return load_tokenizer(TokenizerConfig(tokenizer_model=str(path), **more))


def assert_same_ids(recipe: EngineRecipe, native, texts) -> int:
    """Both give the same ids; returns of how many texts this was known beforehand."""
    engine = recipe.make(threads=2)
    texts = list(texts)
    for text, ours, theirs in zip(
        texts, engine.encode_batch(texts), native.encode_batch(texts), strict=True
    ):
        assert np.array_equal(ours, theirs), repr(text)
    return sum(map(engine._is_proven, texts))


def added(content: str, **flags) -> dict:
    base = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": len(merges()[0]), "content": content, **base, **flags}


SPLIT = tokenizer_config(PATTERNS["llama3"])["pre_tokenizer"]["pretokenizers"][0]
BYTES = tokenizer_config(PATTERNS["llama3"])["pre_tokenizer"]["pretokenizers"][1]
OTHER_KINDS = {
    "model is Unigram": {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}},
    "byte_fallback": {"model": {**tokenizer_config(None)["model"], "byte_fallback": True}},
    "dropout": {"model": {**tokenizer_config(None)["model"], "dropout": 0.1}},
    "end_of_word_suffix": {
        "model": {**tokenizer_config(None)["model"], "end_of_word_suffix": "</w>"}
    },
    "lacks 256 of the 256 bytes": {"model": {"type": "BPE", "vocab": {"<x>": 0}, "merges": []}},
    "normalises texts by NFKC": {"normalizer": {"type": "NFKC"}},
    "by NFC, Lowercase": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    },
    "does not split texts into bytes": {"pre_tokenizer": None},
    "into bytes at the end": {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
    "a space before every text": {"pre_tokenizer": {**BYTES, "add_prefix_space": True}},
    "exactly one regular": {"pre_tokenizer": BYTES},
    "by exactly one": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [SPLIT, {**BYTES, "use_regex": True}],
        }
    },
    "by Digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, SPLIT, BYTES],
        }
    },
    "by Split in a way": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**SPLIT, "behavior": "Removed"}, BYTES],
        }
    },
    "of its own": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**SPLIT, "invert": True}, BYTES]}
    },
    "with single_word": {"added_tokens": [added("word", single_word=True)]},
    "with lstrip": {"added_tokens": [added("word", lstrip=True)]},
    "and some after it": {
        "added_tokens": [added("wordish", normalized=True), added("dish", normalized=False)]
    },
    "not in the form NFC": {"normalizer": {"type": "NFC"}, "added_tokens": [added("e\u0301")]},
}


@pytest.mark.parametrize("reason", OTHER_KINDS)
def test_a_kind_whose_ids_do_not_follow_is_encoded_by_its_own_library(reason):
    config = {**tokenizer_config(PATTERNS["llama3"]), **OTHER_KINDS[reason]}
    assert reason in unproven(config)
    assert not unproven(tokenizer_config(PATTERNS["llama3"]))


@pytest.mark.parametrize("reason", ["normalises texts by NFKC", "by Digits", "with single_word"])
def test_asking_for_it_there_is_refused_with_the_reason(reason):
    tokenizer = load({**tokenizer_config(PATTERNS["llama3"]), **OTHER_KINDS[reason]})
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    assert recipe.name == "tokenizers"
    assert reason in why
    with pytest.raises(UserError, match=reason):
        choose_engine(tokenizer, wanted="gigatoken", sample=["a"], threads=1)


@pytest.mark.parametrize("name", [None, *KNOWN])
def test_every_kind_that_is_taken_gives_the_native_ids_on_nasty_texts(name):
    tokenizer = load(tokenizer_config(PATTERNS[name] if name else None))
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    assert recipe.name == "gigatoken", why
    texts = (*nasty(), *characters(397))
    assert assert_same_ids(recipe, tokenizer.native_engine, texts) > len(nasty()) * 0.9


def test_every_character_of_the_first_planes_gives_the_native_ids():
    tokenizer = load(tokenizer_config(PATTERNS["qwen35"]))
    recipe, _ = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    codes = [c for c in range(0x80, 0x20000) if not 0xD800 <= c < 0xE000]
    texts = [CONTEXTS[code % 2 * 2].format(chr(code)) for code in codes]
    assert assert_same_ids(recipe, tokenizer.native_engine, texts) > 0.5 * len(texts)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ({"ignore_merges": True}, {}),
        ({}, {"added_tokens": [added("sl"), {**added("a ls"), "id": 9000}]}),
        ({}, {"added_tokens": [added("sl", normalized=True)]}),
        ({}, {"normalizer": {"type": "Sequence", "normalizers": []}}),
        ({}, {"normalizer": {"type": "NFC"}}),
        ({}, {"normalizer": {"type": "NFC"}, "added_tokens": [added("a1", normalized=True)]}),
    ],
)
def test_merges_added_tokens_and_nfc_change_nothing(model, more):
    tokenizer = load({**tokenizer_config(PATTERNS["llama3"], **model), **more})
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    assert recipe.name == "gigatoken", why
    texts = (*nasty(2, 5000), *(text.replace("a", "e\u0301") for text in nasty(2, 5000)))
    assert assert_same_ids(recipe, tokenizer.native_engine, texts) > len(texts) // 4


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "llama3", "qwen2", "o200k", "qwen35"])
def test_ranks_give_the_ids_of_tiktoken_on_nasty_texts(name):
    from tokenizers.pre_tokenizers import ByteLevel

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    to_byte = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    assert set(to_byte) == set(ByteLevel.alphabet())
    vocab = merges()[0]
    rows = [bytes(to_byte[c] for c in word) for word in sorted(vocab, key=vocab.__getitem__)]
    path = folder() / "nasty.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(r) + b" %d\n" % n for n, r in enumerate(rows)))
    tokenizer = load_tokenizer(
        TokenizerConfig(tokenizer_model=str(path), tiktoken_pattern=name, eod_id=0)
    )
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    assert recipe.name == "gigatoken", why
    assert assert_same_ids(recipe, tokenizer.native_engine, (*nasty(), *characters(397))) > 1000


def test_sentencepiece_models_keep_their_own_library(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a quick brown fox", "lazy dogs ab", "e\u0301 a\u0301b"] * 50),
        model_prefix=str(tmp_path / "nfkc"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )  # its default normaliser is nmt_nfkc
    model = tmp_path / "nfkc.model"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    fast = gigatoken.Tokenizer.from_sentencepiece(str(model))
    texts = [*HOSTILE, "a\u00a0\u0301b", "\ufb01 \u2460 \u00a0"]
    assert any(list(fast.encode(text)) != theirs.encode(text) for text in texts)
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model=str(model)))
    recipe, why = choose_engine(tokenizer, wanted="auto", sample=["a"], threads=1)
    assert recipe.name == "sentencepiece"
    assert "otherwise than sentencepiece" in why
    assert [row.tolist() for row in recipe.make().encode_batch(texts)] == [
        theirs.encode(text) for text in texts
    ]
    with pytest.raises(UserError, match="otherwise than sentencepiece"):
        choose_engine(tokenizer, wanted="gigatoken", sample=["a"], threads=1)


class _Native:
    """A library whose tables lack é, and whose normaliser writes ü as two characters."""

    def unassigned(self, characters: str) -> str:
        return "é" if "é" in characters else ""

    def normalized(self, text: str) -> str:
        return text.replace("ü", "u\u0308")


def test_texts_of_which_nothing_is_known_are_told_apart():
    known = TextProof(_Native(), normalizes=True)
    for text in ("", "plain", "\x00\n", "ö 你 😀", "u\u0308"):
        assert known(text), text
    for text in ("a é", "ü", "\u0378", "\U000e0101", "\U0010ffff"):
        assert not known(text), text
    assert TextProof(_Native(), normalizes=False)("ü")
