"""What the packing tests share: a slow, obvious packer, corpora on disk, and their strategies."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig

ANCHOR, PAD, VOCAB_SIZE = 1, 0, 60000
TENSOR_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
SCALAR_FIELDS = ("max_seqlen", "num_documents", "num_padding")


def pack(documents: list[list[int]], *, anchor: int, sequence_length: int) -> list[list[tuple]]:
    """Samples as lists of slots (token, label or None, number of the document slice)."""
    samples: list[list[tuple]] = [[]]
    piece = 0

    def place(token: int, label: int | None, continuation_anchor: int) -> None:
        nonlocal piece
        if len(samples[-1]) == sequence_length:
            samples.append([])
            piece += 1
            if continuation_anchor >= 0:
                samples[-1].append((continuation_anchor, None, piece))
        samples[-1].append((token, label, piece))

    for document in documents:
        content = document[1:] if document[:1] == [anchor] else document
        if not content:
            continue
        piece += 1
        place(anchor, content[0], continuation_anchor=-1)
        for token, label in zip(content, [*content[1:], None], strict=True):
            place(token, label, continuation_anchor=anchor)
    return [sample for sample in samples if sample]


def expected_fields(
    sample: list[tuple], *, sequence_length: int, pad: int, pattern: str
) -> dict[str, Any]:
    """All fields of a sample as lists and numbers, straight from DESIGN's table of patterns."""
    padding = sequence_length - len(sample)
    borders = [0]
    positions: list[int] = []
    real_tokens = 0
    for slot, (_, _, piece) in enumerate(sample):
        is_anchor = slot == 0 or piece != sample[slot - 1][2]
        if is_anchor and slot:
            borders.append(slot)
        real_tokens += not is_anchor
        positions.append(
            {
                "anchor": 0 if is_anchor else real_tokens,
                "intra-document": slot,
                "intra-document-reset": slot - borders[-1],
                "full": slot,
            }[pattern]
        )
    num_documents = len(borders)
    if padding:
        borders.append(len(sample))
    borders.append(sequence_length)
    if pattern == "full":
        borders = [0, sequence_length]
        positions += range(len(sample), sequence_length)
    else:
        positions += [0] * padding
    length = -(-sequence_length // 2) + 1
    return {
        "tokens": [token for token, _, _ in sample] + [pad] * padding,
        "labels": [label or 0 for _, label, _ in sample] + [0] * padding,
        "loss_mask": [float(label is not None) for _, label, _ in sample] + [0.0] * padding,
        "position_ids": positions,
        "cu_seqlens": borders + [sequence_length] * (length - len(borders)),
        "max_seqlen": max(b - a for a, b in itertools.pairwise(borders)),
        "num_documents": num_documents,
        "num_padding": padding,
    }


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of ours as lists and numbers."""
    return {name: sample[name].tolist() for name in (*TENSOR_FIELDS, *SCALAR_FIELDS)}


def targets(sample: dict[str, Any]) -> list[int]:
    """The labels that count."""
    return sample["labels"][sample["loss_mask"] == 1].tolist()


def write_corpus(
    prefix: Path | str, documents: list[list[list[int]]], dtype: type = np.int32
) -> str:
    """Write documents, each a list of sequences, with Megatron's own writer."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        tokens = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(s) for s in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def make_config(blend: Any, **settings: Any) -> PackedDatasetConfig:
    """A config with the defaults of these tests; `blend` is a prefix or Megatron's blend."""
    defaults: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 8,
        "tokenizer": SimpleNamespace(vocab_size=VOCAB_SIZE),
        "anchor_token_id": ANCHOR,
        "pad_token_id": PAD,
        "vocab_size": VOCAB_SIZE,
    }
    if "blend_per_split" not in settings:
        defaults |= {"blend": ([blend], None) if isinstance(blend, str) else blend}
        defaults |= {"split": "1,0,0"}
    return PackedDatasetConfig(**(defaults | settings))


def build(config: PackedDatasetConfig, num_samples: Any = None) -> list[Any]:
    """Train, valid and test datasets, by Megatron's builder; `num_samples` of each, or of train."""
    sizes = num_samples if isinstance(num_samples, list) else [num_samples, None, None]
    return BlendedMegatronDatasetBuilder(PackedDataset, sizes, lambda: True, config).build()


def build_train(prefix: str, num_samples: int | None = None, **settings: Any) -> PackedDataset:
    """The train dataset over all documents of one corpus."""
    return build(make_config(prefix, **settings), num_samples)[0]


def flatten(documents: list[list[list[int]]]) -> list[list[int]]:
    """Documents as lists of tokens."""
    return [[token for sequence in document for token in sequence] for document in documents]


@st.composite
def corpora(draw: st.DrawFn, *, unique: bool = False) -> tuple[int, list[list[list[int]]]]:
    """(sequence length, documents): odd lengths around the sample's, with some usable token.

    Documents may be empty, begin with the anchor, hold literal anchors and pads, and have several
    sequences, empty ones among them. With `unique` no token but a leading anchor occurs twice.
    """
    sequence_length = draw(st.integers(2, 12))
    near = [sequence_length + d for d in (-2, -1, 0, 1)] + [2 * sequence_length - 1]
    lengths = st.one_of(st.sampled_from([0, 1, *near]), st.integers(0, 3 * sequence_length + 2))
    counts = draw(st.lists(lengths, min_size=1, max_size=12))
    fresh = iter(range(10, VOCAB_SIZE))
    documents = []
    for count in counts:
        tokens = [next(fresh) for _ in range(count)]
        if tokens and not unique:
            for place in draw(st.lists(st.integers(0, count - 1), max_size=3)):
                tokens[place] = draw(st.sampled_from([ANCHOR, PAD, 2]))
        if draw(st.integers(0, 3)) == 0:
            tokens.insert(0, ANCHOR)
        cut = draw(st.integers(0, len(tokens)))
        documents.append(
            draw(st.sampled_from([[tokens], [tokens[:cut], tokens[cut:]], [[], tokens]]))
        )
    if not any(tokens not in ([], [ANCHOR]) for tokens in flatten(documents)):
        documents.append([[next(fresh)]])
    return sequence_length, documents
