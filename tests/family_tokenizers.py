"""Small byte-level tokenizers with the post-processors and chat templates of real families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, TURN = "<|begin|>", "<|endoftext|>", "<|im_start|>"
IDS = {BOS: 256, EOS: 257, TURN: 258}

_CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{% for message in messages %}{% set content = message['role'] + message['content'] %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


def _template(*, pair_repeats: bool) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, a],
        "pair": [bos, a, *([bos] if pair_repeats else []), b],
        "special_tokens": {BOS: {"id": BOS, "ids": [256], "tokens": [BOS]}},
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
FAMILIES: dict[str, tuple[dict[str, Any] | None, str, str | None, str]] = {
    "llama3": (
        {"type": "Sequence", "processors": [_BYTES, _template(pair_repeats=True)]},
        _LLAMA3,
        BOS,
        "PreTrainedTokenizerFast",
    ),
    "mistral": (_template(pair_repeats=True), _MISTRAL, BOS, "PreTrainedTokenizerFast"),
    "qwen": (_BYTES, _CHATML, None, "Qwen2Tokenizer"),
    "none": (None, _CHATML, None, "PreTrainedTokenizerFast"),
}
"""Post-processor, chat template, bos token and class."""


def family_tokenizer(folder: Path, family: str, *, jinja: bool = False) -> Path:
    """Write a tokenizer: a byte is a token, then `IDS`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    processor, chat, bos, kind = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(IDS))
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = processor
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if kind == "Qwen2Tokenizer":
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    config: dict[str, Any] = {"tokenizer_class": kind, "eos_token": EOS, "pad_token": EOS}
    config["bos_token"] = bos
    if jinja:
        (folder / "chat_template.jinja").write_text(chat)
    else:
        config["chat_template"] = chat
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
