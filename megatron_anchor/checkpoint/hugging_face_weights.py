"""The weight files of a Hugging Face model folder: opened lazily, written in a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_anchor.checkpoint.archives import (
    SAFETENSORS_NAMES,
    Extent,
    pickled_extents,
    safetensors_extents,
)
from megatron_anchor.checkpoint.model_folder import check_links
from megatron_anchor.checkpoint.rows import FileRows, Files, Piece
from megatron_anchor.errors import UserError

SHARD_BYTES = 5_000_000_000  # transformers' own habit
KINDS: tuple[tuple[str, Callable[[Path], dict[str, Extent]]], ...] = (
    ("model.safetensors", safetensors_extents),
    ("pytorch_model.bin", pickled_extents),
)


def open_weights(folder: str | Path, files: Files) -> dict[str, FileRows]:
    """Locate every tensor of a model folder without reading any.

    Args:
        folder: with safetensors or, if there are none, ``.bin`` files; sharded or single.
        files: reads them.

    Raises:
        UserError: for missing, truncated or malicious files, links that lead outside of the
            folder, or an index that does not fit.
    """
    folder = Path(folder)
    check_links(folder)
    for name, extents in KINDS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():  # wins over an index, as in transformers
            found = extents(folder / name)
        elif index.is_file():
            found = _sharded(index, extents)
        else:
            continue
        return {
            tensor: FileRows(files, [Piece(extent)], shape=extent.shape, dtype=extent.dtype)
            for tensor, extent in found.items()
        }
    raise UserError(
        f"{folder} has no weights: expected model.safetensors or model.safetensors.index.json "
        "(or pytorch_model.bin)"
    )


def _sharded(index: Path, extents: Callable[[Path], dict[str, Extent]]) -> dict[str, Extent]:
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{index} is no index of weights: {error!r}") from error
    odd = [f"{k} in {v!r}" for k, v in weight_map.items() if not isinstance(v, str)]
    if odd:
        raise UserError(f"{index} places {odd[0]}, expected a file's name")
    names = sorted(set(weight_map.values()))
    missing = [n for n in names if Path(n).name != n or not (index.parent / n).is_file()]
    if missing:
        raise UserError(
            f"{index.parent}: {len(missing)} of {len(names)} weight files are missing: "
            f"{', '.join(missing[:5])}; fetch the model again"
        )
    shards = {name: extents(index.parent / name) for name in names}
    found: dict[str, Extent] = {}
    for name, shard in shards.items():
        for tensor, extent in shard.items():
            if weight_map.get(tensor) != name:
                place = weight_map.get(tensor, "no file")
                raise UserError(f"{index} places {tensor} in {place}, but {name} holds it")
            found[tensor] = extent
    lost = sorted(set(weight_map) - set(found))
    if lost:
        raise UserError(
            f"{index} places {lost[0]} in {weight_map[lost[0]]}, which does not hold it"
            + (f" (and {len(lost) - 1} more)" if len(lost) > 1 else "")
        )
    return found


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    plans: Sequence[TensorPlan],
    blocks: Callable[[str], Iterable[np.ndarray]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write safetensors, several with an index when they exceed ``shard_bytes``.

    Args:
        folder: where to.
        plans: all tensors in the order in which they are written.
        blocks: gives a tensor's bytes in order, by its name.
        shard_bytes: largest size of a file's data, one tensor at least.

    Returns:
        Names of the files.
    """
    shards: list[list[TensorPlan]] = [[]]
    for plan in plans:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + plan.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(plan)
    names = ["model.safetensors"]
    if len(shards) > 1:
        total = len(shards)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, blocks)
    if len(shards) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(plan.bytes for plan in plans)},
            "weight_map": {
                plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard
            },
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _write_shard(
    path: Path, shard: Sequence[TensorPlan], blocks: Callable[[str], Iterable[np.ndarray]]
) -> None:
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in shard:
        header[plan.name] = {
            "dtype": SAFETENSORS_NAMES[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [end, end + plan.bytes],
        }
        end += plan.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in shard:
            written = sum(file.write(memoryview(b).cast("B")) for b in blocks(plan.name))
            assert written == plan.bytes, (plan, written)
