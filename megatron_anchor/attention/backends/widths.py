"""Keys and values of unequal widths, for kernels that take one width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def equal_widths(*tensors: Tensor) -> list[Tensor]:
    """Fill the last dimension up with zeros, which change neither logits nor the output's columns.

    Args:
        tensors: queries, keys and values, [..., D] and [..., E].
    """
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
