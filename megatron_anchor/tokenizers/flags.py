"""The tokenizer flags of the commands that have them."""

from __future__ import annotations

import argparse

from megatron_anchor.tokenizers.choose import ENGINES, TOKENIZER_TYPES, TokenizerConfig
from megatron_anchor.tokenizers.tiktoken_ranks import PATTERNS


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron's tokenizer arguments, and ours."""
    group = parser.add_argument_group("tokenizer")
    add = group.add_argument
    add("--tokenizer-type", choices=TOKENIZER_TYPES, help="as in Megatron; guessed if left out")
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="folder or name of a Hugging Face model, tokenizer.json, SentencePiece .model, or "
        "tiktoken ranks",
    )
    add("--vocab-file", metavar="PATH", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="PATH", help="merges.txt of GPT2BPETokenizer")
    add("--vocab-size", type=int, help="for NullTokenizer, ByteLevelTokenizer and TikTokenizer")
    add(
        "--tiktoken-pattern",
        metavar="NAME",
        help=f"split pattern of tiktoken ranks: {', '.join(PATTERNS)}, or a regular expression",
    )
    add("--tiktoken-num-special-tokens", type=int, default=1000)
    add("--tokenizer-special-tokens", nargs="+", default=(), metavar="TOKEN")
    add(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="leave out what the tokenizer's post-processor adds to every text (such as a bos)",
    )
    add("--trust-remote-code", action="store_true")
    add("--null-tokenizer-eod-id", type=int, metavar="ID")
    add("--eod-token", metavar="TOKEN", help="end-of-document token, if not the tokenizer's eos")
    add("--eod-id", type=int, metavar="ID", help="end-of-document id, if not the tokenizer's eos")
    add(
        "--allow-special-in-text",
        action="store_true",
        help="let literal special strings in a text become control tokens (default: text is text)",
    )
    add(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="auto: gigatoken where it is installed and gives the same ids on a sample of the "
        "corpus, else the tokenizer's own library (native)",
    )


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    """The tokenizer part of parsed arguments."""
    names = TokenizerConfig.__dataclass_fields__
    values = {name: getattr(args, name) for name in names}
    values["tokenizer_special_tokens"] = tuple(values["tokenizer_special_tokens"])
    return TokenizerConfig(**values)
