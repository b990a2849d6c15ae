"""From a corpus and its settings to the plans of its epochs."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from megatron_anchor.indexed.document_lists import read_document_list
from megatron_anchor.packing.cache import StoredArrays
from megatron_anchor.packing.config import PackedDatasetConfig
from megatron_anchor.packing.documents import Documents
from megatron_anchor.packing.domains import DomainTags
from megatron_anchor.packing.epochs import SamplePlan, plan_epochs
from megatron_anchor.terminal import logger_of

logger = logger_of(__name__)


class EpochPlanner:
    """Plans epochs of one dataset. What they share is read once, when the first is planned.

    Args:
        corpus: an open `IndexedDataset`.
        indices: int32 documents of the split.
        own_anchors: "own_anchor" is bool [documents], whether a document begins with the anchor.
        dataset_path: of the corpus.
        document_list: .npy of the documents of an epoch; None = those of the split, once each.
        tags: tags of the documents.
        config: the settings.
        announce: called before epochs are planned.
    """

    def __init__(
        self,
        corpus: Any,
        indices: np.ndarray,
        own_anchors: StoredArrays,
        *,
        dataset_path: str,
        document_list: str | None,
        tags: DomainTags,
        config: PackedDatasetConfig,
        announce: Callable[[], None],
    ) -> None:
        self._table = Documents(corpus)
        self._indices = indices
        self._own_anchors = own_anchors
        self._dataset_path = dataset_path
        self._document_list = document_list
        self._tags = tags
        self._config = config
        self._announce = announce

    def plan(self, epochs: range) -> SamplePlan:
        """Plan some epochs; reads the lengths of all documents."""
        self._announce()
        config = self._config
        return plan_epochs(
            self.documents,
            self.content_lengths,
            epochs=epochs,
            sequence_length=config.sequence_length,
            random_seed=config.random_seed,
            packing=config.packing,
            prefix_slots_D=self._prefix_slots,
            alignment=config.alignment,
        )

    @cached_property
    def documents(self) -> np.ndarray:
        """int32 documents of an epoch, with repetitions; warns of those that are left out."""
        if self._document_list is None:
            return self._indices
        # Here and not above: without a list nothing of the corpus tools is needed.
        listed = read_document_list(self._document_list, self._dataset_path)
        used = np.zeros(self._table.num_documents, dtype=np.bool_)
        used[self._indices] = True
        kept = listed[used[listed]].astype(np.int32)
        if len(kept) < len(listed):
            logger.warning(
                "%d of %d entries of --document-list %s name documents of the validation or test "
                "split and are left out of training (--split)",
                len(listed) - len(kept),
                len(listed),
                self._document_list,
            )
        return kept

    @cached_property
    def content_lengths(self) -> np.ndarray:
        """int32 tokens of every document of the corpus behind its anchor, as they will be read."""
        content_D = self._table.content_lengths(self._own_anchors["own_anchor"])
        if (fill_in := self._config.fill_in_the_middle) is not None:
            return fill_in.lengths(np.arange(len(content_D)), content_D)
        return content_D

    @cached_property
    def _prefix_slots(self) -> np.ndarray:
        """int32 slots of every document's prefix, or one number for all; warns of missing tags."""
        total = self._table.num_documents
        prefix_slots = self._tags.prefix_slots(total)
        untagged = total if len(prefix_slots) == 1 else int((prefix_slots == 1).sum())
        if self._config.domain_tags and untagged:
            logger.warning(
                "%d of %d documents of the corpus %s have no known domain and get no tag%s",
                untagged,
                total,
                self._dataset_path,
                ": beside it there is no .manifest.json with .domains.npy "
                "(tools/preprocess_data.py --domain-key writes both)"
                if len(prefix_slots) == 1
                else "",
            )
        return prefix_slots


def count_listed(path: str | None) -> int:
    """Entries of a document list, read from its header; 0 = there is none, or it is no array."""
    if path is None:
        return 0
    try:
        return len(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, TypeError):
        return 0  # `EpochPlanner.documents` says what is wrong with it
