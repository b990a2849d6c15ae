"""The attention work of packed samples."""

import numpy as np

from megatron_anchor.windows import FULL, LayerWindows


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
