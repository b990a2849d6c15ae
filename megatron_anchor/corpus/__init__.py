"""Corpora: from texts to Megatron's `.bin/.idx`, never losing a row."""

from megatron_anchor.corpus.preprocess import PreprocessConfig, Summary, preprocess
from megatron_anchor.corpus.rejections import Rejection, RowError
from megatron_anchor.indexed.manifest import KeyManifest, read_domains, read_manifest
from megatron_anchor.indexed.pair import IndexedCorpus, token_dtype
from megatron_anchor.tokenizers import TokenizerConfig, load_tokenizer

__all__ = [
    "IndexedCorpus",
    "KeyManifest",
    "PreprocessConfig",
    "Rejection",
    "RowError",
    "Summary",
    "TokenizerConfig",
    "load_tokenizer",
    "preprocess",
    "read_domains",
    "read_manifest",
    "token_dtype",
]
