"""The batches of --iterations-to-skip."""

from __future__ import annotations

from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine


def dummy_train_step(data_iterator: Any) -> None:
    """Read the batches of one iteration, of any kind, and use nothing of them.

    Megatron's function of this name broadcasts and cuts the fields of its own batches, and breaks
    where tensor or context parallelism needs that.

    Args:
        data_iterator: this rank's; a list of one per chunk of the model under interleaved
            pipelines; None in places of ranks that read no data.
    """
    machine = get_rerun_state_machine()
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while machine.should_run_forward_backward(data_iterator):
        for _ in range(get_num_microbatches()):
            for iterator in chunks:
                if iterator is not None:
                    next(iterator)
