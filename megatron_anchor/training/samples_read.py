"""Which samples a run has read so far, kept beside its checkpoints and compared on resume.

Megatron's blend counts from its first sample, whatever it was before. Other weights, or another
corpus, move the place where each corpus goes on: samples come again, and others never come.

`samples_read.json` in the --save folder lists the blends of a run, each with the number of the
sample that it began at. It is written when training begins; what a checkpoint of an older
iteration has not read is dropped when that is loaded.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.packing.blend import corpora_of, order_of_blend
from megatron_anchor.packing.cache import digest
from megatron_anchor.packing.identity import without_paths
from megatron_anchor.whole_files import atomic_write_text

FILE = "samples_read.json"


@dataclass(frozen=True, kw_only=True)
class Blend:
    """What a part of the run was drawn from."""

    first: int
    """number of the run's sample that it began at"""
    weights: tuple[float, ...]
    """with the sum 1"""
    paths: tuple[str, ...]
    corpora: tuple[Mapping[str, Any], ...]
    """what the samples of each corpus depend on, without paths"""

    @property
    def names(self) -> list[str]:
        """The same for corpora with the same samples."""
        return [digest(corpus) for corpus in self.corpora]

    def is_drawn_as(self, other: Blend) -> bool:
        """Whether sample i of both is the same for every i."""
        return (self.weights, self.names) == (other.weights, other.names)

    def counts(self, samples: int) -> np.ndarray:
        """int64, samples of each corpus in the first so many of the blend."""
        if len(self.weights) == 1:
            return np.array([samples])
        corpus_N, _ = order_of_blend(list(self.weights), samples)
        return np.bincount(corpus_N, minlength=len(self.weights))


def blend_of(train: Any, *, first: int) -> Blend:
    """Describe a training dataset.

    Args:
        train: packed dataset, or Megatron's blend of such.
        first: number of the run's sample that it is read from.
    """
    corpora = list(corpora_of(train))
    return Blend(
        first=first,
        weights=tuple(getattr(train, "weights", [1.0])),
        paths=tuple(str(corpus.dataset_path) for corpus in corpora),
        corpora=tuple(without_paths(corpus.sample_identifiers) for corpus in corpora),
    )


def note(train: Any, args: Namespace, *, needed: int) -> list[str]:
    """Write down what is read from now on; call it on one rank, before training.

    Args:
        train: packed dataset, or Megatron's blend of such.
        args: Megatron's, with the state of the checkpoint if one was loaded.
        needed: samples of the whole run.

    Returns:
        Warnings for the user: what comes again or never, and files that cannot be used.
    """
    if args.skip_train or getattr(args, "phase_transition_iterations", None):
        return []  # every phase begins at its own first sample
    warnings: list[str] = []
    first = args.consumed_train_samples
    before: list[Blend] = []
    if first and args.load:
        try:
            before = [blend for blend in read(Path(args.load, FILE)) if blend.first < first]
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.append(
                f"{Path(args.load, FILE)} cannot be read ({type(error).__name__}: {error}), so it "
                "is not known whether the training data changed"
            )
    now = blend_of(train, first=first)
    if before and not before[-1].is_drawn_as(now):
        warnings += _changes(before, now, needed=needed)
    if not before or not before[-1].is_drawn_as(now):
        before.append(now)
    if args.save:
        try:
            write(Path(args.save, FILE), before)
        except OSError as error:  # the checkpoints matter more, and will say so themselves
            warnings.append(
                f"{Path(args.save, FILE)} cannot be written ({error}): a resumed run will not "
                "know whether its training data changed"
            )
    return warnings


def read(path: Path) -> list[Blend]:
    """The blends of a run so far; none where nothing was written down.

    Raises:
        ValueError, KeyError, TypeError: it is no such file.
    """
    if not path.exists():
        return []
    return [
        Blend(
            first=int(blend["first"]),
            weights=tuple(map(float, blend["weights"])),
            paths=tuple(blend["paths"]),
            corpora=tuple(blend["corpora"]),
        )
        for blend in json.loads(path.read_text(encoding="utf-8"))["blends"]
    ]


def write(path: Path, blends: Iterable[Blend]) -> None:
    """Write them, whole or not at all; a file that says the same is left alone."""
    text = json.dumps({"blends": [asdict(blend) for blend in blends]}, indent=1)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write_text(path) as stream:
        stream.write(text)


def _changes(before: list[Blend], now: Blend, *, needed: int) -> list[str]:
    """What another blend means for each corpus, from the samples read so far."""
    if not {name for blend in before for name in blend.names} & set(now.names):
        return [
            f"none of the training data is that of the first {now.first} samples of this run "
            f"({_other_settings(before[-1], now)}): which of their tokens come again is not known"
        ]
    spans, from_start = _samples_read(before, now.first), before[0].first == 0
    lines = []
    for name, path, begin, end in zip(
        now.names, now.paths, now.counts(now.first), now.counts(needed), strict=True
    ):
        done = spans.get(name, [])
        again = sum(_overlap(span, (begin, end)) for span in done)
        never = begin - sum(_overlap(span, (0, begin)) for span in done) if from_start else 0
        if again or never:
            lines.append(
                f"{path} goes on at its sample {begin}: {again} samples that were read come again, "
                f"{never} earlier ones never come"
            )
    if lines:
        lines.insert(
            0,
            f"the blend of the training data is another than in the first {now.first} samples of "
            f"this run (weights {_in_words(before[-1])} before, {_in_words(now)} now):",
        )
        lines.append(
            "keep the blend to read every sample in its turn, or begin the new one at its first "
            "sample with --finetune"
        )
    return ["\n  ".join(lines)] if lines else []


def _samples_read(blends: list[Blend], until: int) -> dict[str, list[tuple[int, int]]]:
    """Corpus to the spans [first, last) of its samples that were read; spans do not overlap."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for number, blend in enumerate(blends):
        last = blends[number + 1].first if number + 1 < len(blends) else until
        begins, ends = blend.counts(blend.first), blend.counts(last)
        for name, begin, end in zip(blend.names, begins, ends, strict=True):
            spans.setdefault(name, []).append((int(begin), int(end)))
    return {name: _merged(found) for name, found in spans.items()}


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def _in_words(blend: Blend) -> str:
    return " ".join(
        f"{weight:.4g} {path}" for weight, path in zip(blend.weights, blend.paths, strict=True)
    )


def _other_settings(before: Blend, now: Blend) -> str:
    """The settings that differ between the first corpora of both."""
    old, new = before.corpora[0], now.corpora[0]
    differing = [name for name in new if old.get(name) != new[name]]
    simple = [
        f"{name} {old.get(name)} before, {new[name]} now"
        for name in differing
        if not isinstance(new[name], Mapping | list)
    ]
    return ", ".join(simple) or "other documents"
