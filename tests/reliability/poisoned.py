"""A corpus in which one document holds a token that makes the model's numbers NaN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.distributed.pretraining import EOD, S
from tests.reliability.poison import TOKEN

BATCH = 4
"""Samples of a global batch, of one sample a micro-batch; see tests.distributed.pretraining."""

DOCUMENTS, LENGTH = 60, 25


@dataclass(frozen=True)
class Poisoned:
    """A corpus in which one document holds the token, and where that document is."""

    prefix: Path
    document: int
    sample: int
    """the only sample that holds the token"""
    iteration: int

    def arguments(self, folder: Path) -> str:
        """Of a run over one epoch."""
        return (
            f"--data-path {self.prefix} --data-cache-path {self.prefix.parent / 'cache'} "
            f"--train-iters 5 --dump-bad-batch {folder / 'bad'} "
        )


def packed(prefix: Path) -> Any:
    """The training samples, as the program builds them."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig

    config = PackedDatasetConfig(
        random_seed=5,
        sequence_length=S,
        blend=([str(prefix)], None),
        split="100,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=SimpleNamespace(vocab_size=127),
        anchor_token_id=126,
        pad_token_id=126,
        vocab_size=127,
    )
    builder = BlendedMegatronDatasetBuilder(PackedDataset, [20, 0, 0], lambda: True, config)
    return builder.build()[0]


def write_poisoned(folder: Path) -> Poisoned:
    """Put the token into a document whose sample is trained on in the third iteration."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(prefix: Path, document: int | None) -> Path:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for number in range(DOCUMENTS):
            tokens = torch.arange(2, 2 + LENGTH) + number
            tokens[-1] = EOD
            if number == document:
                tokens[5] = TOKEN
            builder.add_document(tokens, [LENGTH])
        builder.finalize(f"{prefix}.idx")
        return prefix

    third = packed(write(folder / "draft", None)).slices(2 * BATCH + 1)
    inner = int(np.flatnonzero(~third.is_cut)[0])  # whole in this sample
    document = int(third.document[inner])
    prefix = write(folder / "corpus", document)
    dataset = packed(prefix)
    [sample] = [n for n in range(5 * BATCH) if (dataset[n]["tokens"] == TOKEN).any()]
    return Poisoned(prefix, document, sample, sample // BATCH + 1)
