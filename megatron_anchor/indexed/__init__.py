"""Megatron's tokenized corpora on disk: `.bin/.idx` pairs, and the files beside them."""
