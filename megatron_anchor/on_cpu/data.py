"""Rows for `torch.utils.data`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_anchor.patches import Patch


def without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DataLoader.__init__`: ask for no pinned memory."""

    @functools.wraps(original)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.pin_memory = False

    return on_cpu


def leaving_the_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DataLoader.__iter__`: its draw of a seed for workers does not move the generator."""

    @functools.wraps(original)
    def on_cpu(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    return on_cpu


ROWS = (
    Patch(
        target="torch.utils.data:DataLoader.__init__",
        replacement=without_pinning,
        reason="pinned memory needs a driver",
    ),
    Patch(
        target="torch.utils.data:DataLoader.__iter__",
        replacement=leaving_the_generator,
        reason="data loaders draw a seed on the CPU: the generator that dropout uses must not "
        "move by it, or a resumed run has other dropout than an uninterrupted one",
    ),
)
