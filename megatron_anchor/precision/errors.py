"""What can go wrong with a measurement, as the user sees it."""

from __future__ import annotations


class PrecisionError(ValueError):
    """A problem that the user can mend; the message shows value, place and remedy."""
