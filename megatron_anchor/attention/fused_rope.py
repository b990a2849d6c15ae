"""The rotation in one pass over memory on a GPU.

`rotate` reads as a dozen element-wise operations, each of which would read and write the whole of q
or k in float32. Compiled, they are one kernel: bfloat16 in, float32 inside, bfloat16 out. It is the
same function, so there is one definition of the rotation; the compiler may contract a product and a
sum, which rounds once less.

Transformer Engine's fused kernel takes one table of angles for all samples of a micro-batch and
cannot scale cos and sin (yarn); the compiled function does both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron_anchor.attention.rope import rotate


def rotate_in_one_pass(
    x_SBHD: Tensor, cos_SBF: Tensor, sin_SBF: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate as `rotate` does, by one kernel where a CUDA device runs it.

    Args:
        x_SBHD: [..., H, head_dim] queries or keys in any floating dtype.
        cos_SBF: [..., F] float32, for every token of ``x``.
        sin_SBF: [..., F] float32.
        interleaved: pair dimensions (0, 1), (2, 3), ... instead of (i, i + F).

    Returns:
        Tensor of ``x``'s shape and dtype.
    """
    function = compiled_rotate() if x_SBHD.device.type == "cuda" else rotate
    return function(x_SBHD, cos_SBF, sin_SBF, interleaved=interleaved)


@cache
def compiled_rotate() -> Callable[..., Tensor]:
    """Compile `rotate`; a micro-batch of another shape does not compile it again."""
    return torch.compile(rotate, dynamic=True)
