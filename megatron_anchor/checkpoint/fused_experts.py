"""Tensors that hold a matrix of all experts: taken apart for the rules, put together again.

The rules of a family are about one expert's matrix [rows, columns]. gpt-oss' files hold
[experts, columns, parts x rows], transposed and with the rows of gate and up in turn. One expert's
slice is in memory at a time.

Legend: E experts, R rows and C columns of a part, P parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_anchor.checkpoint.families import EXPERT, Fused, family_of, indices_of, numbered
from megatron_anchor.checkpoint.hugging_face_weights import TensorPlan
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.rows import Rows, row_bytes
from megatron_anchor.errors import UserError


class Whole(NamedTuple):
    """A tensor of all experts."""

    experts: list[tuple[str, ...]]
    """Names of each expert's parts."""
    item_bytes: int


Parts = Mapping[str, Whole]
"""By the tensor's name."""


class _Slices:
    """One expert's slice of a tensor, kept until another is asked for."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._values = np.empty(0, np.uint8)

    def of(self, source: Rows, expert: int) -> np.ndarray:
        """Give the slice's entries [..., item bytes] (uint8)."""
        if self._key != (id(source), expert):
            block = np.empty((1, row_bytes(source)), np.uint8)
            source.read(expert, block)
            self._values = block.reshape(*source.shape[1:], source.dtype.itemsize)
            self._key = (id(source), expert)
        return self._values


class PartRows:
    """One expert's matrix or vector inside a tensor of all experts."""

    def __init__(
        self, source: Rows, slices: _Slices, *, expert: int, part: int, parts: int
    ) -> None:
        *columns, rows = source.shape[1:]
        self.shape: tuple[int, ...] = (rows // parts, *columns)
        self.dtype: torch.dtype = source.dtype
        self._source, self._slices, self._expert = source, slices, expert
        self._every = slice(part, None, parts)

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row bytes] (uint8) with the rows from ``first`` on."""
        values = self._slices.of(self._source, self._expert)
        rows_first = np.moveaxis(values[..., self._every, :], -2, 0)
        out[:] = rows_first[first : first + len(out)].reshape(len(out), -1)


def separate_experts(weights: Mapping[str, Rows], model: Model) -> dict[str, Rows]:
    """Replace tensors of all experts by their parts; others stay as they are.

    Args:
        weights: Hugging Face tensors by name.
        model: whose they are.

    Raises:
        UserError: for one that is missing, or whose shape cannot be that of its parts.
    """
    found, slices = dict(weights), _Slices()
    for fused in family_of(model.family).fused:
        for indices in indices_of(fused.hugging_face, model):
            name = numbered(fused.hugging_face, indices)
            if name not in found:
                raise UserError(f"the weights lack {name}, which {model.family} needs")
            source, count = found.pop(name), len(fused.parts)
            shape = source.shape
            if len(shape) < 2 or shape[0] != model.experts or shape[-1] % count:
                raise UserError(
                    f"{name} has shape {list(shape)}, expected {model.experts} experts in front"
                    + (f" and {count} parts in turn behind" if count > 1 else "")
                )
            for expert in range(model.experts):
                for part, text in enumerate(fused.parts):
                    found[numbered(text, {**indices, EXPERT: expert})] = PartRows(
                        source, slices, expert=expert, part=part, parts=count
                    )
    return found


def fused_plans(plans: Sequence[TensorPlan], model: Model) -> tuple[list[TensorPlan], Parts]:
    """Replace the parts of tensors of all experts by these tensors.

    Args:
        plans: of the rules' tensors, in the order in which files hold them.
        model: whose they are.

    Returns:
        Plans of the files' tensors, and the parts of those that have any.
    """
    by_name = {plan.name: plan for plan in plans}
    whole: dict[str, TensorPlan] = {}
    parts_of: dict[str, Whole] = {}
    for fused in family_of(model.family).fused:
        for indices in indices_of(fused.hugging_face, model):
            name, names = numbered(fused.hugging_face, indices), _parts(fused, indices, model)
            first = by_name[names[0][0]]
            rows, *columns = first.shape
            shape = (model.experts, *columns, len(fused.parts) * rows)
            parts_of[name] = Whole(names, first.dtype.itemsize)
            whole |= dict.fromkeys(sum(names, ()), TensorPlan(name, shape, first.dtype))
    return list({(p := whole.get(plan.name, plan)).name: p for plan in plans}.values()), parts_of


def _parts(fused: Fused, indices: Mapping[str, int], model: Model) -> list[tuple[str, ...]]:
    return [
        tuple(numbered(part, {**indices, EXPERT: expert}) for part in fused.parts)
        for expert in range(model.experts)
    ]


def fused_blocks(
    name: str, parts_of: Parts, blocks: Callable[[str], Iterable[np.ndarray]]
) -> Iterator[np.ndarray]:
    """Yield the bytes of one of the files' tensors in order.

    Args:
        name: of the tensor.
        parts_of: what `fused_plans` gives.
        blocks: gives those of the rules' tensors, as [rows, row bytes] blocks.
    """
    if name not in parts_of:
        yield from blocks(name)
        return
    whole = parts_of[name]
    for names in whole.experts:
        parts = [np.concatenate([block.copy() for block in blocks(part)]) for part in names]
        together = np.stack(parts, axis=1)  # [R, P, C x bytes]
        values = together.reshape(*together.shape[:2], -1, whole.item_bytes)
        yield np.ascontiguousarray(values.transpose(2, 0, 1, 3))
