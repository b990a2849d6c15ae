"""Make a prompt as long as asked, with few looks at its true length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_anchor.errors import UserError

TOLERANCE = 1000
"""The search ends where less than 1 / TOLERANCE of the length is missing."""
_SECANTS = 6  # steps by estimate; then halves, which always end


class TooShortError(UserError):
    """Even the smallest prompt is longer than asked; `least` is its number of tokens."""

    def __init__(self, least: int) -> None:
        super().__init__(f"needs at least {least} tokens")
        self.least = least


def largest_fitting(
    count: Callable[[int], int], estimate: np.ndarray, *, target: int
) -> tuple[int, int]:
    """Find how much of a growing part fits.

    A secant search over estimated tokens, guarded by bisection: two or three exact counts are
    enough where the estimates are close, and ``log2(len(estimate))`` more where they are useless.

    Args:
        count: exact tokens of the prompt with ``k`` steps of the growing part.
        estimate: float [steps + 1], about what the first ``k`` steps cost; increasing.
        target: tokens that must not be exceeded.

    Returns:
        The steps, and the exact tokens with them; one more step is too long, or less than
        1 / 1000 of ``target`` is missing.

    Raises:
        TooShortError: if not even zero steps fit.
    """
    steps = len(estimate) - 1
    low, low_count = 0, count(0)
    if low_count > target:
        raise TooShortError(low_count)
    high, high_count = steps + 1, 0  # known to be too long; 0: not counted
    slack = target // TOLERANCE
    for round_number in range(1 << 30):
        if high - low <= 1 or target - low_count <= slack:
            break
        missing = target - low_count
        if round_number >= _SECANTS:
            guess = (low + high) // 2
        else:
            scale = 1.0
            if high_count:
                scale = (estimate[high] - estimate[low]) / max(1, high_count - low_count)
                missing -= slack // 2
            guess = int(np.searchsorted(estimate, estimate[low] + missing * scale, "right")) - 1
        guess = min(max(guess, low + 1), high - 1)
        found = count(guess)
        if found <= target:
            low, low_count = guess, found
        else:
            high, high_count = guess, found
    assert low < steps or target - low_count <= target // 100, "the growing part is too small"
    return low, low_count
