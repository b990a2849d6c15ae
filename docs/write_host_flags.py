"""Write docs/host-flags.md from the table of Megatron's arguments in `training.host_flags`.

python docs/write_host_flags.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_anchor import compat
from megatron_anchor.training import host_flags

PAGE = Path(__file__).with_name("host-flags.md")

HEAD = """\
# Megatron's flags

`megatron_anchor.pretrain_gpt` parses every argument of Megatron's `pretrain_gpt.py`. Each of them
is one of three here:

- **carried**: it does what it does in Megatron's program;
- **refused**: the run ends at start, with the reason;
- **without effect**: nothing here reads it, and a run that sets it is told so once, at start.

An argument that a newer Megatron added is none of them, and is refused where it is set. The
arguments that Megatron's program adds for NVIDIA ModelOpt are unknown here.

This page is for megatron-core {version}: {total} arguments, of which {carried} are carried,
{refused} refused and {without_effect} without effect. `docs/write_host_flags.py` writes it from
`megatron_anchor/training/host_flags`; tests hold both against Megatron's parser. Carried arguments
that cannot be meant together are refused by the rules in `megatron_anchor/training/validation.py`.
"""


def page() -> str:
    """The page's text."""
    flags, rows = compat.host_flags(), host_flags.ROWS
    counts = {
        verdict: sum(rows[name].verdict == verdict for name in flags)
        for verdict in ("carried", "refused", "without effect")
    }
    head = HEAD.format(
        version=compat.host_version(),
        total=len(flags),
        carried=counts["carried"],
        refused=counts["refused"],
        without_effect=counts["without effect"],
    )
    return "\n".join([head, *_refused(), *_values(), *_without_effect(), *_carried()])


def _refused() -> Iterator[str]:
    yield "## Refused\n"
    yield from _table(
        "why, and what to do instead",
        ((name, reason) for name, reason in host_flags.REFUSED.items()),
    )


def _values() -> Iterator[str]:
    yield "## Refused for some values, or without Transformer Engine\n"
    rows: list[tuple[str, str]] = []
    for name, values in host_flags.REFUSED_VALUES.items():
        for reason in dict.fromkeys(values.values()):
            named = ", ".join(f"`{value}`" for value, one in values.items() if one == reason)
            rows.append((name, f"{named}: {reason}"))
    for name, reason in host_flags.NEEDS_ITS_LAYERS.items():
        rows.append((name, f"needs `--transformer-impl transformer_engine`: {reason}"))
    for name, reason in host_flags.NEEDS_TRANSFORMER_ENGINE.items():
        rows.append((name, f"needs Transformer Engine: {reason}"))
    yield from _table("values, and why", rows)


def _without_effect() -> Iterator[str]:
    yield "## Without effect\n"
    yield "| why | flags |\n|---|---|"
    for reason, names in host_flags.WITHOUT_EFFECT.items():
        yield f"| {reason} | {_named(names.split())} |"
    yield ""


def _carried() -> Iterator[str]:
    yield "## Carried\n"
    yield "| who reads them | flags |\n|---|---|"
    for by, names in host_flags.CARRIED.items():
        yield f"| {by} | {_named(names.split())} |"
    yield ""


def _table(heading: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| flag | {heading} |\n|---|---|"
    for name, text in rows:
        if name in compat.host_flags():
            yield f"| {_named([name])} | {text} |"
    yield ""


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for name in names for flag in compat.host_flags()[name].names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
