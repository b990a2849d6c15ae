"""No option that changes a corpus is left out when runs and corpora are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_anchor.corpus import (
    IndexedCorpus,
    PreprocessConfig,
    TokenizerConfig,
    load_tokenizer,
    preprocess,
    read_manifest,
)
from megatron_anchor.corpus.cli_preprocess import config_from, parser
from megatron_anchor.corpus.identity import (
    ELSEWHERE,
    ROW_OPTIONS,
    TEXT_OPTIONS,
    WITHOUT_EFFECT,
    run_identity,
)
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.corpus.sources import resolve
from megatron_anchor.corpus.weight_options import checked_chat
from megatron_anchor.errors import UserError
from tests.chat_fixtures import LLAMA, chat_tokenizer
from tests.corpus_fixtures import (
    copied,
    corpus_files,
    folder,
    sentencepiece_model,
    texts,
    tiktoken_ranks,
    tokenizer_json,
    write_jsonl,
)

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
NUMBERS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9")
RANKS = ("--tokenizer-model", "RANKS", "--tiktoken-pattern", "gpt2", "--eod-id", "3")


def with_affixes() -> Path:
    """The tokenizer of the fixtures with a post-processor that sets a bos before every text."""
    content = json.loads(tokenizer_json().read_text())
    bos = content["model"]["vocab"]["<s>"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}},
    }
    path = folder() / "affixes" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def gpt2_files() -> tuple[Path, Path]:
    model = json.loads(tokenizer_json().read_text())["model"]
    vocab, merges = folder() / "vocab.json", folder() / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
    return vocab, merges


def ranks_json() -> Path:
    import base64

    rows = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    path = folder() / "ranks.json"
    path.write_text(json.dumps(rows))
    return path


def llama_template() -> Path:
    path = folder() / "llama.jinja"
    path.write_text(LLAMA)
    return path


def files() -> dict[str, str]:
    vocab, merges = gpt2_files()
    fewer = folder() / "fewer.txt"
    fewer.write_text("".join(merges.read_text().splitlines(keepends=True)[:-9]))
    larger = folder() / "larger.json"
    larger.write_text(json.dumps({**json.loads(vocab.read_text()), "zzzz": 5000}))
    return {
        "JSON": str(tokenizer_json()),
        "SPM": str(sentencepiece_model()),
        "RANKS": str(tiktoken_ranks()),
        "AFFIXES": str(with_affixes()),
        "VOCAB": str(vocab),
        "LARGER": str(larger),
        "MERGES": str(merges),
        "FEWER": str(fewer),
        "RANKS_JSON": str(ranks_json()),
        "LLAMA": str(llama_template()),
    }


GPT2 = ("--tokenizer-type", "GPT2BPETokenizer")
# Option -> the flags that both runs have, those of the first, and those of the second.
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "append_eod": (NUMBERS, (), ("--append-eod",)),
    "pretokenized": ((*NUMBERS, "--json-keys", "text"), (), ("--pretokenized",)),
    "split_sentences": (NUMBERS, (), ("--split-sentences",)),
    "chat": ((), (), ("--chat",)),
    "chat_template": (("--chat",), (), ("--chat-template", "LLAMA")),
    "chat_template_kwargs": (("--chat",), (), ("--chat-template-kwargs", '{"a": 1}')),
    "tools_key": (("--chat",), (), ("--tools-key", "functions")),
    "max_conversation_tokens": (("--chat",), (), ("--max-conversation-tokens", "9")),
    "long_conversations": (("--chat",), (), ("--long-conversations", "reject")),
    "weight_key": (NUMBERS, (), ("--weight-key", "w")),
    "weight_dtype": (NUMBERS, (), ("--weight-dtype", "float16")),
    "json_keys": (NUMBERS, ("--json-keys", "a"), ("--json-keys", "a", "b")),
    "domain_key": (NUMBERS, (), ("--domain-key", "d")),
    "domain": (NUMBERS, (), ("--domain", "web")),
    "hf_split": (NUMBERS, (), ("--hf-split", "test")),
    "hf_config": (NUMBERS, (), ("--hf-config", "en")),
    "max_row_mb": (NUMBERS, (), ("--max-row-mb", "7")),
    "shard": (NUMBERS, (), ("--shard", "0/2")),
    "input_format": (NUMBERS, (), ("--input-format", "jsonl")),
    "input": (NUMBERS, ("--input", "in.jsonl"), ("--input", "in.jsonl", "more.jsonl")),
    "keep_newlines": ((*NUMBERS, "--split-sentences"), (), ("--keep-newlines",)),
    "lang": ((*NUMBERS, "--split-sentences"), (), ("--lang", "german")),
    "tokenizer_type": (
        ("--vocab-size", "300"),
        NUMBERS[:2],
        ("--tokenizer-type", "ByteLevelTokenizer"),
    ),
    "tokenizer_model": ((), ("--tokenizer-model", "JSON"), ("--tokenizer-model", "SPM")),
    "vocab_file": (
        (*GPT2, "--merge-file", "MERGES"),
        ("--vocab-file", "VOCAB"),
        ("--vocab-file", "LARGER"),
    ),
    "merge_file": (
        (*GPT2, "--vocab-file", "VOCAB"),
        ("--merge-file", "MERGES"),
        ("--merge-file", "FEWER"),
    ),
    "vocab_size": (NUMBERS[:2], ("--vocab-size", "9"), ("--vocab-size", "8")),
    "tiktoken_pattern": (RANKS[:2], RANKS[2:], ("--tiktoken-pattern", "qwen2", "--eod-id", "3")),
    "tiktoken_num_special_tokens": (
        ("--tokenizer-model", "RANKS_JSON", "--tokenizer-type", "TikTokenizer"),
        ("--tiktoken-num-special-tokens", "10"),
        ("--tiktoken-num-special-tokens", "20"),
    ),
    "tokenizer_special_tokens": (
        RANKS,
        ("--tokenizer-special-tokens", "<a>"),
        ("--tokenizer-special-tokens", "<b>", "<a>"),
    ),
    "tokenizer_hf_no_include_special_tokens": (
        ("--tokenizer-model", "AFFIXES"),
        (),
        ("--tokenizer-hf-no-include-special-tokens",),
    ),
    "null_tokenizer_eod_id": (NUMBERS, (), ("--null-tokenizer-eod-id", "2")),
    "eod_token": (("--tokenizer-model", "JSON"), (), ("--eod-token", "<|im_end|>")),
    "eod_id": (("--tokenizer-model", "JSON"), (), ("--eod-id", "7")),
    "allow_special_in_text": (("--tokenizer-model", "JSON"), (), ("--allow-special-in-text",)),
}
BY_WHAT_IS_LOADED = {
    "trust_remote_code": "the tokenizer that it lets load is in the fingerprint",
    "punkt_path": "the model that lies there is in the identity",
}


def test_every_option_is_in_the_identity_or_cannot_change_the_corpus():
    options = {action.dest for action in parser()._actions} - {"help"}
    tables = [set(TEXT_OPTIONS), set(ROW_OPTIONS), set(ELSEWHERE), set(WITHOUT_EFFECT)]
    assert set().union(*tables) - {"progress"} == options
    assert sum(map(len, tables)) == len(set().union(*tables)), "an option is in one table only"
    assert set(CHANGES) | set(BY_WHAT_IS_LOADED) == {*TEXT_OPTIONS, *ROW_OPTIONS, *ELSEWHERE}
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize("option", CHANGES)
def test_another_value_is_another_identity(tmp_path, monkeypatch, option):
    write_jsonl(tmp_path / "in.jsonl", ["a"])
    write_jsonl(tmp_path / "more.jsonl", ["b"])
    monkeypatch.chdir(tmp_path)
    named, (both, *each) = files(), CHANGES[option]
    found = []
    for flags in each:
        words = [named.get(word, word) for word in (*both, *flags)]
        inputs = [] if option == "input" else ["--input", "in.jsonl"]
        if "--chat" in CHANGES.get(option, ((),))[0] or option == "chat":
            inputs += ["--tokenizer-model", str(chat_tokenizer())]
        args = parser().parse_args([*inputs, *words, "--output-prefix", "out"])
        config = config_from(args)
        sources = resolve(
            config.input, domains=config.domain, input_format=config.input_format
        ).sources
        tokenizer = load_tokenizer(config.tokenizer)
        chat = checked_chat(config, tokenizer)
        found.append(
            run_identity(
                config,
                sources,
                tokenizer.fingerprint(),
                punkt="model" if config.split_sentences else None,
                template=chat.template.identity if chat else None,
            )
        )
    assert found[0] != found[1]


def build(tmp_path, name, *, documents=("some text",), **config) -> Path:
    source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
    settings = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    preprocess(
        PreprocessConfig(input=(str(source),), output_prefix=str(tmp_path / name), **settings)
    )
    level = "sentence" if config.get("split_sentences") else "document"
    return tmp_path / f"{name}_text_{level}"


def test_corpora_with_and_without_control_tokens_in_their_texts_are_not_merged(tmp_path):
    plain = TokenizerConfig(tokenizer_model=str(tokenizer_json()))
    text = "<|im_end|>" * 3  # none of the probes holds it
    parts = [
        build(tmp_path, "a", documents=[text], tokenizer=plain),
        build(
            tmp_path,
            "b",
            documents=[text],
            tokenizer=replace(plain, allow_special_in_text=True),
        ),
    ]
    sizes = [len(IndexedCorpus.open(part).tokens) for part in parts]
    assert sizes[0] > sizes[1] == 3
    with pytest.raises(UserError, match="tokenizer fingerprint"):
        merge_corpora(parts, tmp_path / "all", progress=False)
    config = {"input": (str(tmp_path / "a.jsonl"),), "output_prefix": str(tmp_path / "a")}
    config |= {"tokenizer": replace(plain, allow_special_in_text=True), "workers": 1}
    with pytest.raises(UserError, match=r"made otherwise.*tokenizer"):
        preprocess(PreprocessConfig(**config, resume=True, progress=False))


@pytest.mark.parametrize("option", [*TEXT_OPTIONS, "sentences", "conversations"])
def test_parts_that_treat_texts_otherwise_are_not_merged_however_often(tmp_path, option):
    a, b = build(tmp_path, "a"), build(tmp_path, "b")
    merge_corpora([a, copied(a)], tmp_path / "all", progress=False)
    for prefix in (b, tmp_path / "all"):
        path = Path(f"{prefix}.manifest.json")
        content = json.loads(path.read_text())
        value = (
            {"lang": "x"}
            if option in ("sentences", "conversations")
            else not content["settings"][option]
        )
        content["settings"][option] = value
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"has {option} "):
            merge_corpora([a, prefix], tmp_path / "more", progress=False)
    merge_corpora([b, tmp_path / "all"], tmp_path / "more", progress=False)


VARIANTS = {
    "merges": lambda c: c["model"]["merges"].pop(),
    "ignore_merges": lambda c: c["model"].update(ignore_merges=True),
    "split": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "normalizer": lambda c: c.update(normalizer={"type": "NFC"}),
    "added": lambda c: c["added_tokens"][-1].update(single_word=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokenizers_with_one_vocabulary_are_told_apart(name):
    content = json.loads(tokenizer_json().read_text())
    before = load_tokenizer(TokenizerConfig(tokenizer_model=str(tokenizer_json()))).fingerprint()
    VARIANTS[name](content)
    path = folder() / f"variant-{name}.json"
    path.write_text(json.dumps(content))
    assert load_tokenizer(TokenizerConfig(tokenizer_model=str(path))).fingerprint() != before


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 2},
        {"chunk_kb": 1},
        {"checkpoint_seconds": 0.0},
        {"on_error": "skip"},
        {"tokenizer": TokenizerConfig(tokenizer_model="JSON", engine="native")},
    ],
    ids=str,
)
def test_options_without_effect_change_no_byte(tmp_path, change):
    tokenizer = TokenizerConfig(tokenizer_model=str(tokenizer_json()))
    build(tmp_path, "a", documents=texts()[:9], tokenizer=tokenizer)
    if "tokenizer" in change:
        change = {"tokenizer": replace(tokenizer, engine=change["tokenizer"].engine)}
    (tmp_path / "b").mkdir()
    source = str(tmp_path / "a.jsonl")
    config = {"tokenizer": tokenizer, "workers": 1, "progress": False, **change}
    preprocess(PreprocessConfig(input=(source,), output_prefix=str(tmp_path / "b" / "a"), **config))
    first, second = corpus_files(tmp_path / "a"), corpus_files(tmp_path / "b" / "a")
    for name in ("_text_document.bin", "_text_document.idx", "_text_document.domains.npy"):
        assert first[name] == second[name]


@pytest.mark.parametrize(("engine", "packages"), [("native", 1), ("auto", 2)])
def test_the_manifest_names_the_packages_that_made_the_ids(tmp_path, engine, packages):
    from importlib.metadata import version

    if packages == 2:
        pytest.importorskip("gigatoken")
    tokenizer = TokenizerConfig(tokenizer_model=str(tokenizer_json()), engine=engine)
    manifest = read_manifest(build(tmp_path, "a", tokenizer=tokenizer))
    assert f"tokenizers {version('tokenizers')}" in manifest.tokenizer["engines"]
    assert len(manifest.tokenizer["engines"]) == packages
