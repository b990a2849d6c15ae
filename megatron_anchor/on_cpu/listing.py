"""The table of replacements as text and as Markdown."""

import textwrap

from megatron_anchor.on_cpu.rows import ROWS
from megatron_anchor.on_cpu.settings import SETTINGS

_WRAPPER = textwrap.TextWrapper(
    width=96,
    initial_indent="  ",
    subsequent_indent="  ",
    break_long_words=False,
    break_on_hyphens=False,
)


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
        lines += [f"{reason}  [{host or 'Python'}]", *_WRAPPER.wrap(" ".join(targets))]
    lines.append("Settings of the process")
    lines += [f"  {setting.name}: {setting.reason}" for setting in SETTINGS]
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the table for the documentation: one line per reason."""
    lines = ["| why | what is replaced | host |", "|---|---|---|"]
    for reason, host, targets in grouped():
        names = ", ".join(f"`{target}`" for target in targets)
        lines.append(f"| {reason} | {names} | {host or 'Python'} |")
    lines += ["", "| setting of the process | why |", "|---|---|"]
    lines += [f"| {setting.name} | {setting.reason} |" for setting in SETTINGS]
    return "\n".join(lines)
