"""The one error that is for the user."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user can change; the message says the value, the place and the remedy.

    Commands end with that message and exit code 2 (`megatron_anchor.command_line.run`). Any other
    exception but an `OSError` is a bug and keeps its traceback.
    """
