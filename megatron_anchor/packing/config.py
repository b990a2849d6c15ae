"""Settings of a packed dataset: Megatron's own, and the few that packing adds."""

import logging
import math
from dataclasses import dataclass, field

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_anchor.packing.domains import check_format
from megatron_anchor.packing.interleave import Interleaving
from megatron_anchor.packing.patterns import ANCHORED, PACKINGS, check_attention_pattern
from megatron_anchor.terminal import logger_of
from megatron_anchor.windows import FULL, LayerWindows

logger = logger_of(__name__)

_WITHOUT_EFFECT = {
    "reset_position_ids": "--attention-pattern decides the position ids",
    "reset_attention_mask": "--attention-pattern decides the mask",
    "eod_mask_loss": "the slot behind a document's last token never has a target",
    "inter_document_masking": "--attention-pattern decides the mask",
}
"""Megatron's options that mean something for its GPTDataset only, and what takes their place."""


@dataclass
class PackedDatasetConfig(GPTDatasetConfig):
    """Settings of `PackedDataset`.

    All fields of Megatron's GPTDatasetConfig keep their meaning, but for those that `PackedDataset`
    replaces: reset_position_ids, reset_attention_mask, eod_mask_loss and inter_document_masking
    (a warning says so where they are set), create_attention_mask, add_extra_token_to_sequence and
    drop_last_partial_validation_sequence (no effect: there is no dense mask, every sample has a
    label for each of its S slots, no token is dropped). `tokenizer` may be any object that has
    Megatron's `vocab_size`; its special tokens are not looked at.
    """

    attention_pattern: str = "anchor"
    """Which segments and position ids the samples carry: one of ATTENTION_PATTERNS."""

    anchor_token_id: int = field(kw_only=True)
    """Token at the head of every document: the tokenizer's bos, or its eos where it has no bos."""

    pad_token_id: int = 0
    """Token in slots that hold nothing; may equal any other token, for masks go by place."""

    vocab_size: int | None = None
    """Size of the model's vocabulary, to refuse larger token ids. None = check for negatives only.
    """

    packing: str = "concat"
    """How documents become samples: one of PACKINGS."""

    document_alignment: int = 1
    """Each document slice takes a multiple of so many slots, filled at its end."""

    document_lists: dict[str, str] | None = None
    """Corpus prefix to the .npy of document ids (with repetitions) that make its training split's
    epoch; "" = the only corpus. Validation and test read the corpus as it is."""

    domain_tags: bool = False
    """Whether the name of a document's domain stands behind its anchor; needs a `tokenizer` with
    `tokenize`."""

    domain_tag_format: str = "{domain}: "
    """Text of a tag."""

    interleaving: Interleaving | None = None
    """Bounds of the chunks when the documents of a sample are interleaved; None = they are not."""

    anchor_position: int = 0
    """Position id of the anchor's copies under the patterns "anchor" and "anchor-masked"."""

    first_token_loss: bool = True
    """Whether a document's first token is a target, predicted by its anchor (or tag)."""

    attention_windows: LayerWindows = FULL
    """Windows of the model's layers, by which the work of samples is counted."""

    context_parts: int = 1
    """Parts among which the slots of a sample are dealt out for equal attention work
    (`megatron_anchor.context_parallel.split.assign_chunks`); 1 = they are not."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting is out of range, or asks for what a packed dataset cannot do.
        """
        for name, instead in _WITHOUT_EFFECT.items():
            if getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                log_single_rank(
                    logger, logging.WARNING, f"{flag} has no effect on packed samples: {instead}"
                )
            setattr(self, name, False)
        super().__post_init__()
        check_attention_pattern(self.attention_pattern)
        if self.mock:
            raise ValueError(
                "a packed dataset needs a corpus: set --data-path (or --train-data-path ..., "
                "--per-split-data-args-path); mock data is not supported"
            )
        self._check_blends()
        if self.hybrid_context_parallel:
            raise ValueError(
                "packed samples do not support --hybrid-context-parallel: leave it out"
            )
        if self.sequence_length < 2:
            raise ValueError(
                f"got sequence_length {self.sequence_length}, expected at least 2 (an anchor and a "
                "token); set --seq-length"
            )
        if self.anchor_token_id is None:
            raise ValueError(
                "no anchor token: set --anchor-token (a tokenizer with a bos or eos has one)"
            )
        self._check_token_id("anchor_token_id", self.anchor_token_id, flag="--anchor-token")
        self._check_token_id("pad_token_id", self.pad_token_id, flag="pad_token_id")
        self._check_packing()
        self._check_positions()

    def _check_blends(self) -> None:
        blends = self.blend_per_split or [self.blend] * len(Split)
        for split, blend in zip(Split, blends, strict=True):
            if blend is None or blend[1] is None:
                continue
            for prefix, weight in zip(*blend, strict=True):
                if not (math.isfinite(weight) and weight > 0):
                    raise ValueError(
                        f"the blend gives the corpus {prefix} the weight {weight}, expected a "
                        "finite number above 0; leave that corpus out, or give it a weight"
                    )
            if split is Split.valid and self.full_validation:
                raise ValueError(
                    "--full-validation reads every validation set once, so weights have no meaning "
                    "there: name the sets without weights with --valid-data-path (and the training "
                    "corpora with --train-data-path)"
                )

    def _check_packing(self) -> None:
        if self.packing not in PACKINGS:
            raise ValueError(
                f"got packing {self.packing!r}, expected one of {', '.join(PACKINGS)}; set "
                "--packing"
            )
        alignment = self.document_alignment
        if alignment < 1 or self.sequence_length % alignment:
            raise ValueError(
                f"got document_alignment {alignment}, expected a divisor of the sequence length "
                f"{self.sequence_length}; set --document-alignment (or --seq-length)"
            )
        if alignment > 1 and self.attention_pattern == "anchor-masked":
            raise ValueError(
                f"--document-alignment {alignment} cannot be kept under --attention-pattern "
                "anchor-masked, where anchors are segments of one slot: leave it out"
            )
        if self.domain_tags:
            check_format(self.domain_tag_format)
            if not hasattr(self.tokenizer, "tokenize"):
                raise ValueError("--domain-tags needs a tokenizer that turns text into tokens")

    def _check_positions(self) -> None:
        if self.anchor_position < 0:
            raise ValueError(
                f"got anchor_position {self.anchor_position}, expected 0 or more; set "
                "--anchor-position"
            )
        if self.anchor_position and self.attention_pattern not in ANCHORED:
            raise ValueError(
                f"--anchor-position {self.anchor_position} has no meaning under "
                f"--attention-pattern {self.attention_pattern}, where anchors are counted like "
                "other slots; leave it out or set --attention-pattern anchor"
            )
        if self.interleaving and self.attention_pattern == "intra-document-reset":
            raise ValueError(
                "--interleave-chunks has no effect under --attention-pattern "
                "intra-document-reset, where every document counts its positions alone: leave one "
                "of them out"
            )

    def _check_token_id(self, name: str, token_id: int, *, flag: str) -> None:
        if token_id < 0 or (self.vocab_size is not None and token_id >= self.vocab_size):
            most = "" if self.vocab_size is None else f" to {self.vocab_size - 1} (vocab_size - 1)"
            raise ValueError(
                f"got {name} {token_id}, expected 0{most or ' or more'}; "
                f"set {flag} to a token of the model's vocabulary"
            )
