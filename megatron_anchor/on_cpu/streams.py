"""Rows for CUDA streams and events: work is done when the call that starts it returns."""

import time
from typing import Any

import torch

from megatron_anchor.patches import Patch, instead


class Stream:
    """Stands in for `torch.cuda.Stream`: everything queued on it is already done."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of `torch.cuda.Stream`."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority."""
        return 0, 0

    def wait_event(self, event: "Event") -> None:
        """Return at once."""

    def wait_stream(self, stream: "Stream") -> None:
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
        """Take the arguments of `torch.cuda.Event`."""
        self.seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Keep the time."""
        self.seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds of wall time from this event to `end_event`.

        Raises:
            ValueError: one of the two was never recorded.
        """
        if self.seconds is None or end_event.seconds is None:
            raise ValueError("elapsed_time got an event that was not recorded; call record() first")
        return 1000 * (end_event.seconds - self.seconds)


_THE_STREAM = Stream()


_REASON = "there are no streams: work is done when the call returns"


def _row(target: str, stand_in: Any) -> Patch:
    return Patch(target=target, replacement=instead(stand_in), reason=_REASON)


ROWS = (
    _row("torch.cuda:Stream", Stream),
    _row("torch.cuda:Event", Event),
    _row("torch.cuda:set_stream", lambda stream: None),
    _row("torch.cuda:current_stream", lambda device=None: _THE_STREAM),
    _row("torch.cuda:default_stream", lambda device=None: _THE_STREAM),
    _row("torch.cuda:synchronize", lambda device=None: None),
    _row("torch.cuda:is_current_stream_capturing", lambda: False),
    _row("torch:Tensor.record_stream", lambda self, stream: None),
)
