"""Megatron's blend of several corpora, with its index kept as ours is: whole or not at all.

Megatron writes the two index files of a blend in place. A job that is killed then leaves parts of
them, on which every later one stops, and a second job that starts meanwhile truncates files that
the first one reads.
"""

from __future__ import annotations

import json
import logging
from copy import copy
from typing import Any

import numpy as np
from megatron.core.datasets import blended_dataset as host
from megatron.core.datasets import blended_megatron_dataset_builder as host_builder

from megatron_anchor.packing.cache import load_or_build

_NAMES = ("dataset_index", "dataset_sample_index")
_SAYS_NOT_SAVED = "because path_to_cache is None"


class BlendedDataset(host.BlendedDataset):
    """Drop-in for Megatron's class of this name, which it also takes for the names of its files."""

    config: Any

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """int16 [samples] number of the corpus and int64 [samples] number of its sample."""
        cache = self.config.path_to_cache
        if not cache or self.config.defer_npy_index_mmap:
            return super()._build_indices()
        stored = load_or_build(
            cache,
            f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            names=_NAMES,
            description=json.loads(self.unique_description),
            build=self._build_in_memory,
        )
        return stored[_NAMES[0]], stored[_NAMES[1]]

    def _build_in_memory(self) -> dict[str, np.ndarray]:
        config = self.config
        self.config = copy(config)
        self.config.path_to_cache = None
        host.logger.addFilter(_is_not_about_saving)
        try:
            return dict(zip(_NAMES, super()._build_indices(), strict=True))
        finally:
            host.logger.removeFilter(_is_not_about_saving)
            self.config = config


def use_whole_blends() -> None:
    """Let Megatron's dataset builder make blends of this kind (it has no parameter for that)."""
    host_builder.BlendedDataset = BlendedDataset


def _is_not_about_saving(record: logging.LogRecord) -> bool:
    return _SAYS_NOT_SAVED not in record.getMessage()
