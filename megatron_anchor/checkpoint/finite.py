"""NaN and Inf among weights: counted as they pass, named by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_anchor.checkpoint.rows import Rows
from megatron_anchor.errors import UserError

ALLOW_FLAG = "--allow-non-finite"
_SHOWN = 5
# All bits of the exponent, which NaN and Inf alone have set: torch has no fast isfinite for halves.
_EXPONENTS: dict[torch.dtype, np.unsignedinteger] = {
    torch.bfloat16: np.uint16(0x7F80),
    torch.float16: np.uint16(0x7C00),
    torch.float32: np.uint32(0x7F800000),
    torch.float64: np.uint64(0x7FF0000000000000),
}


class NonFinite:
    """Counts values that are NaN or Inf, by tensor."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def look_at(self, name: str, block: np.ndarray, dtype: torch.dtype) -> None:
        """Count those in a contiguous block of a tensor's bytes (uint8)."""
        exponent = _EXPONENTS.get(dtype)
        if exponent is None:
            return  # no kind of number that files of weights may have
        values = block.reshape(-1).view(exponent.dtype)
        found = int(np.count_nonzero((values & exponent) == exponent))
        if found:
            self.counts[name] = self.counts.get(name, 0) + found

    def lines(self) -> list[str]:
        """Say what was found, a line per tensor."""
        return [f"{name}: {count} values are NaN or Inf" for name, count in self.counts.items()]

    def refuse(self, source: str, *, dtype: torch.dtype | None) -> None:
        """Raise `UserError` where any was found.

        Args:
            source: of the weights, for the message.
            dtype: to which they were converted, None: as stored.
        """
        if not self.counts:
            return
        more = len(self.counts) - _SHOWN
        cast = "" if dtype is None else f" (as {str(dtype).removeprefix('torch.')})"
        raise UserError(
            f"{source} has weights that are NaN or Inf{cast}: {'; '.join(self.lines()[:_SHOWN])}"
            + (f"; and {more} more tensors" if more > 0 else "")
            + f". Take a checkpoint from before, or a wider --dtype; {ALLOW_FLAG} converts them "
            "as they are"
        )


class CountedRows:
    """Rows that are counted as they are read."""

    def __init__(self, name: str, source: Rows, found: NonFinite) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self._name, self._source, self._found = name, source, found

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the rows from ``first`` on."""
        self._source.read(first, out)
        self._found.look_at(self._name, out, self.dtype)


def counted(weights: Mapping[str, Rows], found: NonFinite) -> dict[str, Rows]:
    """Give weights that are counted as they are read."""
    return {name: CountedRows(name, rows, found) for name, rows in weights.items()}
