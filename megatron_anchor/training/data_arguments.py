"""What the data arguments say, before a corpus is opened: weights, splits, missing files."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_anchor.errors import UserError

ENDS = (".bin", ".idx")
SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's own where --data-path comes without --split."""


class Blend(NamedTuple):
    """A list of corpora as the user gave it."""

    origin: str
    """The flag, and the file that it names."""
    weights: list[str]
    """Empty where the corpora weigh by their length."""
    prefixes: list[str]


def blends(args: Namespace) -> Iterator[tuple[str | None, Blend]]:
    """All lists of corpora, each with its split; None is a list that --split divides.

    Raises:
        UserError: a file of corpora cannot be read, or a list is no list of corpora.
    """
    if args.data_path:
        yield None, _blend("--data-path", args.data_path)
    if args.data_args_path:
        origin = f"--data-args-path {args.data_args_path}"
        yield None, _blend(origin, _read(origin, args.data_args_path).split())
    for split in SPLITS:
        if entries := getattr(args, f"{split}_data_path"):
            yield split, _blend(f"--{split}-data-path", entries)
    if args.per_split_data_args_path:
        yield from _per_split(args.per_split_data_args_path)


def refusals(args: Namespace) -> Iterator[str]:
    """Say what is wrong with weights and splits."""
    try:
        given = list(blends(args))
    except ValueError as error:
        yield str(error)
        return
    for _, blend in given:
        yield from _weights(blend)
    if not given:
        return
    splits = {split for split, _ in given}
    if None in splits:
        yield from _shares(args)
        return
    if args.split is not None:
        yield (
            f"--split {args.split} divides the corpora of --data-path; leave it out where every "
            "split has corpora of its own"
        )
    if "valid" not in splits and evaluates(args):
        yield _nothing_to_evaluate(args, given[0][1].origin + " names none", "--valid-data-path")


def require_corpora(args: Namespace) -> None:
    """Look whether the files of all corpora are there, on the ranks that will open them.

    Args:
        args: arguments that `refusals` finds nothing wrong with.

    Raises:
        UserError: with all files that are missing.
    """
    if args.rank % args.tensor_model_parallel_size:
        return
    prefixes = dict.fromkeys(prefix for _, blend in blends(args) for prefix in blend.prefixes)
    # Paths with a scheme are in an object store, which the dataset refuses by name.
    files = [f"{prefix}{end}" for prefix in prefixes if "://" not in prefix for end in ENDS]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise UserError(
            "these files of the corpora are missing; name each corpus without .bin and .idx:\n  - "
            + "\n  - ".join(missing)
        )


def evaluates(args: Namespace) -> bool:
    """Whether Megatron evaluates, at the latest after training."""
    return bool(args.full_validation or args.eval_iters)


def _blend(origin: str, entries: list[str]) -> Blend:
    """Read a list as Megatron does: pairs of weight and prefix, else prefixes."""
    weights, prefixes = entries[::2], entries[1::2]
    numbers = [_number(weight) is not None for weight in weights]
    if len(entries) % 2 or not any(numbers):
        return Blend(origin, [], entries)
    if not all(numbers):
        raise UserError(
            f"{origin} gives a weight to some corpora and none to others: "
            f"{weights[numbers.index(False)]!r} stands where a weight is expected; write WEIGHT "
            "PREFIX for each corpus, or prefixes alone"
        )
    return Blend(origin, weights, prefixes)


def _per_split(path: str) -> Iterator[tuple[str, Blend]]:
    origin = f"--per-split-data-args-path {path}"
    try:
        lists = json.loads(_read(origin, path))
    except json.JSONDecodeError as error:
        raise UserError(f"{origin} is not JSON: {error}") from error
    if not isinstance(lists, dict) or not set(SPLITS) <= lists.keys():
        raise UserError(
            f"{origin} must be a JSON object with a list of corpora, or null, for each of "
            f"{', '.join(SPLITS)}"
        )
    for split in SPLITS:
        entries = lists[split]
        if isinstance(entries, str):
            entries = entries.split()
        if entries is not None and not isinstance(entries, list):
            raise UserError(f"{origin}: {split} is {entries!r}, expected a list of corpora")
        if entries:
            yield split, _blend(f"{origin}, {split},", [str(entry) for entry in entries])


def _weights(blend: Blend) -> Iterator[str]:
    for weight in blend.weights:
        value = _number(weight)
        assert value is not None
        if not (math.isfinite(value) and value > 0):
            yield (
                f"{blend.origin} gives the weight {weight}: expected a number above 0; leave that "
                "corpus out"
            )


def _shares(args: Namespace) -> Iterator[str]:
    """What --split leaves for training and validation; Megatron reads its numbers like this."""
    split = args.split
    if split is None and args.data_path is None:
        yield "--data-args-path needs --split, for instance --split 99,1,0"
        return
    shares = [_number(word) for word in re.findall(r"[.0-9]+", split or DEFAULT_SPLIT)]
    if not shares or None in shares or len(shares) > len(SPLITS) or not any(shares):
        yield f"--split {split}: expected up to three numbers, of which one is above 0"
        return
    if not shares[0] and not args.skip_train:
        yield f"--split {split} gives the training split nothing; give its first number a share"
    if not (len(shares) > 1 and shares[1]) and evaluates(args):
        yield _nothing_to_evaluate(args, f"--split {split} leaves it none", "--split")


def _nothing_to_evaluate(args: Namespace, why: str, flag: str) -> str:
    asked = "--full-validation" if args.full_validation else f"--eval-iters {args.eval_iters}"
    return (
        f"{asked} evaluates on the validation split, at the latest after training, but {why}; pass "
        f"--eval-iters 0, or give it documents ({flag})"
    )


def _read(origin: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{origin} cannot be read: {error.strerror}; name another") from error


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
