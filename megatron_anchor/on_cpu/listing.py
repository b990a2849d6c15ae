"""The table of replacements as text and as Markdown."""

import textwrap

from megatron_anchor.on_cpu.rows import ROWS
from megatron_anchor.on_cpu.settings import SETTINGS


def grouped() -> list[tuple[str, str | None, list[str]]]:
    """Return (reason, host, targets) for every idea of the table, in its order."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for row in ROWS:
        groups.setdefault((row.reason, row.host), []).append(row.target)
    return [(reason, host, targets) for (reason, host), targets in groups.items()]


def as_text() -> str:
    """Return the table for a terminal."""
    lines = []
    for reason, host, targets in grouped():
        lines += [f"{reason}  [{host or 'Python'}]"]
        lines += textwrap.wrap(" ".join(targets), 96, initial_indent="  ", subsequent_indent="  ")
    lines.append("Settings of the process")
    lines += [f"  {setting.name}: {setting.reason}" for setting in SETTINGS]
    return "\n".join(lines)
