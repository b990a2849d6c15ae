"""Results in numbers: means over samples, and over the checkpoints of a group with their spread."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.evaluate import Evaluated
from megatron_anchor.evaluation.published import averages, comparability, mean_note, score_notes
from megatron_anchor.whole_files import atomic_write_text

RESULTS = "results.json"

Group = dict[str, Any]
"""``checkpoints`` (names), ``settings`` (of each), ``scores`` (task, then length, to a cell),
``mean`` (length to a cell), ``averages`` (over lengths, or None), ``mean_note``, ``score_notes``
and ``comparable`` (how these stand to RULER's),
``depths`` (percent, then length, to a cell) and ``perplexity`` (rows, or None). A cell has
``mean``, ``std``, ``min``, ``max`` over checkpoints in percent, each one's ``checkpoints``,
``samples`` of each and the ``stderr`` of one checkpoint's mean over its samples.
"""


def summarize(results: Sequence[Evaluated]) -> dict[str, Any]:
    """Average the checkpoints of every group.

    Returns:
        JSON values: ``{"groups": {label: Group}}``.
    """
    groups: dict[str, list[Evaluated]] = {}
    for result in results:
        groups.setdefault(result.checkpoint.label, []).append(result)
    return {"groups": {label: _group(members) for label, members in groups.items()}}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one value), least and largest."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
        "checkpoints": list(values),
    }


def _group(members: Sequence[Evaluated]) -> Group:
    settings = members[0].settings
    tasks, lengths = settings["tasks"], settings["seq_lengths"]
    scores = {
        task: {str(n): _cell(members, _is(task=task, length=n)) for n in lengths} for task in tasks
    }
    means = {}
    if tasks:
        for n in map(str, lengths):
            per_checkpoint = zip(*(scores[task][n]["checkpoints"] for task in tasks), strict=True)
            means[n] = spread([statistics.fmean(values) for values in per_checkpoint])
    return {
        "checkpoints": [member.checkpoint.name for member in members],
        "sources": [str(member.checkpoint.source) for member in members],
        "settings": [dict(member.settings) for member in members],
        "scores": scores,
        "mean": means,
        "mean_note": mean_note(settings) if tasks else "",
        "score_notes": score_notes(settings) if tasks else [],
        "averages": averages(means),
        "comparable": comparability(settings) if tasks else "",
        "depths": {
            f"{100 * depth:g}": {
                str(n): _cell(members, _is(depth=depth, length=n)) for n in lengths
            }
            for depth in settings["depths"]
            if any(record.get("depth") == depth for record in _samples(members[0]))
        },
        "perplexity": _perplexity(members) if settings["texts"] else None,
    }


def _is(**wanted: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda record: all(record.get(name) == value for name, value in wanted.items())


def _samples(member: Evaluated) -> Iterable[Mapping[str, Any]]:
    return (record for record in member.records.values() if record["kind"] == "sample")


def _cell(
    members: Sequence[Evaluated], belongs: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    found = [[100 * r["score"] for r in _samples(m) if belongs(r)] for m in members]
    errors = [
        statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        for scores in found
    ]
    return {
        **spread([statistics.fmean(scores) for scores in found]),
        "samples": len(found[0]),
        "stderr": statistics.fmean(errors),
    }


def _perplexity(members: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """One row a bucket of positions, and one for all; losses in nats a token."""
    sums = [_bucket_totals(member) for member in members]
    rows = []
    for bucket in [*range(max(len(nats) for nats, _ in sums)), None]:
        losses, counts = [], 0
        for nats, tokens in sums:
            part = slice(None) if bucket is None else slice(bucket, bucket + 1)
            counts = sum(tokens[part])
            losses.append(sum(nats[part]) / max(1, counts))
        rows.append(
            {
                "from": 1 if bucket is None else 1 << bucket,
                "to": None if bucket is None else (2 << bucket) - 1,
                "tokens": counts,
                "loss": spread(losses),
                "perplexity": math.exp(min(700.0, statistics.fmean(losses))),
            }
        )
    return rows


def _bucket_totals(member: Evaluated) -> tuple[list[float], list[int]]:
    nats: list[float] = []
    tokens: list[int] = []
    for record in member.records.values():
        if record["kind"] != "window":
            continue
        longer = len(record["nats"]) - len(nats)
        nats += [0.0] * longer
        tokens += [0] * longer
        for bucket, (loss, count) in enumerate(zip(record["nats"], record["tokens"], strict=True)):
            nats[bucket] += loss
            tokens[bucket] += count
    return nats, tokens


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    with atomic_write_text(path) as stream:
        stream.write(json.dumps(results, indent=1) + "\n")


def read_results(folders: Sequence[tuple[str | None, Path]]) -> dict[str, Any]:
    """Read saved results and put their groups side by side.

    Args:
        folders: label (None: those of the file), and a results folder or its JSON file.

    Raises:
        UserError: for a missing or damaged file, or two groups of one name.
    """
    groups: dict[str, Group] = {}
    for label, folder in folders:
        path = folder / RESULTS if folder.is_dir() else folder
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["groups"]
            for group in found.values():
                _check(group)
                if group["scores"]:  # files of earlier versions do not say
                    group["mean_note"] = mean_note(group["settings"][0])
                    group["score_notes"] = score_notes(group["settings"][0])
                    group["averages"] = averages(group["mean"])
                    group["comparable"] = comparability(group["settings"][0])
        except OSError as error:
            raise UserError(
                f"--plot {folder}: no {RESULTS} of a finished evaluation ({error})"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}: {error}); run the evaluation again: "
                "what was finished is kept"
            ) from error
        for name, group in found.items():
            called = name if label is None else label if len(found) == 1 else f"{label} {name}"
            if called in groups:
                raise UserError(
                    f"--plot: {called!r} is a group of two results; name them: LABEL=DIR"
                )
            groups[called] = group
    return {"groups": groups}


def _check(group: Group) -> None:
    """Touch all that is used later, so that damage shows here."""
    cells = [cell for row in (*group["scores"].values(), group["mean"]) for cell in row.values()]
    cells += [cell for row in group["depths"].values() for cell in row.values()]
    cells += [row["loss"] for row in group["perplexity"] or ()]
    for cell in cells:
        float(cell["mean"]), float(cell["min"]), float(cell["max"]), cell["std"]
    rows = (*group["scores"].values(), group["mean"], *group["depths"].values())
    [int(length) for row in rows for length in row], [float(depth) for depth in group["depths"]]
    for settings in group["settings"]:
        settings["tasks"], settings["seq_lengths"], settings["seed"]
    len(group["checkpoints"])


_COMPARABLE = (
    *("engine", "seed", "num_samples", "tokenizer", "first_token", "haystack", "texts"),
    *("questions", "qa_squad", "qa_hotpot", "depths", "qa_score"),
)


def differences(results: Mapping[str, Any]) -> list[str]:
    """Settings in which checkpoints were not asked the same, as notes."""
    everyone = [s for group in results["groups"].values() for s in group["settings"]]
    notes = []
    for name in _COMPARABLE:
        values = list(dict.fromkeys(json.dumps(settings.get(name)) for settings in everyone))
        if len(values) > 1:
            notes.append(f"not asked the same: {name} is {' and '.join(values)}")
    return notes
