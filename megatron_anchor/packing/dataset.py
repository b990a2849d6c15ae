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
serves all attention patterns and all parallel layouts.
Cost: reading a sample of 131072 slots with 500 documents takes about a millisecond; the index is
read from disk in all processes and takes 4 bytes a document and epoch and 20 bytes a sample.
"""

import copy
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_anchor.context_parallel.split import split_sample
from megatron_anchor.packing.best_fit import fitted_pieces
from megatron_anchor.packing.cache import StoredArrays, load_or_build
from megatron_anchor.packing.config import PackedDatasetConfig
from megatron_anchor.packing.corpus_files import inspect_corpus
from megatron_anchor.packing.documents import Documents
from megatron_anchor.packing.domains import NO_TAGS, DomainTags, open_tags, tag_tokenizer
from megatron_anchor.packing.epochs import PlanFigures, SamplePlan, plan_samples
from megatron_anchor.packing.fingerprint import fingerprint
from megatron_anchor.packing.index import Pieces, concatenated_pieces
from megatron_anchor.packing.interleave import interleave
from megatron_anchor.packing.layout import lay_out
from megatron_anchor.packing.vocabulary import find_token_outside, ids_are_inside
from megatron_anchor.terminal import logger_of

__all__ = ["PackedDataset", "PackedDatasetConfig"]

logger = logger_of(__name__)

PACKING_VERSION = 2
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
        num_samples: samples needed, from as many epochs as that takes; None = one whole epoch.
        index_split: train, valid or test.
        config: the settings.

    Raises:
        ValueError: the split holds no document with a token, the .idx is damaged, or the index
            cannot be written.
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
        self._corpus = {"path": dataset_path, **inspect_corpus(dataset_path).identity}
        self._tags, self._tags_identity = self._open_tags()
        self._document_list = self._find_document_list()
        self._identify()
        self._own_anchors = self._load_own_anchors()
        self._plan = self._load_plan()
        self._num_samples = len(self._plan["shuffle_index"])
        if self._num_samples == 0 and num_samples != 0:
            if self._document_list is not None:
                raise ValueError(
                    f"--document-list {self._document_list} names no document of the training "
                    f"split of {dataset_path} with a token behind its anchor; draw other "
                    "documents, or give the training split a larger share with --split"
                )
            raise ValueError(
                f"the {index_split.name} split of the corpus {dataset_path} holds no document with "
                f"a token ({len(indices)} documents, all empty or nothing but an anchor); give it "
                "a larger share with --split, or another corpus"
            )
        log_single_rank(
            logger,
            logging.INFO,
            f"> {index_split.name} split of {dataset_path}: "
            + self.figures.summary(sequence_length=config.sequence_length),
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Number of documents; splits are ranges of documents."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedDatasetConfig) -> IndexedDataset:
        """Check both files of the corpus and open it.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the path is in an object store.
        """
        if is_object_storage_path(dataset_path):
            raise ValueError(
                f"the corpus {dataset_path} is in an object store, which packed datasets do not "
                "read: copy it to a file system and name that path"
            )
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
        """What the samples are made of, all epochs together."""
        return PlanFigures(*self._plan["figures"].tolist())

    def __len__(self) -> int:
        """Number of samples, a partly filled last one included."""
        return self._num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Build one sample.

        Raises:
            IndexError: there is no such sample.
            ValueError: a token id is outside the vocabulary.
        """
        text, pieces = self._read(self.pieces(0 if idx is None else idx))
        arrays = lay_out(
            text,
            pieces,
            sequence_length=self.config.sequence_length,
            anchor_token_id=self.config.anchor_token_id,
            pad_token_id=self.config.pad_token_id,
            attention_pattern=self.config.attention_pattern,
            tags=self._tags,
            anchor_position=self.config.anchor_position,
            first_token_loss=self.config.first_token_loss,
            order=self._interleaved(idx or 0, pieces),
        )
        if not ids_are_inside(arrays["tokens"], arrays["labels"], self.config.vocab_size):
            raise self._foreign_token_error(idx)
        if idx is None:
            arrays["labels"][:] = 0
            arrays["loss_mask"][:] = 0.0
            arrays["router_mask"][:] = False
        arrays |= self._context_split(arrays["cu_seqlens"])
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return sample | {"origin": torch.tensor([self.number, (idx or 0) % self._num_samples])}

    @property
    def number(self) -> int:
        """A number below 2^60 that no other corpus, split or setting of samples has."""
        return int(self.unique_description_hash[:15], 16)

    def content_lengths(self) -> np.ndarray:
        """int32 tokens behind the anchor of every document in an epoch, with repetitions."""
        lengths = Documents(self.dataset).content_lengths(self._own_anchors["own_anchor"])
        return lengths[self._documents_of_an_epoch()]

    def pieces(self, idx: int) -> Pieces:
        """The slices of documents that sample `idx` holds.

        Raises:
            IndexError: there is no such sample.
        """
        if not -self._num_samples <= idx < self._num_samples:
            raise IndexError(
                f"sample {idx} of a dataset with {self._num_samples} samples (0 to "
                f"{self._num_samples - 1})"
            )
        plan = self._plan
        sample = int(plan["shuffle_index"][idx])
        (first, second), (last, next_second) = plan["sample_index"][sample : sample + 2]
        concat = self.config.packing == "concat"
        last += concat and next_second > 0
        documents = plan["document_index"][first:last].astype(np.int64)
        table = Documents(self.dataset)
        begin = table.boundaries(documents) + self._own_anchors["own_anchor"][documents]
        content = table.boundaries(documents + 1) - begin
        tag = self._tags.of(documents)
        common: dict[str, Any] = {
            "tag_P": tag,
            "head_P": 1 + self._tags.lengths[tag],
            "alignment": self.config.document_alignment,
        }
        if concat:
            return concatenated_pieces(
                documents, begin, content, first_offset=second, last_offset=next_second, **common
            )
        length = self.config.sequence_length
        return fitted_pieces(
            documents, begin, content, chunk=int(second), sequence_length=length, **common
        )

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

    def _interleaved(self, idx: int, pieces: Pieces) -> np.ndarray | None:
        """The order of a sample's slots, the same on every rank and in every run; None = as is."""
        if self.config.interleaving is None:
            return None
        return interleave(
            pieces.head + pieces.length,
            interleaving=self.config.interleaving,
            random=np.random.default_rng([self.config.random_seed, idx % self._num_samples]),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a data loader's worker does not need (one number a document)."""
        return {**self.__dict__, "indices": None}

    def _read(self, pieces: Pieces) -> tuple[np.ndarray, Pieces]:
        """Text that holds the slices, and the slices with their places in it.

        With memory-mapped files this is the whole .bin and nothing is read yet; else the slices
        are read one by one, each with the token behind it where that is the last label.
        """
        reader, dtype = self.dataset.bin_reader, self.dataset.index.dtype
        if self.dataset.mmap:
            count = Documents(self.dataset).num_tokens
            return reader.read(dtype=dtype, count=count, offset=0), pieces
        itemsize, counts = np.dtype(dtype).itemsize, pieces.tokens_read
        slices = [
            reader.read(dtype=dtype, count=int(count), offset=int(start) * itemsize)
            for start, count in zip(pieces.start, counts, strict=True)
        ]
        return np.concatenate(slices), pieces._replace(start=np.cumsum(counts) - counts)

    def _foreign_token_error(self, idx: int | None) -> ValueError:
        """Where a sample's first token outside the vocabulary stands, for the user."""
        pieces = self.pieces(idx or 0)
        text, places = self._read(pieces)
        vocab_size = self.config.vocab_size
        piece, offset = find_token_outside(text, places, vocab_size=vocab_size)
        token_id = text[places.start[piece] + offset]
        document = pieces.document[piece]
        begin = Documents(self.dataset).boundaries(slice(document, document + 1))[0]
        return ValueError(
            f"token id {token_id} in the corpus {self.dataset_path}, document {document}, token "
            f"{pieces.start[piece] + offset - begin} (sample {idx}) is outside the vocabulary of "
            f"{'any size' if vocab_size is None else vocab_size}: the corpus was written with "
            "another tokenizer or is damaged; tokenize it with the tokenizer of this model, or set "
            "--tokenizer-model (--vocab-size) to the one it was written with"
        )

    def _identify(self) -> None:
        """Extend Megatron's description of this dataset; it keys our index and blends of it."""
        self.unique_identifiers.update(
            packing_version=PACKING_VERSION,
            corpus=self._corpus,
            documents=_describe_documents(self.indices),
            document_list=_describe_file(self._document_list),
            domain_tags=self._tags_identity,
        )
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        self.unique_description_hash = _digest(self.unique_identifiers)

    def _open_tags(self) -> tuple[DomainTags, dict[str, Any] | None]:
        if not self.config.domain_tags:
            return NO_TAGS, None
        tags, identity = open_tags(
            self.dataset_path,
            tag_format=self.config.domain_tag_format,
            tokenize=tag_tokenizer(self.config.tokenizer),
        )
        if tags.longest + 2 > self.config.sequence_length:
            raise ValueError(
                f"a domain tag of the corpus {self.dataset_path} has {tags.longest} tokens, which "
                f"leaves no room in samples of {self.config.sequence_length} slots; shorten "
                "--domain-tag-format or raise --seq-length"
            )
        return tags, identity

    def _report_tags(self, head_slots: np.ndarray) -> None:
        """Warn of documents without a tag."""
        if not self.config.domain_tags:
            return
        total = Documents(self.dataset).num_documents
        untagged = total if len(head_slots) == 1 else int((head_slots == 1).sum())
        if untagged:
            logger.warning(
                "%d of %d documents of the corpus %s have no known domain and get no tag%s",
                untagged,
                total,
                self.dataset_path,
                ": beside it there is no .manifest.json with .domains.npy "
                "(tools/preprocess_data.py --domain-key writes both)"
                if len(head_slots) == 1
                else "",
            )

    def _find_document_list(self) -> str | None:
        """The document list of this corpus; only training reads it."""
        lists = self.config.document_lists
        if not lists or self.index_split is not Split.train:
            return None
        return lists.get(self.dataset_path, lists.get(""))

    def _documents_of_an_epoch(self) -> np.ndarray:
        """int32 documents of the split, or what the document list takes from them."""
        if self._document_list is None:
            return self.indices
        # Here and not above: without a list nothing of the corpus tools is needed.
        from megatron_anchor.corpus.upsampling import read_document_list

        listed = read_document_list(self._document_list, self.dataset_path)
        used = np.zeros(Documents(self.dataset).num_documents, dtype=np.bool_)
        used[self.indices] = True
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
            f"{_digest(key)}-{type(self).__name__}-own_anchors",
            names=("own_anchor",),
            description=key,
            build=build,
        )

    def _load_plan(self) -> StoredArrays:
        """The arrays of `SamplePlan`."""

        def build() -> dict[str, np.ndarray]:
            self._announce(f"{self.index_split.name} sample index")
            table = Documents(self.dataset)
            head_slots = self._tags.head_slots(table.num_documents)
            self._report_tags(head_slots)
            return plan_samples(
                self._documents_of_an_epoch(),
                table.content_lengths(self._own_anchors["own_anchor"]),
                sequence_length=self.config.sequence_length,
                num_samples=self.num_samples,
                random_seed=self.config.random_seed,
                packing=self.config.packing,
                head_slots_D=head_slots,
                alignment=self.config.document_alignment,
            )._asdict()

        return load_or_build(
            self._cache_directory,
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            names=SamplePlan._fields,
            description=self.unique_identifiers,
            build=build,
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


def _describe_documents(indices: np.ndarray) -> list[int] | str:
    """[first, last + 1] of a range of documents, else a digest of the list."""
    if len(indices) == 0:
        return [0, 0]
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and (indices[1:] > indices[:-1]).all():
        return [first, last + 1]
    return hashlib.sha256(indices.tobytes()).hexdigest()


def _describe_file(path: str | None) -> dict[str, Any] | None:
    """Path and fingerprint: other contents give another description."""
    if path is None:
        return None
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--document-list {path} not found")
    return {"path": path, **fingerprint(path)}


def _digest(description: Mapping[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
