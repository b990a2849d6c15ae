"""Patch for child processes: those that start afresh get the replacements too."""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_anchor.patches import Patch

_CHILD = Path(__file__).with_name("child.py")


class _EnableInChild:
    """Travels to a child process with its start-up data; unpickling it runs `child.py` there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (str(_CHILD),)


def enabling(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap the collection of start-up data for a child process."""

    @functools.wraps(original)
    def on_cpu(name: str) -> dict[str, Any]:
        return {**original(name), "on_cpu": _EnableInChild()}

    return on_cpu


ROWS = (
    Patch(
        target="multiprocessing.spawn:get_preparation_data",
        replacement=enabling,
        reason="spawned processes (Megatron's checkpoint worker, data loaders) start without the "
        "replacements",
        host=None,
    ),
)
