"""Where the bytes of tensors lie inside files: ``torch.save`` archives and safetensors.

Nothing here executes what a file contains: archives go through torch's weights-only unpickler
without their data, safetensors have a JSON header.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_anchor.errors import UserError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
LARGEST_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Extent:
    """A contiguous tensor in a file."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def safetensors_extents(path: Path) -> dict[str, Extent]:
    """Read a safetensors header and check it against the file's size.

    Raises:
        UserError: for a truncated or malformed file, or a dtype that is no floating one.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(LARGEST_HEADER, size - 8):
            raise UserError(
                f"{path}: not a whole safetensors file: header of {length} bytes in a file of "
                f"{size}; fetch it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = _filled_bytes(path, header)
        if 8 + length + end != size:
            raise UserError(
                f"{path} has {size} bytes, its header announces {8 + length + end}: it is "
                "truncated or damaged; fetch it again"
            )
        return {
            name: _safetensors_extent(path, 8 + length, name, entry)
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: the safetensors header is malformed: {_short(error)}; fetch it again"
        ) from error


def _short(error: Exception) -> str:
    """An error without the object that it holds: that of a bad byte is the whole header."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at {error.start} is no UTF-8"
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


def _filled_bytes(path: Path, header: Mapping[str, Mapping[str, Any]]) -> int:
    """Check that the tensors fill the data without overlap or hole, and give its bytes."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if len(entry["data_offsets"]) != 2 or any(type(n) is not int or n < 0 for n in numbers):
            raise UserError(
                f"{path}: {name} has shape {entry['shape']} and data_offsets "
                f"{entry['data_offsets']}, expected whole numbers; fetch the file again"
            )
        first, last = entry["data_offsets"]
        if first != end:
            raise UserError(
                f"{path}: {name} begins at byte {first} of the data, but the tensor before it ends "
                f"at {end}: they overlap or leave a hole; fetch the file again"
            )
        end = last
    return end


def _safetensors_extent(path: Path, base: int, name: str, entry: Mapping[str, Any]) -> Extent:
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise UserError(
            f"{path}: {name} has dtype {entry['dtype']}, expected one of "
            f"{', '.join(SAFETENSORS_DTYPES)}; quantised weights cannot be trained, take the "
            "model's original ones"
        )
    dtype, (first, last) = SAFETENSORS_DTYPES[entry["dtype"]], entry["data_offsets"]
    shape = tuple(entry["shape"])
    if last - first != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path}: {name} of shape {list(shape)} and dtype {entry['dtype']} cannot fill "
            f"{last - first} bytes; fetch the file again"
        )
    return Extent(path, base + first, shape, dtype)


def archive_extent(tensor: Tensor, *, path: Path, base: int, size: int, name: str) -> Extent:
    """Locate a tensor of an archive that was opened without its data.

    Args:
        tensor: as `load_fake` gives it.
        path: file that holds the archive.
        base: where the archive begins in it.
        size: the archive's bytes.
        name: for messages.

    Raises:
        UserError: if it is not contiguous, not floating, or reaches past the archive.
    """
    storage_offset = cast(Any, tensor.untyped_storage())._checkpoint_offset
    offset = storage_offset + tensor.storage_offset() * tensor.dtype.itemsize
    if not tensor.is_contiguous() or tensor.dtype not in SAFETENSORS_NAMES:
        raise UserError(
            f"{path}: {name} is stored as {tensor.dtype} with strides {tensor.stride()}; expected "
            "a contiguous floating tensor: save the model again"
        )
    if offset + tensor.numel() * tensor.dtype.itemsize > size:
        raise UserError(f"{path}: {name} reaches past the end of its archive; truncated?")
    return Extent(path, base + offset, tuple(tensor.shape), tensor.dtype)


def load_fake(file: Any, *, place: str) -> Any:
    """Open a ``torch.save`` archive without its data: tensors know their place in the file.

    Raises:
        UserError: if it is damaged, or holds anything but tensors and plain containers,
            which is never executed.
    """
    try:
        if _meta_tensors_know_their_place():
            return torch.load(file, weights_only=True, map_location="meta")
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise unpickling_error(error, place=place) from error


@lru_cache
def _meta_tensors_know_their_place() -> bool:
    """Say whether torch.load to the meta device keeps offsets; fake mode does, ten times slower."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(1), buffer)
    buffer.seek(0)
    tensor = torch.load(buffer, weights_only=True, map_location="meta")
    return hasattr(tensor.untyped_storage(), "_checkpoint_offset")


def check_pickle(path: Path) -> Any:
    """Open a ``pytorch_model*.bin`` without its data: what it is made of, tensors as places.

    Raises:
        UserError: if it is in torch's oldest format, damaged, or holds anything but tensors
            and plain containers.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            raise UserError(
                f"{path} is not a zip archive as torch >= 1.6 writes; save the model again as "
                "safetensors"
            )
    return load_fake(str(path), place=str(path))


def pickled_extents(path: Path) -> dict[str, Extent]:
    """Locate the tensors of a ``pytorch_model*.bin``.

    Raises:
        UserError: see `load_fake` and `archive_extent`.
    """
    state = check_pickle(path)
    if not isinstance(state, Mapping):
        raise UserError(f"{path}: expected a dict of tensors, got {type(state).__name__}")
    others = [f"{k} ({type(v).__name__})" for k, v in state.items() if not isinstance(v, Tensor)]
    if others:
        raise UserError(
            f"{path}: expected tensors only, got also {', '.join(others[:3])}; save the model's "
            "state_dict alone (model.save_pretrained does)"
        )
    size = path.stat().st_size
    return {
        str(name): archive_extent(tensor, path=path, base=0, size=size, name=str(name))
        for name, tensor in state.items()
    }


def unpickling_error(error: Exception, *, place: str) -> UserError:
    """Tell malice from damage, in words of our own: torch's advise to execute the file."""
    asked = re.search(r"(?:GLOBAL |class |function |from )([A-Za-z_][\w]*(?:\.\w+)+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and asked:
        return UserError(
            f"{place}: refused to unpickle {asked[1]}, which is neither a tensor nor a plain value "
            "and was not executed. Do not load it elsewhere either unless you trust its source"
        )
    return UserError(
        f"{place} is damaged: not a whole torch archive ({type(error).__name__}); fetch it again"
    )


class _Recorder:
    """A file that keeps what is written and skips what is left out."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.position = 0

    def write(self, data: Any) -> int:
        self.parts.append((self.position, bytes(data)))
        self.position += len(self.parts[-1][1])
        return len(self.parts[-1][1])

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence in (0, 1)
        self.position = offset if whence == 0 else self.position + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def archive_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Give what ``torch.save`` writes before and after a contiguous tensor's bytes.

    torch itself leaves the data out (``torch.serialization.skip_data``), so an archive can be
    written with one copy of the data and without its checksum, which torch never verifies.
    """
    data_bytes = math.prod(shape) * dtype.itemsize
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(Any, recorder))
    before, after, end = bytearray(), bytearray(), 0
    for position, data in recorder.parts:
        if position != end:
            assert position - end == data_bytes, (shape, dtype, position, end)
            after += data
        elif after:
            after += data
        else:
            before += data
        end = position + len(data)
    assert after, (shape, dtype)
    return bytes(before), bytes(after)
