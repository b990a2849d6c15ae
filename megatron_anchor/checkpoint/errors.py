"""What can go wrong with a checkpoint, as the user sees it."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A problem that the user can mend; the message shows value, place and remedy."""
