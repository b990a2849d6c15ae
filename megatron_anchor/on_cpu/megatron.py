"""Rows for Megatron-Core itself: what it takes for granted on a machine with GPUs."""

import importlib.util
from collections.abc import Callable

from megatron_anchor.patches import MEGATRON, Patch, instead


def _unless_compiled(original: Callable[[], None]) -> Callable[[], None]:
    """Compile in a checkout only, where nobody did it yet."""
    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    return (lambda: None) if compiled else original


ROWS = (
    Patch(
        target="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
        replacement=instead(lambda self, mask, b, np, sq, sk: False),
        reason="the fused softmax of 16-bit attention is a CUDA kernel: torch's serves",
        host=MEGATRON,
    ),
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        replacement=_unless_compiled,
        reason="the wheel ships the compiled dataset helpers and no Makefile to build them",
        host=MEGATRON,
    ),
)
