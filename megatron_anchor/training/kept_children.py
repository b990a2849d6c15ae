"""Processes that a run started, and needs while it saves after SIGTERM.

A job's end reaches every process. The rank has Megatron's handler; its helpers would die of the
signal, and the rank of their death: the manager of the checkpoint writers, which lives on after the
first save, the process of --async-save, and the workers that read samples. They are started with
SIGTERM blocked, and end with the rank.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from megatron_anchor.patches import MEGATRON, TORCH, Patch


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread; processes started meanwhile keep the mask.

    A signal to this thread that comes in between is delivered at the end.
    """
    # Python's tracker of shared memory unblocks the signal where it is started in between.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def deaf_to_sigterm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that starts processes: they are not ended by SIGTERM."""

    @functools.wraps(original)
    def starting(*args: Any, **kwargs: Any) -> Any:
        with sigterm_blocked():
            return original(*args, **kwargs)

    return starting


_SAVES = "megatron.core.dist_checkpointing.strategies"
_LOST = "SIGTERM to all processes of a job ends it without a checkpoint"

PATCHES = (
    Patch(
        target=f"{_SAVES}.filesystem_async:get_write_results_queue",
        replacement=deaf_to_sigterm,
        reason="the manager of the checkpoint writers outlives SIGTERM",
        lost=_LOST,
        host=MEGATRON,
    ),
    Patch(
        target=f"{_SAVES}.async_utils:PersistentAsyncCaller._get_process",
        replacement=lambda original: classmethod(deaf_to_sigterm(original.__func__)),
        reason="the writer of --async-save outlives SIGTERM",
        lost=_LOST,
        host=MEGATRON,
    ),
    Patch(
        target="torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__",
        replacement=deaf_to_sigterm,
        reason="workers that read samples outlive SIGTERM",
        lost=_LOST,
        host=TORCH,
    ),
)
"""For runs with --exit-signal-handler."""
