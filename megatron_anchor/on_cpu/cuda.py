"""Rows for `torch.cuda`: one pretended device per process, no streams, no device memory."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_anchor.on_cpu.table import Row, instead

CAPABILITY = (9, 0)
"""Compute capability that is reported: one that launch scripts are commonly written for."""

_current = 0


def _set_device(device: Any) -> None:
    global _current
    index = device if isinstance(device, int) else torch.device(device).index
    _current = index or 0


class Stream:
    """Stands in for `torch.cuda.Stream`: everything queued on it is already done."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", _current)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority, as `torch.cuda.Stream` does."""
        return 0, 0

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event (a new one by default) and return it."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """Stands in for `torch.cuda.Event`: keeps the wall time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Keep the time."""
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds of wall time from this event to `end`."""
        if self.seconds is None or end.seconds is None:
            raise ValueError("elapsed_time needs both events recorded; call record() on each")
        return 1000 * (end.seconds - self.seconds)


_STREAM = Stream()


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU in place of a GPU",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count(),
    )


def _row(name: str, stand_in: Any, reason: str) -> Row:
    module, _, attribute = f"torch.cuda.{name}".rpartition(".")
    return Row(target=f"{module}:{attribute}", replacement=instead(stand_in), reason=reason)


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _none(*args: Any, **kwargs: Any) -> None:
    return None


_DEVICE = "Megatron insists on one CUDA device per process"
_STREAMS = "there are no streams: work is done when the call returns"
_RNG = "the CPU's generator stands in for the GPU's"
_MEMORY = "there is no device memory to report or to free"

_stands: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("is_available", lambda: True, _DEVICE),
    ("is_initialized", lambda: True, _DEVICE),
    ("_lazy_init", _none, _DEVICE),
    ("init", _none, _DEVICE),
    ("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _DEVICE),
    ("current_device", lambda: _current, _DEVICE),
    ("set_device", _set_device, _DEVICE),
    ("get_device_properties", _properties, _DEVICE),
    ("get_device_capability", lambda device=None: CAPABILITY, _DEVICE),
    ("get_device_name", lambda device=None: _properties().name, _DEVICE),
    ("is_bf16_supported", lambda including_emulation=True: True, _DEVICE),
    ("Stream", Stream, _STREAMS),
    ("Event", Event, _STREAMS),
    ("stream", _nothing, _STREAMS),
    ("set_stream", _none, _STREAMS),
    ("current_stream", lambda device=None: _STREAM, _STREAMS),
    ("default_stream", lambda device=None: _STREAM, _STREAMS),
    ("synchronize", _none, _STREAMS),
    ("is_current_stream_capturing", lambda: False, _STREAMS),
    ("random.manual_seed", torch.default_generator.manual_seed, _RNG),
    ("random.manual_seed_all", torch.default_generator.manual_seed, _RNG),
    ("random.get_rng_state", lambda device="cuda": torch.get_rng_state(), _RNG),
    ("random.set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state), _RNG),
    ("default_generators", (torch.default_generator,) * 64, _RNG),
    ("empty_cache", _none, _MEMORY),
    ("memory_stats", lambda device=None: defaultdict(int), _MEMORY),
    ("memory_allocated", _zero, _MEMORY),
    ("memory_reserved", _zero, _MEMORY),
    ("max_memory_allocated", _zero, _MEMORY),
    ("max_memory_reserved", _zero, _MEMORY),
    ("reset_peak_memory_stats", _none, _MEMORY),
    ("device_memory_used", _zero, _MEMORY),
)

ROWS = (
    *(_row(*stand) for stand in _stands),
    Row(
        target="torch.accelerator:current_accelerator",
        replacement=instead(lambda check_available=False: None),
        reason="torch itself (optimizers, data loader, checkpointing) must know it runs on a CPU",
    ),
)
