"""Whether corpora that are to be merged are all shards of a job array, once each, and in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_anchor.corpus.sources import parse_shard
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import KeyManifest

Part = tuple[Path, KeyManifest | None]


def shard_order(parts: Sequence[Part], *, allow_missing: bool = False) -> list[int]:
    """The order in which to take the parts: as given, but shards of one run in their own order.

    Shards of one run have the same settings and inputs and the same number of shards.

    Raises:
        UserError: a shard is there twice, or is missing and `allow_missing` is False.
    """
    order = list(range(len(parts)))
    for (count, _), places in _runs(parts).items():
        by_shard = sorted(places, key=lambda place: _index(parts[place]))
        for place, after in itertools.pairwise(by_shard):
            if _index(parts[place]) == _index(parts[after]):
                raise UserError(
                    f"{parts[place][0]} and {parts[after][0]} are both shard "
                    f"{_index(parts[place])}/{count} of the same inputs: its documents would be "
                    "doubled; give it once"
                )
        present = {_index(parts[place]) for place in places}
        missing = [f"{index}/{count}" for index in range(count) if index not in present]
        if missing and not allow_missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UserError(
                f"{parts[places[0]][0]} is one of {count} shards, of which "
                f"{', '.join(missing[:5])}{more} are not given: their documents would be lost; add "
                "them, or merge without them with --allow-missing-shards"
            )
        for place, shard in zip(places, by_shard, strict=True):
            order[place] = shard
    return order


def is_one_run(parts: Sequence[Part]) -> bool:
    """Whether the parts are all shards of one run and nothing else, so that they equal it."""
    runs = _runs(parts)
    return len(parts) == 1 or (len(runs) == 1 and next(iter(runs))[0] == len(parts))


def _runs(parts: Sequence[Part]) -> dict[tuple[int, str], list[int]]:
    """(number of shards, settings) -> places of the parts that are shards of that run."""
    runs: dict[tuple[int, str], list[int]] = {}
    for place, (_, manifest) in enumerate(parts):
        if manifest is not None and manifest.shard is not None:
            settings = json.dumps(manifest.settings, sort_keys=True)
            runs.setdefault((parse_shard(manifest.shard)[1], settings), []).append(place)
    return runs


def _index(part: Part) -> int:
    assert part[1] is not None
    return parse_shard(part[1].shard)[0]
