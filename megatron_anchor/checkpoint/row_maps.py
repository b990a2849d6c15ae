"""How the rows of a Megatron weight are made of the rows of Hugging Face weights.

Every difference between the two is an order of rows: gate above up in one matrix, queries, keys and
values of a group next to each other, rows of zeros that fill up a vocabulary. So a conversion is a
copy of byte ranges, the same map serves both directions, and no weight is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows of one Hugging Face tensor that are neighbours in Megatron too."""

    source: int | None
    """Which of the rule's Hugging Face tensors; None: rows of zeros."""
    first: int
    """First row in that tensor."""
    rows: int


class RowLayout(Protocol):
    """A kind of row map; dimensions are named, the model gives the numbers."""

    def source_rows(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Rows of each Hugging Face tensor."""
        ...

    def segments(self, dims: Mapping[str, int]) -> list[Segment]:
        """Megatron's rows from the first to the last."""
        ...


@dataclass(frozen=True)
class Stack:
    """Hugging Face's tensors one above the other: a plain copy, or gate above up."""

    dims: Sequence[str]

    def source_rows(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Rows of each Hugging Face tensor."""
        return tuple(dims[name] for name in self.dims)

    def segments(self, dims: Mapping[str, int]) -> list[Segment]:
        """One segment a tensor."""
        return [Segment(i, 0, rows) for i, rows in enumerate(self.source_rows(dims))]


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary's rows, then zeros up to the padded size."""

    def source_rows(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Rows of the Hugging Face tensor."""
        return (dims["vocabulary"],)

    def segments(self, dims: Mapping[str, int]) -> list[Segment]:
        """The vocabulary and, where there is any, the filling."""
        filling = dims["padded vocabulary"] - dims["vocabulary"]
        return [Segment(0, 0, dims["vocabulary"])] + [Segment(None, 0, filling)] * (filling > 0)


@dataclass(frozen=True)
class Grouped:
    """Queries, key and value of each key-value group side by side, so that each tensor-parallel
    rank finds its groups in one piece (Megatron's ``linear_qkv``)."""

    def source_rows(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Rows of the query, key and value projections."""
        return dims["query"], dims["key"], dims["key"]

    def segments(self, dims: Mapping[str, int]) -> list[Segment]:
        """Three segments a group."""
        size, queries = dims["head"], dims["query"] // dims["groups"]
        return [
            segment
            for g in range(dims["groups"])
            for segment in (
                Segment(0, g * queries, queries),
                Segment(1, g * size, size),
                Segment(2, g * size, size),
            )
        ]


@dataclass(frozen=True)
class Zeros:
    """Rows that Megatron has and the Hugging Face model does not: zeros in, only zeros out."""

    dim: str

    def source_rows(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Nothing on Hugging Face's side."""
        return ()

    def segments(self, dims: Mapping[str, int]) -> list[Segment]:
        """Zeros alone."""
        return [Segment(None, 0, dims[self.dim])]
