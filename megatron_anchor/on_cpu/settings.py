"""Process-wide settings that go with the replacements."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron_anchor.compat import quiet_imports_without_gpu


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the process."""

    name: str
    apply: Callable[[], None]
    reason: str


def _no_compiler() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True


def _shared_generator_is_fine(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _quiet_rng_warning() -> None:
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_shared_generator_is_fine)


def _close_groups() -> None:
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _close_groups_at_exit() -> None:
    import torch.distributed  # noqa: F401

    atexit.unregister(_close_groups)
    atexit.register(_close_groups)


SETTINGS = (
    Setting(
        name="TORCHDYNAMO_DISABLE=1",
        apply=_no_compiler,
        reason="Megatron compiles its fused functions, and the compiler asks the CUDA driver",
    ),
    Setting(
        name="no 'CPU RNG state changed within GPU RNG context'",
        apply=_quiet_rng_warning,
        reason="the two generators are one: the warning comes at every dropout",
    ),
    Setting(
        name="no 'Apex is not installed', 'No CUDA runtime is found' and their like",
        apply=quiet_imports_without_gpu,
        reason="libraries for GPUs: nothing is missing here, and every rank says it ten times",
    ),
    Setting(
        name="destroy_process_group() at exit",
        apply=_close_groups_at_exit,
        reason="gloo's threads can abort a process that exits while its groups are open",
    ),
)
