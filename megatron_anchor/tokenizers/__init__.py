"""Tokenizers for corpora: Hugging Face, SentencePiece, tiktoken ranks, bytes, numbers."""

from megatron_anchor.tokenizers.base import Engine, EngineRecipe, Tokenizer
from megatron_anchor.tokenizers.choose import (
    TokenizerConfig,
    choose_engine,
    load_tokenizer,
)

__all__ = [
    "Engine",
    "EngineRecipe",
    "Tokenizer",
    "TokenizerConfig",
    "choose_engine",
    "load_tokenizer",
]
