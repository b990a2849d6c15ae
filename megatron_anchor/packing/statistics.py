"""What a packed sample is made of: the segments that attend, and the work that they leave."""

import numpy as np

from megatron_anchor.packing.index import Pieces
from megatron_anchor.packing.layout import segment_borders
from megatron_anchor.windows import FULL, LayerWindows


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


def attention_work_share(
    lengths: np.ndarray, *, sequence_length: int, windows: LayerWindows = FULL
) -> float:
    """Pairs of query and key inside segments, relative to full causal attention over one sample.

    Args:
        lengths: integers, slots of the segments; for those of several samples the result is the sum
            of their shares.
        sequence_length: S, slots of one sample.
        windows: of the model's layers; the share is a mean over them.
    """
    return windows.pairs(lengths) / (sequence_length * (sequence_length + 1) / 2)
