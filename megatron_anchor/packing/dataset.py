"""The packed dataset that Megatron's `BlendedMegatronDatasetBuilder` builds.

    config = PackedDatasetConfig(
        random_seed=1234, sequence_length=131072, blend=(["corpus_text_document"], None),
        split="99,1,0", tokenizer=tokenizer, anchor_token_id=tokenizer.bos,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        PackedDataset, [10_000, 100, None], lambda: True, config
    ).build()

Which sample is which depends on the corpus (and its document list and tags, if used), the seed,
the sequence length, the packing, the alignment and the anchor token, and on nothing else; one index
serves all attention patterns and all parallel layouts. The number of samples only says how many
epochs are opened: a longer run has the same samples, and more behind them.
Cost: reading a sample of 131072 slots with 500 documents takes about a millisecond; the index is
read from disk in all processes and takes 4 bytes a document and epoch and 20 bytes a sample.
"""

import copy
import json
import logging
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_anchor.context_parallel.split import split_sample
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.headers import inspect_corpus
from megatron_anchor.indexed.weights import TargetWeights
from megatron_anchor.packing.best_fit import fitted_slices
from megatron_anchor.packing.cache import StoredArrays, digest, load_or_build
from megatron_anchor.packing.config import PackedDatasetConfig
from megatron_anchor.packing.documents import Documents
from megatron_anchor.packing.domains import NO_TAGS, DomainTags, open_tags, tag_tokenizer
from megatron_anchor.packing.effective_context import (
    ContextWeights,
    content_slots,
    count_contexts,
    slot_contexts,
)
from megatron_anchor.packing.epoch_planner import EpochPlanner, count_listed
from megatron_anchor.packing.epochs import PlanFigures
from megatron_anchor.packing.fill_in_the_middle import FillInTheMiddle
from megatron_anchor.packing.identity import describe_documents, describe_file, without_paths
from megatron_anchor.packing.index import Slices, concatenated_slices
from megatron_anchor.packing.interleave import interleave
from megatron_anchor.packing.layout import lay_out
from megatron_anchor.packing.length_schedule import cut
from megatron_anchor.packing.object_storage import open_stored, stored_identity
from megatron_anchor.packing.sample_index import SampleIndex
from megatron_anchor.packing.target_weights import SliceWeights, slice_weights
from megatron_anchor.packing.vocabulary import find_token_outside, ids_are_inside
from megatron_anchor.terminal import logger_of

__all__ = ["PackedDataset", "PackedDatasetConfig"]

logger = logger_of(__name__)

PACKING_VERSION = 3
"""Part of every cache key; raised whenever the same settings would give other samples."""


