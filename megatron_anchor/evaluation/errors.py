"""What can be wrong with an evaluation, as the user sees it."""

from __future__ import annotations


class EvaluationError(ValueError):
    """A problem that the user can mend; the message shows value, place and remedy."""
