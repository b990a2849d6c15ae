"""The sample index of a dataset on disk: as many epochs as are needed, built once each.

Epochs are kept in blocks, one cache entry per block. A large corpus has one epoch in a block. A
small one has 1, 8, 64, ... epochs in its blocks, up to a million documents together, so that
thousands of epochs are a few files and little is built that nobody needs. Which epochs make a block
depends on the number of documents alone: longer runs open further blocks and build nothing again.

Memory: one block while it is built, memory-mapped afterwards.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from megatron_anchor.packing.cache import StoredArrays, digest, load_or_build
from megatron_anchor.packing.epochs import PlanFigures, SamplePlan

GROWTH = 8
"""How many more epochs each block of a small corpus has than the one before it."""

MOST_DOCUMENTS = 1 << 20
"""Documents of a block with more than one epoch, repetitions counted."""


def blocks_of_epochs(num_documents: int) -> Iterator[range]:
    """The epochs of each block, in order and without end.

    Args:
        num_documents: documents of an epoch.
    """
    first, size = 0, 1
    while True:
        yield range(first, first + size)
        first += size
        size = min(size * GROWTH, max(1, MOST_DOCUMENTS // max(1, num_documents)))


class SampleIndex:
    """The samples of the first epochs of a dataset. Pickles as paths, not as contents.

    Args:
        directory: of the cache.
        name: part of the entries' file names, for people.
        description: all that the samples depend on but the epoch, as JSON values.
        num_documents: documents of an epoch.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str,
        description: Mapping[str, Any],
        num_documents: int,
    ) -> None:
        self._directory = directory
        self._stem = f"{digest(description)}-{name}"
        self._description = dict(description)
        self._num_documents = num_documents
        self._blocks: list[StoredArrays] = []
        self._first_samples: list[int] = []
        self._figures = np.zeros((0, len(PlanFigures._fields)), dtype=np.int64)
        self._num_samples = 0

    def __len__(self) -> int:
        """Samples of the fewest whole epochs that hold what was asked for."""
        return self._num_samples

    @property
    def epochs(self) -> int:
        """Number of these epochs."""
        return int(np.searchsorted(self._epoch_ends, self._num_samples)) + 1

    @property
    def figures(self) -> PlanFigures:
        """What the samples of the first epoch are made of; the others differ little."""
        return PlanFigures(*self._figures[0].tolist())

    @property
    def _epoch_ends(self) -> np.ndarray:
        return np.cumsum(self._figures[:, 0])

    def extend(self, num_samples: int | None, plan: Callable[[range], SamplePlan]) -> None:
        """Open epochs until there are so many samples; those that were open stay as they are.

        Args:
            num_samples: samples needed; None = those of one epoch.
            plan: plans the epochs of a block that no earlier run has built.

        Raises:
            UserError: the directory cannot be written.
        """
        needed = max(num_samples or 0, 1)
        for number, epochs in enumerate(blocks_of_epochs(self._num_documents)):
            if number < len(self._blocks):
                continue
            opened = int(self._figures[:, 0].sum())
            if opened >= needed or (self._blocks and opened == 0):
                break
            block = self._open(epochs, plan)
            self._blocks.append(block)
            self._first_samples.append(opened)
            self._figures = np.concatenate([self._figures, block["figures"]])
        ends = self._epoch_ends
        enough = min(int(np.searchsorted(ends, needed)), len(ends) - 1)
        self._num_samples = max(self._num_samples, int(ends[enough]))

    def find(self, idx: int) -> tuple[StoredArrays, int]:
        """The arrays of `SamplePlan` that hold sample `idx`, and its number in `sample_index`.

        Args:
            idx: of the sample, 0 or more, below the length.
        """
        number = bisect_right(self._first_samples, idx) - 1
        block = self._blocks[number]
        return block, int(block["shuffle_index"][idx - self._first_samples[number]])

    def _open(self, epochs: range, plan: Callable[[range], SamplePlan]) -> StoredArrays:
        return load_or_build(
            self._directory,
            f"{self._stem}-epoch-{epochs.start}",
            names=SamplePlan._fields,
            description={**self._description, "epochs": [epochs.start, epochs.stop]},
            build=lambda: plan(epochs)._asdict(),
        )
