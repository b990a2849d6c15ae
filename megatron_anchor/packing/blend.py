"""Megatron's blend of several corpora: the same order of samples, kept and checked as ours are.

Megatron writes the two index files of a blend in place. A job that is killed then leaves parts of
them, on which every later one stops, and a second job that starts meanwhile truncates files that
the first one reads. Here the index is a cache entry, whole or not at all.

Which corpus sample i is drawn from follows from the weights and i: at every step it is the corpus
that is furthest behind its weight. A longer run therefore begins with the samples of a shorter one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from megatron.core.datasets import blended_dataset as host
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_anchor.errors import UserError
from megatron_anchor.packing.cache import load_or_build
from megatron_anchor.packing.dataset import PackedDataset
from megatron_anchor.patches import MEGATRON, Patch, instead
from megatron_anchor.terminal import logger_of

logger = logger_of(__name__)

_NAMES = ("dataset_index", "dataset_sample_index", "samples_of_corpora")


class BlendedDataset(host.BlendedDataset):
    """Drop-in for Megatron's class of this name, which it also takes for the names of its files.

    Corpora without a document in the validation or test split are left out of that blend. Each
    corpus has as many samples as the blend takes from it.

    Args:
        datasets: the corpora's datasets, all of one split.
        weights: share of each, or its number of samples.
        size: samples of the blend; None = all of every corpus, once.
        config: Megatron's.

    Raises:
        UserError: no corpus has a document in this split.
    """

    config: Any

    def __init__(
        self, datasets: list[Any], weights: Sequence[float], size: int | None, config: Any
    ) -> None:
        datasets, weights = _with_samples(datasets, weights, size)
        super().__init__(datasets, weights, size, config)
        if config.defer_npy_index_mmap:
            return  # nothing is read yet
        for dataset, samples in zip(self.datasets, self.samples_of_corpora, strict=True):
            if samples > len(dataset):
                dataset.extend(int(samples))
        _warn_of_doubles(self.datasets, self.samples_of_corpora, split=self.split)

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """int16 [samples] number of the corpus and int64 [samples] number of its sample."""
        if self.config.defer_npy_index_mmap:
            return super()._build_indices()
        stored: Any = None
        if self.config.path_to_cache:
            stored = load_or_build(
                self.config.path_to_cache,
                f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
                names=_NAMES,
                description=json.loads(self.unique_description),
                build=self._order,
            )
        else:
            stored = self._order()
        self.samples_of_corpora: np.ndarray = stored["samples_of_corpora"]
        return stored["dataset_index"], stored["dataset_sample_index"]

    def _order(self) -> dict[str, np.ndarray]:
        corpus_N, sample_N = order_of_blend(self.weights, self.size)
        counts = np.bincount(corpus_N, minlength=len(self.weights)).astype(np.int64)
        return dict(zip(_NAMES, (corpus_N, sample_N, counts), strict=True))


def order_of_blend(weights: Sequence[float], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """int16 [N] corpus and int64 [N] sample of that corpus, by Megatron's compiled loop.

    Args:
        weights: of the corpora, with the sum 1; with `size` None their numbers of samples.
        size: N; None = every sample of every corpus once.
    """
    # Here and not above: Megatron compiles this module where it was not shipped.
    from megatron.core.datasets import helpers

    total = int(sum(weights)) if size is None else size
    corpus_N, sample_N = np.zeros(total, dtype=np.int16), np.zeros(total, dtype=np.int64)
    if size is None:
        helpers.build_exhaustive_blending_indices(corpus_N, sample_N, weights, len(weights))
    else:
        helpers.build_blending_indices(corpus_N, sample_N, weights, len(weights), total, False)
    return corpus_N, sample_N


def corpora_of(dataset: Any) -> Iterator[PackedDataset]:
    """The packed datasets in a dataset, blend, wrapper (`.dataset`) or list of these, or None."""
    if isinstance(dataset, PackedDataset):
        yield dataset
    elif isinstance(dataset, list | tuple):
        for one in dataset:
            yield from corpora_of(one)
    elif hasattr(dataset, "datasets"):
        yield from corpora_of(dataset.datasets)
    elif hasattr(dataset, "dataset"):
        yield from corpora_of(dataset.dataset)


PATCH = Patch(
    target="megatron.core.datasets.blended_megatron_dataset_builder:BlendedDataset",
    replacement=instead(BlendedDataset),
    reason="the index of a blend is written whole or not at all",
    lost="a job that is killed may leave parts of a blend's index, on which later ones stop",
    host=MEGATRON,
)
"""Lets Megatron's dataset builder make blends of this kind; it has no parameter for that."""


def _with_samples(
    datasets: list[Any], weights: Sequence[float], size: int | None
) -> tuple[list[Any], list[float]]:
    """The datasets that are not empty, and their weights; says which are left out."""
    used = [number for number, dataset in enumerate(datasets) if len(dataset)]
    if size == 0 and not used:
        return datasets, [1.0] * len(datasets)  # weights mean nothing, but must be above 0
    split = datasets[0].index_split
    if not used:
        raise UserError(
            f"none of the {len(datasets)} corpora of the blend has a document with a token in the "
            f"{split.name} split; give it a larger share with --split, or name corpora for it: "
            "--train-data-path ... --valid-data-path ..."
        )
    for number, dataset in enumerate(datasets):
        if size != 0 and number not in used:
            log_single_rank(
                logger,
                logging.WARNING,
                f"the corpus {dataset.dataset_path} has no document with a token in the "
                f"{split.name} split and is left out of it ({len(dataset.indices)} documents are "
                "its share of --split); to choose the documents name corpora for every split: "
                "--train-data-path ... --valid-data-path ...",
            )
    return [datasets[number] for number in used], [weights[number] for number in used]


def _warn_of_doubles(datasets: list[Any], samples: np.ndarray, *, split: Split) -> None:
    """Say which corpora of a blend are one and the same, and what that costs."""
    numbers: dict[str, list[int]] = {}
    for number, dataset in enumerate(datasets):
        if isinstance(dataset, PackedDataset):
            numbers.setdefault(dataset.contents_hash, []).append(number)
    for same in numbers.values():
        drawn = samples[same]
        if len(same) == 1 or not drawn.any():
            continue
        log_single_rank(
            logger,
            logging.WARNING,
            f"the {split.name} blend holds one corpus {len(same)} times ("
            + ", ".join(datasets[number].dataset_path for number in same)
            + f"): of {drawn.sum()} samples drawn from it {drawn.max()} are different, the others "
            "repeat them; name it once, with the sum of the weights",
        )
