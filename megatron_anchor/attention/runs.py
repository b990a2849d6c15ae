"""Runs: what every attention kernel is called with.

A run is a stretch of consecutive queries of one document and the keys that they may see: the
document from its start (or from the start of the window) up to the run's last query, whose own key
is the run's last. Attention is causal inside a run, aligned at the bottom right. Drawn for a
document of six slots of which a rank holds the queries 3 to 5, with no window, a window of 2, and
that window with the anchor kept in it (``#`` a key that is handed over and seen, ``.`` handed over
and not seen)::

                 keys  0 1 2 3 4 5        2 3 4 5        0 2 3 4 5
        query 3        # # # # . .        # # . .        # # # . .
        query 4        # # # # # .        . # # .        # . # # .
        query 5        # # # # # #        . . # #        # . . # #

Without context parallelism, and under Ulysses, runs are whole documents. The queries of all runs
lie one after another, and so do their keys: two runs of one document have their own copies of the
keys that both see, since kernels want disjoint key ranges.

All lengths are on the host, where they come from the data loader; tensors on the device are made
once a micro-batch. Nothing here waits for the device.

Legend: R runs, T queries of all runs, K keys of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.windows import Window


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """The runs of one attention call."""

    q_lengths: np.ndarray
    """int64 [R], queries of each run."""
    k_lengths: np.ndarray
    """int64 [R], keys of each run, the anchor in front of a window included."""
    q_begins: np.ndarray
    """int64 [R], place in its document of each run's first query."""
    device: torch.device
    window: Window | None = None
    padded_to: int | None = None
    """Runs that `cu_q` and `cu_k` have room for, so that their shapes do not change; the runs
    behind the last one are empty. None = no more than there are."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.padded_to is not None and len(self.q_lengths) > self.padded_to:
            raise ValueError(
                f"a micro-batch of {len(self.q_lengths)} documents, more than the "
                f"{self.padded_to} of --pad-documents-to; raise it"
            )

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Make something once and not once a layer; recomputation reads it again."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def num_queries(self) -> int:
        """T."""
        return int(self.q_lengths.sum())

    @property
    def num_keys(self) -> int:
        """K."""
        return int(self.k_lengths.sum())

    @property
    def max_q(self) -> int:
        """Queries of the longest run."""
        return int(self.q_lengths.max(initial=0))

    @property
    def max_k(self) -> int:
        """Keys of the run with most of them."""
        return int(self.k_lengths.max(initial=0))

    @property
    def cu_q(self) -> Tensor:
        """int32 [R + 1], cumulative queries, on the device."""
        return self.cached("cu_q", lambda: self._cumulative(self.q_lengths))

    @property
    def cu_k(self) -> Tensor:
        """int32 [R + 1], cumulative keys, on the device."""
        if self.k_lengths is self.q_lengths:
            return self.cu_q
        return self.cached("cu_k", lambda: self._cumulative(self.k_lengths))

    @property
    def whole_documents(self) -> bool:
        """Whether keys and queries are the same slots."""
        return self.k_lengths is self.q_lengths

    @property
    def first_key_is_anchor(self) -> np.ndarray:
        """bool [R]: whether a run's first key is an anchor that the run's window left behind."""
        cut = self.k_lengths < self.q_begins + self.q_lengths
        return cut & (self.window is not None and self.window.keeps_anchor)

    def q_places(self) -> Tensor:
        """int32 [T], place in its document of every query, on the device."""
        return self.cached("q_places", lambda: self._places(self.q_lengths, self.q_begins))

    def k_places(self) -> Tensor:
        """int32 [K], place in its document of every key, on the device."""
        return self.cached("k_places", self._k_places)

    def _k_places(self) -> Tensor:
        ends = self.q_begins + self.q_lengths
        places = self._places(self.k_lengths, ends - self.k_lengths)
        first = np.cumsum(self.k_lengths) - self.k_lengths
        places[to_device(first[self.first_key_is_anchor], self.device)] = 0
        return places

    def _places(self, lengths: np.ndarray, begins: np.ndarray) -> Tensor:
        total = int(lengths.sum())
        shift = begins - (np.cumsum(lengths) - lengths)
        shifts = torch.repeat_interleave(
            to_device(shift, self.device), to_device(lengths, self.device), output_size=total
        )
        return torch.arange(total, device=self.device).add_(shifts).to(torch.int32)

    def _cumulative(self, lengths: np.ndarray) -> Tensor:
        cumulative = np.zeros((self.padded_to or len(lengths)) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cumulative[1 : len(lengths) + 1])
        cumulative[len(lengths) + 1 :] = cumulative[len(lengths)]
        return to_device(cumulative, self.device)


def document_runs(
    lengths: np.ndarray,
    *,
    device: torch.device,
    window: Window | None = None,
    padded_to: int | None = None,
) -> Runs:
    """Runs of whole documents.

    Args:
        lengths: integers [R], slots of each document.
        device: where attention runs.
        window: None = a query sees all of its document before it.
        padded_to: see `Runs`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    return Runs(
        q_lengths=lengths,
        k_lengths=lengths,
        q_begins=np.zeros_like(lengths),
        device=device,
        window=window if window is not None and window.size < lengths.max(initial=0) else None,
        padded_to=padded_to,
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for it."""
    return move(torch.from_numpy(np.ascontiguousarray(array)), device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for it: from pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