class PackedDataset(MegatronDataset):
    """Samples of whole and cut documents, each document behind a copy of the anchor.

    `dataset[i]` is a dict of tensors: tokens, labels (0 where masked), position_ids int64 [S],
    loss_mask float32 [S], router_mask bool [S] (slots that a router of experts counts), cu_seqlens
    int32 [ceil(S / 2) + 1] (segment borders, then S repeated), max_seqlen, num_documents (slices),
    num_cut (slices of cut documents), num_padding (slots) int32 scalars, and origin int64 [2]: this
    dataset's `number` and i, by which a run can say what was in a batch. Where the config has
    `context_parts` there are part_of_chunk int32 [32 x parts] and context_imbalance too
    (`megatron_anchor.context_parallel.split.split_sample`). `dataset[None]` is a sample in which
    nothing counts, to fill a batch with.

    Args:
        dataset: the corpus.
        dataset_path: its path without .bin and .idx.
        indices: int32 numbers of the documents to use; None = all.
        num_samples: samples needed, of as many whole epochs as that takes; None = one epoch.
        index_split: train, valid or test.
        config: the settings.

    A corpus of a blend may have no document for validation or test: its dataset has no samples
    then, and `megatron_anchor.packing.blend` leaves it out.

    Raises:
        UserError: the split holds no document with a token, the .idx is damaged, the index cannot
            be written, or a domain tag has a token outside the vocabulary.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str,
        indices: np.ndarray | None,
        num_samples: int | None,
        index_split: Split,
        config: PackedDatasetConfig,
    ) -> None:
        # Megatron's constructor compares the tokenizer's pad with its other special tokens and
        # warns. Nothing here depends on it, for padding is known by its place: hide the tokenizer.
        without_tokenizer = copy.copy(config)
        without_tokenizer.tokenizer = None
        if indices is None:
            indices = np.arange(self.numel_low_level_dataset(dataset), dtype=np.int32)
        super().__init__(
            dataset, dataset_path, indices, num_samples, index_split, without_tokenizer
        )
        self.config: PackedDatasetConfig = config
        self._corpus = {"path": dataset_path, **self._corpus_identity()}
        self._tags, tags_identity = self._open_tags()
        self._layout = replace(config.layout, tags=self._tags)
        self._document_list = self._find_document_list()
        self.target_weights = TargetWeights.open(dataset_path)
        self._require_no_moved_weights()
        self.context_weights: ContextWeights | None = None
        """Weights by effective context, which all corpora of a blend share; None = 1."""
        self._identify(tags_identity)
        self._own_anchors = self._load_own_anchors()
        self._samples = SampleIndex(
            self._cache_directory,
            name=f"{type(self).__name__}-{index_split.name}",
            description=self.sample_identifiers,
            num_documents=count_listed(self._document_list) or len(indices),
        )
        self.extend(num_samples)
        if len(self) == 0:
            if num_samples != 0 and not self._is_left_out_when_empty:
                raise self._no_document_error()
            return
        log_single_rank(
            logger,
            logging.INFO,
            f"> {index_split.name} split of {dataset_path}: an epoch is "
            + self.figures.summary(sequence_length=config.sequence_length)
            + f"; epochs read: {self._samples.epochs}",
        )

    def extend(self, num_samples: int | None) -> None:
        """Have at least so many samples; those that are there stay as they are.

        Args:
            num_samples: samples needed, of as many whole epochs as that takes; None = one epoch.
        """
        self._samples.extend(num_samples, self._planner().plan)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Number of documents; splits are ranges of documents."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedDatasetConfig) -> IndexedDataset:
        """Check both files of the corpus and open it.

        Raises:
            FileNotFoundError: a file is missing.
            UserError: a file is damaged, or a corpus in an object store cannot be opened.
        """
        if is_object_storage_path(dataset_path):
            return open_stored(dataset_path, config.object_storage_cache_path)
        inspect_corpus(dataset_path)
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Settings that the samples depend on (the pattern only says how they are read)."""
        return [
            "random_seed",
            "sequence_length",
            "anchor_token_id",
            "packing",
            "document_alignment",
        ]

    @property
    def figures(self) -> PlanFigures:
        """What the samples of an epoch are made of."""
        return self._samples.figures

    def __len__(self) -> int:
        """Number of samples, the partly filled last one of every epoch included."""
        return len(self._samples)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Build one sample; see `sample`."""
        return self.sample(idx)

    def sample(self, idx: int | None, *, longest: int | None = None) -> dict[str, torch.Tensor]:
        """Build one sample.

        Args:
            idx: its number; None = a sample in which nothing counts.
            longest: slots of the longest segment, see `length_schedule`; None = as they are.

        Raises:
            IndexError: there is no such sample.
            UserError: a token id is outside the vocabulary.
        """
        found = self.slices(0 if idx is None else idx)
        text, slices = self._read(found)
        order = self._interleaved(idx or 0, slices)
        weights = self._slice_weights(found)
        arrays = lay_out(text, slices, self._layout, order=order, weights=weights)
        if not ids_are_inside(arrays["tokens"], arrays["labels"], self.config.vocab_size):
            raise self._foreign_token_error(idx)
        if idx is None:
            arrays["labels"][:] = 0
            arrays["loss_mask"][:] = 0.0
            arrays["router_mask"][:] = False
        new_anchors = np.zeros(0, dtype=np.int64)
        if longest is not None:
            new_anchors = cut(arrays, self._layout, longest)
        self._weigh_contexts(arrays, slices, order, new_anchors)
        arrays |= self._context_split(arrays["cu_seqlens"])
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return sample | {"origin": torch.tensor([self.number, (idx or 0) % len(self)])}

    @property
    def number(self) -> int:
        """A number below 2^60 that no other corpus, split or setting of samples has."""
        return int(digest(self.sample_identifiers)[:15], 16)

    def content_lengths(self) -> np.ndarray:
        """int32 tokens behind the anchor of every document in an epoch, with repetitions."""
        planner = self._planner()
        return planner.content_lengths[planner.documents]

    def slices(self, idx: int) -> Slices:
        """The slices of documents that sample `idx` holds.

        Raises:
            IndexError: there is no such sample.
        """
        total = len(self)
        if not -total <= idx < total:
            raise IndexError(f"sample {idx} of a dataset with {total} samples (0 to {total - 1})")
        plan, sample = self._samples.find(idx % total)
        (first, second), (last, next_second) = plan["sample_index"][sample : sample + 2]
        concat = self.config.packing == "concat"
        last += concat and next_second > 0
        documents = plan["document_index"][first:last].astype(np.int64)
        begin, content = self._contents(documents)
        if (fill_in := self.config.fill_in_the_middle) is not None:
            content = fill_in.lengths(documents, content)
        tag = self._tags.of(documents)
        common: dict[str, Any] = {
            "tag_P": tag,
            "prefix_P": 1 + self._tags.lengths[tag],
            "alignment": self.config.alignment,
        }
        if concat:
            return concatenated_slices(
                documents, begin, content, first_offset=second, last_offset=next_second, **common
            )
        length = self.config.sequence_length
        return fitted_slices(
            documents, begin, content, chunk=int(second), sequence_length=length, **common
        )

    def _contents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the .bin has each document's tokens behind its anchor, and how many."""
        table = Documents(self.dataset)
        begin = table.boundaries(documents) + self._own_anchors["own_anchor"][documents]
        return begin, table.boundaries(documents + 1) - begin

    def _context_split(self, cu_seqlens: np.ndarray) -> dict[str, np.ndarray]:
        """Who holds which chunk under context parallelism, and how unequal the work is."""
        if self.config.context_parts == 1:
            return {}
        return split_sample(
            cu_seqlens,
            sequence_length=self.config.sequence_length,
            parts=self.config.context_parts,
            windows=self.config.attention_windows,
        )

    @property
    def weighting(self) -> str:
        """How targets are weighed, beside the corpus' own weights; only training is."""
        return self.config.loss_weighting if self.index_split is Split.train else "uniform"

    def _slice_weights(self, slices: Slices) -> SliceWeights | None:
        return slice_weights(
            slices,
            weighting=self.weighting,
            corpus=self.target_weights,
            documents=Documents(self.dataset),
            own_anchor_D=self._own_anchors["own_anchor"],
            first_token_loss=self.config.anchor_first_token_loss,
        )

    def _weigh_contexts(
        self,
        arrays: dict[str, np.ndarray],
        slices: Slices,
        order: np.ndarray | None,
        new_anchors: np.ndarray,
    ) -> None:
        if self.context_weights is None:
            return
        content_S = content_slots(slices, self.config.sequence_length)
        if order is not None and not self.config.pattern.masks_documents:
            content_S[: len(order)] = content_S[order]
        content_S[new_anchors] = False
        contexts_S = slot_contexts(content_S, arrays["cu_seqlens"])
        arrays["loss_mask"] *= self.context_weights.of(contexts_S)

    def context_counts(self, edges: np.ndarray) -> np.ndarray:
        """int64 [b], targets of an epoch by effective context; counted once, then read."""
        key = self.sample_identifiers | {
            "context_edges": edges.tolist(),
            "first_token_loss": self.config.anchor_first_token_loss,
            "masks_documents": self.config.pattern.masks_documents,
        }
        stored = load_or_build(
            self._cache_directory,
            f"{digest(key)}-{type(self).__name__}-contexts",
            names=("counts",),
            description=key,
            build=lambda: {"counts": count_contexts(self, edges)},
        )
        return np.asarray(stored["counts"])

    def _interleaved(self, idx: int, slices: Slices) -> np.ndarray | None:
        """The order of a sample's slots, the same on every rank and in every run; None = as is."""
        interleaving = self.config.interleaving()
        if interleaving is None:
            return None
        return interleave(
            slices.prefix + slices.length,
            interleaving=interleaving,
            random=np.random.default_rng([self.config.random_seed, idx % len(self)]),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a data loader's worker does not need (one number a document)."""
        return {**self.__dict__, "indices": None}

    def _read(self, slices: Slices) -> tuple[np.ndarray, Slices]:
        """Text that holds the slices, and the slices with their places in it.

        With memory-mapped files this is the whole .bin and nothing is read yet; else, and where
        documents are rearranged, the slices are read one by one, each with the token behind it
        where that is the last label.
        """
        counts = slices.tokens_read
        if self.config.fill_in_the_middle is not None:
            texts = self._read_rearranged(self.config.fill_in_the_middle, slices)
        elif self.dataset.mmap:
            return self._tokens(0, Documents(self.dataset).num_tokens), slices
        else:
            texts = [self._tokens(*place) for place in zip(slices.start, counts, strict=True)]
        return np.concatenate(texts), slices._replace(start=np.cumsum(counts) - counts)

    def _tokens(self, start: int, count: int) -> np.ndarray:
        """`count` tokens of the .bin from the token `start` on."""
        reader, dtype = self.dataset.bin_reader, self.dataset.index.dtype
        offset = int(start) * np.dtype(dtype).itemsize
        return np.asarray(reader.read(dtype=dtype, count=int(count), offset=offset))

    def _read_rearranged(self, fill_in: FillInTheMiddle, slices: Slices) -> list[np.ndarray]:
        """The tokens of each slice, of documents as `fill_in` rearranges them."""
        begin, content = self._contents(slices.document)
        chosen = fill_in.is_chosen(slices.document, content)
        texts = []
        for p, count in enumerate(slices.tokens_read):
            if not chosen[p]:
                texts.append(self._tokens(slices.start[p], count))
                continue
            whole = fill_in.rearranged(int(slices.document[p]), self._tokens(begin[p], content[p]))
            first = slices.start[p] - begin[p]
            texts.append(whole[first : first + count])
        return texts

    def _foreign_token_error(self, idx: int | None) -> UserError:
        """Where a sample's first token outside the vocabulary stands, for the user."""
        slices = self.slices(idx or 0)
        text, places = self._read(slices)
        vocab_size = self.config.vocab_size
        p, offset = find_token_outside(text, places, vocab_size=vocab_size)
        token_id = text[places.start[p] + offset]
        document = slices.document[p]
        begin = Documents(self.dataset).boundaries(slice(document, document + 1))[0]
        return UserError(
            f"token id {token_id} in the corpus {self.dataset_path}, document {document}, token "
            f"{slices.start[p] + offset - begin} (sample {idx}) is outside the vocabulary of "
            f"{'any size' if vocab_size is None else vocab_size}: the corpus was written with "
            "another tokenizer or is damaged; tokenize it with the tokenizer of this model, or set "
            "--tokenizer-model (--vocab-size) to the one it was written with"
        )

    def _identify(self, tags_identity: dict[str, Any] | None) -> None:
        """Extend Megatron's description of this dataset; it keys the indices of blends of it."""
        self.unique_identifiers.update(
            packing_version=PACKING_VERSION,
            corpus=self._corpus,
            documents=describe_documents(self.indices),
            document_list=describe_file(self._document_list),
            domain_tags=tags_identity,
        )
        if (fill_in := self.config.fill_in_the_middle) is not None:
            self.unique_identifiers["fill_in_the_middle"] = asdict(fill_in)
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        self.unique_description_hash = digest(self.unique_identifiers)

    @property
    def sample_identifiers(self) -> dict[str, Any]:
        """All that sample i depends on, as JSON values: not how many samples there are."""
        return {k: v for k, v in self.unique_identifiers.items() if k != "num_samples"}

    @property
    def contents_hash(self) -> str:
        """The same for datasets that have the same samples, wherever their files are."""
        return digest(without_paths(self.sample_identifiers))

    @property
    def _is_left_out_when_empty(self) -> bool:
        """Whether this is the validation or test split of one corpus of several."""
        blend = self.config.blend
        return self.index_split is not Split.train and blend is not None and len(blend[0]) > 1

    def _no_document_error(self) -> UserError:
        if self._document_list is not None:
            return UserError(
                f"--document-list {self._document_list} names no document of the training "
                f"split of {self.dataset_path} with a token behind its anchor; draw other "
                "documents, or give the training split a larger share with --split"
            )
        return UserError(
            f"the {self.index_split.name} split of the corpus {self.dataset_path} holds no "
            f"document with a token ({len(self.indices)} documents, all empty or nothing but an "
            "anchor); give it a larger share with --split, or another corpus"
        )

    def _corpus_identity(self) -> dict[str, Any]:
        if is_object_storage_path(self.dataset_path):
            return stored_identity(self.dataset_path, self.config.object_storage_cache_path)
        return inspect_corpus(self.dataset_path).identity

    def _open_tags(self) -> tuple[DomainTags, dict[str, Any] | None]:
        if not self.config.domain_tags:
            return NO_TAGS, None
        tags, identity = open_tags(
            self.dataset_path,
            tag_format=self.config.domain_tag_format,
            tokenize=tag_tokenizer(self.config.tokenizer),
            vocab_size=self.config.vocab_size,
        )
        if tags.longest + 2 > self.config.sequence_length:
            raise UserError(
                f"a domain tag of the corpus {self.dataset_path} has {tags.longest} tokens, which "
                f"leaves no room in samples of {self.config.sequence_length} slots; shorten "
                "--domain-tag-format or raise --seq-length"
            )
        return tags, identity

    def _require_no_moved_weights(self) -> None:
        if self.config.fill_in_the_middle is not None and self.target_weights is not None:
            raise UserError(
                f"the corpus {self.dataset_path} has weights for its tokens, and --fim-data moves "
                "them to other places; leave out --fim-data, or read a corpus without weights"
            )

    def _find_document_list(self) -> str | None:
        """The document list of this corpus; only training reads it."""
        lists = self.config.document_lists
        if not lists or self.index_split is not Split.train:
            return None
        return lists.get(self.dataset_path, lists.get(""))

    def _load_own_anchors(self) -> StoredArrays:
        """Which documents of the corpus begin with the anchor token: bool [documents]."""

        def build() -> dict[str, np.ndarray]:
            self._announce("first tokens of the documents")
            documents = Documents(self.dataset)
            documents.check()
            return {"own_anchor": documents.find_own_anchors(self.config.anchor_token_id)}

        key = {
            "packing_version": PACKING_VERSION,
            "corpus": self._corpus,
            "anchor_token_id": self.config.anchor_token_id,
        }
        return load_or_build(
            self._cache_directory,
            f"{digest(key)}-{type(self).__name__}-own_anchors",
            names=("own_anchor",),
            description=key,
            build=build,
        )

    def _planner(self) -> EpochPlanner:
        return EpochPlanner(
            self.dataset,
            self.indices,
            self._own_anchors,
            dataset_path=self.dataset_path,
            document_list=self._document_list,
            tags=self._tags,
            config=self.config,
            announce=lambda: self._announce(f"{self.index_split.name} sample index"),
        )

    @property
    def _cache_directory(self) -> str:
        beside = os.path.join(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        return self.config.path_to_cache or beside

    def _announce(self, what: str) -> None:
        """Say what is built, and on which rank if that is not the first one."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        logger.info("build the %s of %s", what, self.dataset_path)
        if rank != 0:
            logger.warning(
                "rank %d builds the %s of %s itself, for it does not see what rank 0 wrote to %s; "
                "put --data-cache-path on a file system that all ranks share to save this work",
                rank,
                what,
                self.dataset_path,
                self._cache_directory,
            )
