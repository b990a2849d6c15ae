"""The whole table."""

from megatron_anchor.on_cpu import (
    cuda,
    data,
    distributed,
    megatron,
    optimizer,
    processes,
    streams,
    tensors,
)

ROWS = (
    *tensors.ROWS,
    *cuda.ROWS,
    *streams.ROWS,
    *data.ROWS,
    *processes.ROWS,
    *distributed.ROWS,
    *optimizer.ROWS,
    *megatron.ROWS,
)
