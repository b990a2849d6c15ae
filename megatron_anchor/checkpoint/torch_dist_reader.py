"""Reading a ``torch_dist`` checkpoint tensor by tensor, whatever layout wrote it.

The format is torch.distributed.checkpoint's: ``.metadata`` says which chunk of which global tensor
lies where in which ``.distcp`` file, each chunk an archive of ``torch.save``. Layers of a kind are
one tensor [layers, ...]; some runs store them one by one, which reads the same here.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_anchor.checkpoint.archives import Extent, archive_extent, load_fake
from megatron_anchor.checkpoint.rows import FileRows, Files, Piece
from megatron_anchor.checkpoint.unpickling import load_metadata, load_object
from megatron_anchor.compat import TRACKER
from megatron_anchor.errors import UserError

NOT_THE_MODEL = re.compile(
    r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|common_state|opt_param_scheduler"
)
NUMBERED_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.")


def iteration_folder(root: str | Path, *, iteration: int | None = None) -> Path:
    """Find the folder of an iteration.

    Args:
        root: what --save names, or the folder of one iteration itself.
        iteration: which; None: the latest.

    Raises:
        UserError: if there is no such checkpoint.
    """
    root = Path(root)
    if (root / "metadata.json").is_file():
        if iteration is not None and root.name != f"iter_{iteration:07d}":
            raise UserError(
                f"{root} is the folder of one iteration, and not of {iteration}; give the folder "
                "above it"
            )
        return root
    if iteration is not None:
        folder = root / f"iter_{iteration:07d}"
        if not folder.is_dir():
            found = sorted(p.name.removeprefix("iter_").lstrip("0") for p in root.glob("iter_*"))
            raise UserError(
                f"{root} has no iteration {iteration}; it has {', '.join(found) or 'none'}"
            )
        return folder
    tracker = root / TRACKER
    if not tracker.is_file():
        raise UserError(
            f"{root} holds no Megatron checkpoint: neither {TRACKER} nor metadata.json is there"
        )
    word = tracker.read_text(errors="replace").strip()
    if word != "release" and not word.isdecimal():
        raise UserError(f"{tracker} says {word!r}, expected 'release' or an iteration")
    return root / ("release" if word == "release" else f"iter_{int(word):07d}")


class TorchDistCheckpoint:
    """One iteration of a run."""

    def __init__(self, folder: str | Path, files: Files) -> None:
        self.folder = Path(folder)
        self._files = files
        if not (self.folder / "metadata.json").is_file():
            raise UserError(
                f"{self.folder} is no torch_dist checkpoint: metadata.json is missing (was the "
                "save interrupted, or --ckpt-format another one?)"
            )
        metadata = load_metadata(self.folder / ".metadata")
        self._entries: Mapping[str, Any] = metadata.state_dict_metadata
        self._places = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info
            for index, info in metadata.storage_data.items()
        }
        self._extents: dict[tuple[str, tuple[int, ...]], Extent] = {}

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Give the shapes and dtypes of the model's tensors; optimizer states are left out."""
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in self._entries.items()
            if hasattr(entry, "size") and not NOT_THE_MODEL.match(name)
        }

    def common_state(self) -> dict[str, Any]:
        """Give what Megatron stored besides tensors: arguments, iteration, ...

        Raises:
            UserError: if there is none, or it holds more than plain values.
        """
        legacy = self.folder / "common.pt"
        if legacy.is_file():
            state = load_object(legacy.read_bytes(), place=str(legacy))
            if not isinstance(state, dict):
                raise UserError(f"{legacy} holds a {type(state).__name__}, expected a dict")
            return state
        info = self._places.get(("common_state/shard_0_1", None))
        if info is None:
            raise UserError(f"{self.folder} holds no arguments (common_state)")
        path = self._path(info)
        with open(path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        state = load_object(data, place=f"{path} (common_state)")
        if not isinstance(state, list) or not state or not isinstance(state[0], dict):
            raise UserError(f"{path}: common_state is not a dict in a list")
        return state[0]

    def args(self) -> Namespace:
        """Give the arguments of the run that wrote the checkpoint.

        Raises:
            UserError: if they are missing.
        """
        args = self.common_state().get("args")
        if not isinstance(args, Namespace):
            raise UserError(
                f"{self.folder}: the run's arguments are missing (args is a {type(args).__name__})"
            )
        return args

    def rows(self, key: str, indices: Sequence[int]) -> FileRows:
        """Give one layer's (and expert's) part of a stacked tensor.

        Args:
            key: name of the tensor.
            indices: along the axes in front of the rows.

        Raises:
            UserError: if the chunks do not cover it, or a file is missing.
        """
        entry, axes = self._entries[key], len(indices)
        shape, dtype = tuple(entry.size)[axes:], entry.properties.dtype
        pieces = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            within = [i - first for i, first in zip(indices, offsets, strict=False)]
            if not all(0 <= i < size for i, size in zip(within, sizes, strict=False)):
                continue
            extent = self._extent(key, offsets, sizes, dtype)
            rest, position = sizes[axes:], 0
            for i, size in zip(within, sizes, strict=False):
                position = position * size + i
            start = extent.offset + position * math.prod(rest) * dtype.itemsize
            column = offsets[axes + 1] * dtype.itemsize if len(rest) > 1 else 0
            pieces.append(Piece(Extent(extent.path, start, rest, dtype), offsets[axes], column))
        covered = sum(math.prod(piece.extent.shape) for piece in pieces)
        if covered != math.prod(shape):
            raise UserError(
                f"{self.folder}: {key} {list(indices)} of shape {list(shape)} has "
                f"{math.prod(shape)} values, its chunks hold {covered}"
            )
        return FileRows(self._files, pieces, shape=shape, dtype=dtype)

    def _extent(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Extent:
        found = self._extents.get((key, offsets))
        if found is None:
            found = self._extents[key, offsets] = self._open_chunk(key, offsets, sizes, dtype)
        return found

    def _open_chunk(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Extent:
        from torch.distributed.checkpoint.utils import _create_file_view

        info = self._places.get((key, offsets))
        if info is None or info.transform_descriptors:
            raise UserError(
                f"{self.folder}: chunk {list(offsets)} of {key} is "
                + ("missing" if info is None else f"compressed ({info.transform_descriptors})")
            )
        path = self._path(info)
        with open(path, "rb") as file:
            view = _create_file_view(file, info.offset, info.length)
            tensor = load_fake(view, place=f"{path} ({key})")
        if (
            not isinstance(tensor, Tensor)
            or tensor.numel() != math.prod(sizes)
            or tensor.dtype != dtype
        ):
            raise UserError(
                f"{path}: {key} at {list(offsets)} is not a {dtype} tensor of shape {list(sizes)}"
            )
        return archive_extent(tensor, path=path, base=info.offset, size=info.length, name=key)

    def _path(self, info: Any) -> Path:
        path = self.folder / info.relative_path
        if path.parent != self.folder or not path.is_file():
            raise UserError(f"{path} is missing: the checkpoint is incomplete; copy it again")
        if path.stat().st_size < info.offset + info.length:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes, {info.offset + info.length} are needed: "
                "truncated; copy it again"
            )
        return path
