"""Texts and small tokenizers for the corpus tests, trained on the spot."""

from __future__ import annotations

import base64
import functools
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SPECIALS = ("<s>", "</s>", "<|im_end|>")
HOSTILE = (
    "def f(x):\n" + " " * 40 + "if x:\n\t\t\treturn  x\n",
    "👩‍🔬 👨‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 \U0001f600",
    "e\u0301 a\u030a\u0323 \u1e9b\u0323 Z\u0351\u036b\u0343\u036a\u0302",
    "مرحبا بالعالم שלום עולם \u202eabc\u202c \u200f",
    "\x00\x01\x1b[31m\x7f\x85\u2028\u2029\ufeff\ufffd",
    "a" * 3000 + " " + "pneumono" * 300,
    "   \t\t  \n\n\n   ",
    "x  y   z    \r\n\r\n w",
    "\u4f60\u597d\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "<s>[INST] a literal </s> and <|im_end|> in a text <s>",
    "1234567890 3.14159 1e-9 0xDEADBEEF",
    "\u00a0\u2003\u3000 \u200b\u200d",
)


@functools.cache
def texts(count: int = 60, most: int = 4000) -> tuple[str, ...]:
    """Real documents of mixed length: modules of the standard library."""
    files = sorted(STDLIB.glob("*.py"))[:count]
    found = [file.read_text(encoding="utf-8", errors="ignore")[:most] for file in files]
    return tuple(text for text in found if text.strip())


@functools.cache
def folder() -> Path:
    """A folder that lives as long as the test process."""
    holder = tempfile.TemporaryDirectory(prefix="corpus-tests-")
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list[tempfile.TemporaryDirectory] = []


@functools.cache
def tokenizer_json() -> Path:
    """A byte-level BPE with special tokens, ordinary added words and markup-like added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts(), trainer)
    library.add_tokens([AddedToken("        ", normalized=False), "wordish", "<think>"])
    path = folder() / "hf" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    library.save(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (path.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@functools.cache
def sentencepiece_model() -> Path:
    """A BPE SentencePiece model with byte fallback that keeps all spaces, as Llama 2 has it."""
    import sentencepiece

    prefix = folder() / "spm"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts() for line in text.splitlines() if line),
        model_prefix=str(prefix),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return Path(f"{prefix}.model")


@functools.cache
def tiktoken_ranks() -> Path:
    """The byte-level BPE's own merges as a tiktoken rank file."""
    model = json.loads(tokenizer_json().read_text())["model"]
    to_byte = _byte_of_character()
    pieces = sorted(
        (word for word in model["vocab"] if word not in SPECIALS), key=model["vocab"].__getitem__
    )
    rows = [bytes(to_byte[c] for c in word) for word in pieces]
    path = folder() / "small.tiktoken"
    lines = (base64.b64encode(row) + b" %d\n" % rank for rank, row in enumerate(rows))
    path.write_bytes(b"".join(lines))
    return path


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table from printable characters to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def write_jsonl(path: Path, documents, **fields) -> Path:
    """One `{"text": ...}` a line, with constant extra fields."""
    lines = (json.dumps({"text": text, **fields}) for text in documents)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def corpus_files(prefix: Path | str) -> dict[str, bytes]:
    """All files of a run by the rest of their name, for byte comparisons."""
    prefix = Path(prefix)
    found = sorted(p for p in prefix.parent.iterdir() if p.name.startswith(prefix.name))
    return {p.name.removeprefix(prefix.name): p.read_bytes() for p in found if p.is_file()}


def copied(prefix: Path | str) -> Path:
    """A copy of a corpus under another name: one that is given twice is refused."""
    prefix = Path(prefix)
    copy = prefix.with_name(f"copy_of_{prefix.name}")
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copyfile(path, f"{copy}{path.name.removeprefix(prefix.name)}")
    return copy
