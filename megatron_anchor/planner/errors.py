"""What can be wrong with the question that a plan answers."""


class PlanError(ValueError):
    """A problem that the user can mend; the message shows value, place and remedy."""
