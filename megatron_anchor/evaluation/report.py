"""Results as Markdown tables, which read well on a console too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_anchor.evaluation.published import mean_name
from megatron_anchor.evaluation.summary import Group, differences
from megatron_anchor.terminal import escaped

PERPLEXITY_WORDS = """\
Perplexity is shown beside the scores because it misleads: most tokens are foretold well from the
few hundred before them, so a model that loses sight of what is far away hardly has a worse mean.
The rows of late positions say how it predicts there, not whether it can find something there; the
retrieval tasks ask that."""


def as_markdown(results: Mapping[str, Any]) -> str:
    """Write all tables: scores of each group, the groups side by side, depths, perplexity."""
    groups: Mapping[str, Group] = results["groups"]
    parts = [_scores(label, group) for label, group in groups.items() if group["scores"]]
    if len(groups) > 1:
        parts.append(_side_by_side(groups))
    parts += [_depths(label, group) for label, group in groups.items() if group["depths"]]
    if any(group["perplexity"] for group in groups.values()):
        parts.append(_perplexity(groups))
    parts += [f"Note: {escaped(note)}." for note in differences(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def lengths_of(group: Group) -> list[int]:
    """The lengths that a group was evaluated at, the shortest first."""
    return sorted({int(n) for row in (*group["scores"].values(), group["mean"]) for n in row})


def short_length(length: int) -> str:
    """4096 as 4K."""
    return f"{length >> 10}K" if length % 1024 == 0 else str(length)


def _scores(label: str, group: Group) -> str:
    lengths = lengths_of(group)
    several = len(group["checkpoints"]) > 1
    rows = [
        [name, *(cell_text(row.get(str(n)), several=several) for n in lengths)]
        for name, row in {**group["scores"], mean_name(len(group["scores"])): group["mean"]}.items()
    ]
    label, told = escaped(label), escaped(", ".join(group["checkpoints"]))
    first = next(iter(next(iter(group["scores"].values())).values()))
    if several:
        spread = (
            f"mean and standard deviation over {len(group['checkpoints'])} checkpoints "
            "(least to largest)"
        )
    else:
        spread = "one checkpoint; behind +-, the standard error over its samples"
    head = f"### {label}\n\nScores in percent, {first['samples']} samples each; {spread}: {told}."
    notes = " ".join([group["mean_note"], *group["score_notes"]])
    shown = table(["task", *map(short_length, lengths)], rows)
    parts = [head, shown, _averages(group, lengths), notes, escaped(group["comparable"])]
    return "\n\n".join(part for part in parts if part)


def _averages(group: Group, lengths: Sequence[int]) -> str:
    """RULER's averages of the last row over the lengths."""
    found = group["averages"]
    if not found:
        return ""
    return (
        f"Over {', '.join(map(short_length, lengths))}: Avg {found['avg']:.1f}; wAvg "
        f"{found['wavg_inc']:.1f} with weights 1 to {len(lengths)} (the longest counts most), "
        f"{found['wavg_dec']:.1f} with {len(lengths)} to 1."
    )


def cell_text(cell: Mapping[str, Any] | None, *, several: bool) -> str:
    """A cell of a table."""
    if cell is None:
        return "-"
    if several:
        return f"{cell['mean']:.1f} +- {cell['std']:.1f} ({cell['min']:.1f} to {cell['max']:.1f})"
    error = f" +- {cell['stderr']:.1f}" if "stderr" in cell else ""
    return f"{cell['mean']:.1f}{error}"


def _side_by_side(groups: Mapping[str, Group]) -> str:
    """Means of all groups, and what each has more than the first."""
    labels = list(groups)
    lengths = sorted({n for group in groups.values() for n in lengths_of(group)})
    names = list(dict.fromkeys(name for group in groups.values() for name in group["scores"]))
    shared = [n for n in names if all(n in group["scores"] for group in groups.values())]
    mean, rows = mean_name(len(names)), []
    for name in [*names, mean] if len(shared) == len(names) else names:
        for length in lengths:
            cells = [
                (group["mean"] if name == mean else group["scores"].get(name, {})).get(str(length))
                for group in groups.values()
            ]
            means = [None if cell is None else cell["mean"] for cell in cells]
            more = [
                "-" if mean is None or means[0] is None else f"{mean - means[0]:+.1f}"
                for mean in means[1:]
            ]
            shown = ["-" if mean is None else f"{mean:.1f}" for mean in means]
            rows.append([name, short_length(length), *shown, *more])
    if not rows:
        return ""
    head = ["task", "length", *labels, *(f"{label} - {labels[0]}" for label in labels[1:])]
    return f"### {escaped(' against '.join(labels))}\n\n{table(head, rows)}"


def _depths(label: str, group: Group) -> str:
    lengths = sorted({int(n) for row in group["depths"].values() for n in row})
    rows = [
        [f"{depth} %", *(f"{row[str(n)]['mean']:.1f}" for n in lengths)]
        for depth, row in group["depths"].items()
    ]
    head = ["depth", *map(short_length, lengths)]
    return f"### {escaped(label)}: depth of the needle\n\n{table(head, rows)}"


def _perplexity(groups: Mapping[str, Group]) -> str:
    with_it = {label: group for label, group in groups.items() if group["perplexity"]}
    longest = max((group["perplexity"] for group in with_it.values()), key=len)
    rows = []
    for number, row in enumerate(longest):
        is_all = number == len(longest) - 1
        cells = []
        for group in with_it.values():
            own = group["perplexity"]
            found = own[-1] if is_all else own[number] if number < len(own) - 1 else None
            cells.append("-" if found is None else f"{found['perplexity']:.2f}")
        place = "all" if is_all else f"{row['from']} to {row['to']}"
        rows.append([place, str(row["tokens"]), *cells])
    head = ["position", "tokens", *with_it]
    return f"### Perplexity by position\n\n{table(head, rows)}\n\n{PERPLEXITY_WORDS}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of even width."""
    head, rows = list(map(escaped, head)), [list(map(escaped, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(head), line(rule), *map(line, rows)])
