"""Rows for `torch.cuda`: pretended devices, one generator, no device memory."""

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from megatron_anchor.patches import Patch, instead

CAPABILITY = (10, 0)
"""Compute capability that is reported. Below 10 Megatron insists on CUDA_DEVICE_MAX_CONNECTIONS=1
for tensor parallelism, and on its absence for FSDP; neither means anything here."""

_current_device = 0


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def _set_device(device: Any) -> None:
    global _current_device
    _current_device = _index(device)


class Device:
    """Stands in for `torch.cuda.device`: the current device within a `with` block."""

    def __init__(self, device: Any) -> None:
        """Take an index, a name, a `torch.device` or None, which changes nothing."""
        self.idx = _current_device if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = _current_device
        _set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        _set_device(self.before)


def _device_count() -> int:
    """Return one device for every process of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU in place of a GPU",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count(),
    )


def _success(*args: Any) -> int:
    return 0


_DEVICE = "Megatron insists on a CUDA device for every process"
_RNG = "the CPU's generator stands in for the GPU's"
_PROFILER = "there is no driver to tell which iterations are to be profiled"
_MEMORY = "there is no device memory to report or to free: all figures are 0"


def _row(target: str, stand_in: Any, reason: str) -> Patch:
    return Patch(target=target, replacement=instead(stand_in), reason=reason)


ROWS = (
    _row("torch.cuda:is_available", lambda: True, _DEVICE),
    _row("torch.cuda:is_initialized", lambda: True, _DEVICE),
    _row("torch.cuda:device_count", _device_count, _DEVICE),
    _row("torch.cuda:current_device", lambda: _current_device, _DEVICE),
    _row("torch.cuda:set_device", _set_device, _DEVICE),
    _row("torch.cuda:device", Device, _DEVICE),
    _row("torch.cuda:get_device_properties", _properties, _DEVICE),
    _row("torch.cuda:default_generators", (torch.default_generator,) * 1024, _RNG),
    _row("torch.cuda.memory:memory_stats", lambda device=None: defaultdict(int), _MEMORY),
    _row("torch.cuda.memory:mem_get_info", lambda device=None: (0, 0), _MEMORY),
    _row("torch.cuda:device_memory_used", lambda device=None: 0, _MEMORY),
    _row("torch.cuda.memory:reset_peak_memory_stats", lambda device=None: None, _MEMORY),
    _row(
        "torch.cuda:cudart",
        lambda: SimpleNamespace(cudaProfilerStart=_success, cudaProfilerStop=_success),
        _PROFILER,
    ),
    Patch(
        target="torch.accelerator:current_accelerator",
        replacement=instead(lambda check_available=False: None),
        reason="torch's own optimizers, data loader and checkpoints must know that it is a CPU",
    ),
)
