"""The whole table."""

from megatron_anchor.on_cpu import cuda, distributed, megatron, optimizer, tensors

ROWS = (*tensors.ROWS, *cuda.ROWS, *distributed.ROWS, *optimizer.ROWS, *megatron.ROWS)
