"""The whole table."""

from megatron_anchor.on_cpu import cuda, data, distributed, megatron, optimizer, tensors

ROWS = (*tensors.ROWS, *cuda.ROWS, *data.ROWS, *distributed.ROWS, *optimizer.ROWS, *megatron.ROWS)
