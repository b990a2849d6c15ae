"""Rows for Megatron-Core itself: what it takes for granted on a machine with GPUs."""

from megatron_anchor.patches import MEGATRON, Patch, instead

ROWS = (
    Patch(
        target="megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
        replacement=instead(lambda self, mask, b, np, sq, sk: False),
        reason="the fused softmax of 16-bit attention is a CUDA kernel: torch's serves",
        host=MEGATRON,
    ),
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        replacement=instead(lambda: None),
        reason="the wheel ships the compiled dataset helpers and no Makefile to build them",
        host=MEGATRON,
    ),
)
