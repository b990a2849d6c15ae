"""All ranks that read samples read the same ones, or the launch ends with what differs.

Every such rank opens the corpora itself. Nodes with copies on their own disks may hold different
ones, and Megatron would train on both without a word.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_anchor.errors import UserError
from megatron_anchor.packing.blend import corpora_of
from megatron_anchor.packing.cache import digest
from megatron_anchor.packing.config import PackedDatasetConfig
from megatron_anchor.packing.settings import PackingSettings

SETTINGS = (
    *(one.name for one in fields(PackingSettings)),
    "pad_token_id",
    "vocab_size",
)
"""Fields of the config that change samples and are no part of a dataset's description."""

MOST_FIELDS, MOST_GROUPS = 6, 4
"""Named in the message."""


class _Reading(NamedTuple):
    """What one rank reads."""

    host: str
    fields: dict[str, str]
    """Place in the descriptions to value, in the order of the datasets."""
    hashes: list[str]
    """Of every blend and corpus."""

    @property
    def key(self) -> str:
        return digest({"fields": self.fields, "hashes": self.hashes})


def require_same_data(datasets: Iterable[Any], config: PackedDatasetConfig) -> None:
    """Compare what this rank reads with all other ranks; every rank must call it.

    Args:
        datasets: packed datasets, blends and lists of them, the same on all ranks, or None on
            ranks that read none.
        config: their settings.

    Raises:
        UserError: two ranks read different data, with the differences, paths and ranks.
    """
    if not dist.is_initialized():
        return
    found = [dataset for dataset in datasets if dataset is not None]
    mine = _read(found, config) if any(True for _ in corpora_of(found)) else None
    groups: dict[str, list[int]] = {}
    for rank, key in enumerate(_gather(mine and mine.key)):
        if key is not None:
            groups.setdefault(key, []).append(rank)
    if len(groups) > 1:
        # Only now, and of one rank of each group: large blends have long descriptions.
        speaks = dist.get_rank() in [ranks[0] for ranks in groups.values()]
        readings = _gather(mine if speaks else None)
        raise UserError(_difference(readings, list(groups.values())))


def _gather(mine: Any) -> list[Any]:
    """What every rank gave."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _read(datasets: list[Any], config: PackedDatasetConfig) -> _Reading:
    fields = {name: str(getattr(config, name)) for name in SETTINGS}
    for number, dataset in enumerate(corpora_of(datasets)):
        place = f"{dataset.index_split.name} split of {dataset.dataset_path}"
        fields[f"#{number}"] = place
        described = dataset.unique_identifiers | {
            "target_weights": dataset.target_weights and dataset.target_weights.identity
        }
        fields |= {f"{place}: {name}": value for name, value in _flat(described)}
    tops = list(_tops(datasets))
    for blend in tops:
        if hasattr(blend, "weights"):
            fields[f"{blend.split.name} blend: weights"] = str(list(blend.weights))
    return _Reading(socket.gethostname(), fields, [top.unique_description_hash for top in tops])


def _tops(dataset: Any) -> Iterator[Any]:
    """The packed datasets and blends in lists of them."""
    if isinstance(dataset, list | tuple):
        for one in dataset:
            yield from _tops(one)
    elif dataset is not None:
        yield dataset


def _flat(description: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """("a.b", value) for every value of nested descriptions."""
    for name, value in description.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _difference(readings: list[_Reading], groups: list[list[int]]) -> str:
    """The message: what the first rank of each group reads, where they differ."""
    shown = [readings[ranks[0]] for ranks in groups]
    names = dict.fromkeys(name for reading in shown for name in reading.fields)
    differing = [n for n in names if len({reading.fields.get(n) for reading in shown}) > 1]
    lines = ["the ranks of this job do not read the same data, so each would train on its own:"]
    for ranks, reading in list(zip(groups, shown, strict=True))[:MOST_GROUPS]:
        lines.append(f"  {_ranks(ranks)} (first on {reading.host}), description {reading.key}")
        lines += [
            f"    {name} = {reading.fields.get(name, 'none')}" for name in differing[:MOST_FIELDS]
        ]
    if len(groups) > MOST_GROUPS or len(differing) > MOST_FIELDS:
        lines.append(
            f"  ({len(groups)} different readings, {len(differing)} fields that differ in all)"
        )
    return "\n".join(
        [
            *lines,
            "copy the corpora again so that all nodes have the same files, or put them on a file "
            "system that all nodes share",
        ]
    )


def _ranks(ranks: list[int]) -> str:
    """In words, as in `rank 3` and `ranks 0 to 2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    words = [str(s[0]) if len(s) == 1 else f"{s[0]} to {s[-1]}" for s in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(words)
