"""What a packed sample is made of: documents, padding, and the attention work that is left.

The work of causal attention over l tokens is counted as l (l + 1) / 2, the pairs of query and key.
Every function takes numpy arrays or torch tensors, on any device, of one sample or with batch
dimensions in front, and returns the same kind.

Legend: B samples of a batch, L entries of cu_seqlens.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron_anchor.packing.index import Pieces
from megatron_anchor.packing.layout import segment_borders


class PackingStatistics(NamedTuple):
    """Means over the samples of a batch."""

    documents_per_sample: float
    """document slices a sample"""
    padding_share: float
    """share of the slots that hold padding, 0 to 1"""
    attention_work_share: float
    """work of the pattern relative to full causal attention over the sample, 0 to 1"""


def segment_lengths(pieces: Pieces, *, sequence_length: int, attention_pattern: str) -> np.ndarray:
    """int64 slots of a sample's segments, padding behind the last slice included.

    Args:
        pieces: the sample's document slices.
        sequence_length: S.
        attention_pattern: one of ATTENTION_PATTERNS.
    """
    if attention_pattern == "full":
        return np.array([sequence_length])
    slots_P = pieces.head + pieces.length + pieces.filling
    borders = np.concatenate(([0], np.cumsum(slots_P)))
    segments = np.diff(segment_borders(borders, attention_pattern=attention_pattern))
    padding = sequence_length - int(slots_P.sum())
    return np.append(segments, padding) if padding else segments


def count_segments(cu_seqlens: Any) -> Any:
    """Segments that are not empty, along the last dimension of cu_seqlens [..., L]."""
    return (cu_seqlens[..., 1:] > cu_seqlens[..., :-1]).sum(-1)


def attention_pairs(lengths: np.ndarray) -> float:
    """Pairs of query and key inside causal segments of these lengths."""
    return float((lengths * (lengths + 1) / 2).sum())


def attention_work(cu_seqlens: Any) -> Any:
    """Pairs of query and key inside the segments of cu_seqlens [..., L]; float64 [...]."""
    lengths = _as_float64(cu_seqlens[..., 1:] - cu_seqlens[..., :-1])
    return (lengths * (lengths + 1) / 2).sum(-1)


def attention_work_share(cu_seqlens: Any, *, sequence_length: int) -> Any:
    """Work inside the segments relative to full attention over the sample; float64 [...].

    Args:
        cu_seqlens: [..., L]; for the merged cu_seqlens of several samples the result is the sum
            of their shares.
        sequence_length: S, slots of one sample.
    """
    return attention_work(cu_seqlens) / (sequence_length * (sequence_length + 1) / 2)


def padding_share(num_padding: Any, *, sequence_length: int) -> Any:
    """Share of a sample's slots that hold padding; float64 [...]."""
    return _as_float64(num_padding) / sequence_length


def batch_statistics(batch: Mapping[str, Any], *, sequence_length: int) -> PackingStatistics:
    """Means over a batch of samples, as the training log shows them.

    Args:
        batch: holds cu_seqlens [B, L], num_documents [B] and num_padding [B] (or one sample's).
        sequence_length: S.
    """
    work = attention_work_share(batch["cu_seqlens"], sequence_length=sequence_length)
    padding = padding_share(batch["num_padding"], sequence_length=sequence_length)
    return PackingStatistics(
        documents_per_sample=float(_as_float64(batch["num_documents"]).mean()),
        padding_share=float(padding.mean()),
        attention_work_share=float(work.mean()),
    )


def _as_float64(array: Any) -> Any:
    return array.double() if hasattr(array, "double") else array.astype("float64")
