"""Print the oldest versions that setup.py allows, as constraints for pip.

    python requirements/lower_bounds.py >oldest.txt

Only what every installation needs has a line: optional packages are the newest that go with it.
"""

from __future__ import annotations

import ast
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.py"


def lower_bounds(setup: str) -> list[str]:
    """`name==version` of every requirement in the text of a setup.py.

    Raises:
        ValueError: a requirement has no lower bound.
    """
    call = next(
        node
        for node in ast.walk(ast.parse(setup))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    [required] = [word.value for word in call.keywords if word.arg == "install_requires"]
    return [_lower_bound(text) for text in ast.literal_eval(required)]


def _lower_bound(requirement: str) -> str:
    name, found, bounds = requirement.partition(">=")
    if not found:
        raise ValueError(f"setup.py: {requirement!r} has no lower bound; write {requirement}>=...")
    return f"{name}=={bounds.split(',')[0]}"


if __name__ == "__main__":
    print("\n".join(lower_bounds(SETUP.read_text())))
