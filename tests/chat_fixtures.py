"""Small tokenizers with chat templates, made on the spot, and conversations for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tests.corpus_fixtures import folder, texts

CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>' + (c.function | default(c) | tojson) + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content | trim }}<|eot_id|>"
    "{%- endgeneration %}{%- else %}{{- m.content | trim }}<|eot_id|>{%- endif %}{%- endfor %}"
)
INST = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{- ' ' + m.content + '</s>' }}{%- endgeneration %}"
    "{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"
)
STOP_OUTSIDE = CHATML.replace(
    "{{- '<|im_end|>' }}{%- endgeneration %}", "{%- endgeneration %}{{- '<|im_end|>' }}"
)
NO_TAGS = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
# Qwen3's way: the last answer has a block that is left out once another turn follows
REWRITES = CHATML.replace(
    "{%- generation %}",
    "{%- generation %}{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
SPECIAL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@functools.cache
def chat_tokenizer(template: str | None = CHATML, *, eos: str = "<|im_end|>") -> Path:
    """The folder of a byte-level BPE with control tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts(20), trainer)
    library.add_special_tokens(list(SPECIAL))
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return saved(library, template, eos=eos)


@functools.cache
def spaced_tokenizer() -> Path:
    """As Llama 2's: words begin with their space, unknown characters become bytes, no newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    by_bytes = [f"<0x{value:02X}>" for value in range(256)]
    special = ["<unk>", "<s>", "</s>", *by_bytes]
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=special)
    library.train_from_iterator(texts(20), trainer)
    content = json.loads(library.to_str())
    tokens = [t for t in content["added_tokens"] if t["content"] not in by_bytes]
    library = Tokenizer.from_str(json.dumps({**content, "added_tokens": tokens}))
    library.add_special_tokens(["[INST]", "[/INST]"])
    return saved(library, INST, eos="</s>")


@functools.cache
def word_tokenizer(template: str) -> Path:
    """Words between spaces, whose ids are the numbers that they spell; `E` (9) ends a turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {str(number): number for number in range(9)} | {"E": 9, "U": 10, "A": 11, "S": 12}
    vocab |= {"T": 13, "?": 14}
    library = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["E", "U", "A", "S", "T"])
    return saved(library, template, eos="E")


def saved(library, template: str | None, *, eos: str) -> Path:
    path = folder() / f"chat-{len(list(folder().glob('chat-*')))}"
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if eos == "E":
        del settings["bos_token"]
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def talk(*contents: str, system: str | None = None) -> list[dict]:
    """Messages of user and assistant in turns."""
    roles = ("user", "assistant")
    found = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *found]


def write_rows(path: Path, rows) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
