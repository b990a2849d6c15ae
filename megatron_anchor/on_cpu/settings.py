"""Process-wide settings that go with the replacements."""

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass


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


GPU_LIBRARIES_MISSING = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine>=",
)


def _has_no_cuda_runtime(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()


def _quiet_import_warnings() -> None:
    for message in GPU_LIBRARIES_MISSING:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_has_no_cuda_runtime)


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
        apply=_quiet_import_warnings,
        reason="libraries for GPUs: nothing is missing here, and every rank says it ten times",
    ),
    Setting(
        name="destroy_process_group() at exit",
        apply=_close_groups_at_exit,
        reason="gloo's threads can abort a process that exits while its groups are open",
    ),
)
