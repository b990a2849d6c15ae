"""Linear layers in bfloat16 on a CPU, at float32's speed.

GPUs multiply bfloat16 numbers exactly, add up in float32 and round the sum once. So do CPUs with
bfloat16 units; the others emulate them, here nearly ten times slower than float32. Multiplying the
same bfloat16 numbers in float32 and rounding the result is the same arithmetic but for the order of
the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float32Products(TorchFunctionMode):
    """While it is entered, `linear` on bfloat16 CPU tensors runs in float32 and rounds once."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace `linear`, call anything else."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and _is_slow(args[0]):
            operands = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
            named = {k: a.float() if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            return func(*operands, **named).to(args[0].dtype)
        return func(*args, **kwargs)


def _is_slow(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 and x.device.type == "cpu"
