"""One decorator for the compiled loops of this package."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba at its first call; later processes load the machine code.

    The machine code is kept next to the source or in the user's cache directory. On a system
    where neither can be written numba refuses to cache: then each process compiles (seconds).
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # "cannot cache function ...: no locator available"
        return njit(nogil=True)(function)
