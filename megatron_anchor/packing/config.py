"""Settings of a packed dataset: Megatron's own, and the few that packing adds."""

import logging
import math
from dataclasses import dataclass, field

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_anchor.errors import UserError
from megatron_anchor.packing.fill_in_the_middle import FillInTheMiddle
from megatron_anchor.packing.layout import Layout
from megatron_anchor.packing.patterns import AttentionPattern, attention_pattern
from megatron_anchor.packing.settings import PackingSettings
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
class PackedDatasetConfig(PackingSettings, GPTDatasetConfig):
    """Settings of `PackedDataset`.

    All fields of Megatron's GPTDatasetConfig keep their meaning, but for those that `PackedDataset`
    replaces: reset_position_ids, reset_attention_mask, eod_mask_loss and inter_document_masking
    (a warning says so where they are set), create_attention_mask, add_extra_token_to_sequence and
    drop_last_partial_validation_sequence (no effect: there is no dense mask, every sample has a
    label for each of its S slots, no token is dropped). `tokenizer` may be any object that has
    Megatron's `vocab_size`; its special tokens are not looked at. A `document_alignment` of None
    is 1.
    """

    anchor_token_id: int = field(kw_only=True)
    """Token at the head of every document: the tokenizer's bos, or its eos where it has no bos."""

    pad_token_id: int = 0
    """Token in slots that hold nothing; may equal any other token, for masks go by place."""

    vocab_size: int | None = None
    """Size of the model's vocabulary, to refuse larger token ids. None = check for negatives only.
    """

    document_lists: dict[str, str] | None = None
    """Corpus prefix to the .npy of document ids (with repetitions) that make its training split's
    epoch; "" = the only corpus. Validation and test read the corpus as it is."""

    fill_in_the_middle: FillInTheMiddle | None = None
    """How documents are rearranged before they are packed; None = they are not."""

    attention_windows: LayerWindows = FULL
    """Windows of the model's layers, by which the work of samples is counted."""

    context_parts: int = 1
    """Parts among which the slots of a sample are dealt out for equal attention work
    (`megatron_anchor.context_parallel.split.assign_chunks`); 1 = they are not."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            UserError: a setting is out of range, or asks for what a packed dataset cannot do.
        """
        for name, instead in _WITHOUT_EFFECT.items():
            if getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                log_single_rank(
                    logger, logging.WARNING, f"{flag} has no effect on packed samples: {instead}"
                )
            setattr(self, name, False)
        super().__post_init__()
        if self.mock:
            raise UserError(
                "a packed dataset needs a corpus: set --data-path (or --train-data-path ..., "
                "--per-split-data-args-path); mock data is not supported"
            )
        self._check_blends()
        if self.hybrid_context_parallel:
            raise UserError("packed samples do not support --hybrid-context-parallel: leave it out")
        if self.sequence_length < 2:
            raise UserError(
                f"got sequence_length {self.sequence_length}, expected at least 2 (an anchor and a "
                "token); set --seq-length"
            )
        if self.anchor_token_id is None:
            raise UserError(
                "no anchor token: set --anchor-token (a tokenizer with a bos or eos has one)"
            )
        self._check_token_id("anchor_token_id", self.anchor_token_id, flag="--anchor-token")
        self._check_token_id("pad_token_id", self.pad_token_id, flag="pad_token_id")
        if reasons := list(self.refusals(sequence_length=self.sequence_length)):
            raise UserError("\n".join(reasons))
        if self.domain_tags and not hasattr(self.tokenizer, "tokenize"):
            raise UserError("--domain-tags needs a tokenizer that turns text into tokens")
        self.document_alignment = self.alignment

    @property
    def pattern(self) -> AttentionPattern:
        """What --attention-pattern names."""
        return attention_pattern(self.attention_pattern)

    @property
    def layout(self) -> Layout:
        """What all samples share; without the domain's tags, which come from the corpus."""
        return Layout(
            sequence_length=self.sequence_length,
            pattern=self.pattern,
            anchor_token_id=self.anchor_token_id,
            pad_token_id=self.pad_token_id,
            anchor_position=self.anchor_position,
            first_token_loss=self.anchor_first_token_loss,
        )

    def _check_blends(self) -> None:
        blends = self.blend_per_split or [self.blend] * len(Split)
        for split, blend in zip(Split, blends, strict=True):
            if blend is None or blend[1] is None:
                continue
            for prefix, weight in zip(*blend, strict=True):
                if not (math.isfinite(weight) and weight > 0):
                    raise UserError(
                        f"the blend gives the corpus {prefix} the weight {weight}, expected a "
                        "finite number above 0; leave that corpus out, or give it a weight"
                    )
            if split is Split.valid and self.full_validation:
                raise UserError(
                    "--full-validation reads every validation set once, so weights have no meaning "
                    "there: name the sets without weights with --valid-data-path (and the training "
                    "corpora with --train-data-path)"
                )

    def _check_token_id(self, name: str, token_id: int, *, flag: str) -> None:
        if token_id < 0 or (self.vocab_size is not None and token_id >= self.vocab_size):
            most = "" if self.vocab_size is None else f" to {self.vocab_size - 1} (vocab_size - 1)"
            raise UserError(
                f"got {name} {token_id}, expected 0{most or ' or more'}; "
                f"set {flag} to a token of the model's vocabulary"
            )
