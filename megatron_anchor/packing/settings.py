"""How documents are packed and read: the settings that training, tools and datasets share.

Each field is a flag of the training program and of `tools/inspect_packing.py`, which take its name,
type and help text from here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_anchor.packing.domains import check_format
from megatron_anchor.packing.interleave import Interleaving
from megatron_anchor.packing.patterns import ANCHOR, attention_pattern, attention_patterns
from megatron_anchor.packing.target_weights import LOSS_WEIGHTINGS, LossWeighting

Packing = Literal["concat", "best-fit"]
PACKINGS: tuple[str, ...] = get_args(Packing)


@dataclass(kw_only=True)
class PackingSettings:
    """Packed documents, and what their tokens see."""

    attention_pattern: str = ANCHOR.name
    """What a token sees."""

    anchor_position: int = 0
    """Position id of the anchor, under patterns with one anchor."""

    anchor_first_token_loss: bool = True
    """Leave the first token of every document out of the loss, which the anchor predicts."""

    packing: Packing = "concat"
    """How documents become samples: 'concat' cuts a document where a sample ends; 'best-fit' cuts
    none that fits in a sample, and pads what is left."""

    document_alignment: int | None = None
    """Fill every document up to a multiple of so many slots. It is part of the sample index: set it
    to continue a run at another context-parallel size with the same samples. Default: 1, or twice
    the context-parallel size where Transformer Engine splits documents."""

    domain_tags: bool = False
    """Put the name of a document's domain behind its anchor: visible to the document, never a
    target. Needs a corpus with domains (tools/preprocess_data.py --domain-key)."""

    domain_tag_format: str = "{domain}: "
    """Text of the tag."""

    loss_weighting: LossWeighting = "uniform"
    """How much a target counts in training: 'uniform'; 'document-mean' or 'document-sqrt' (by 1 / N
    or 1 / sqrt(N) of its document's targets); 'effective-context' (more where long contexts are
    rare). Weights of a corpus (PREFIX.weights.bin) multiply it, and count in evaluation, too."""

    effective_context_alpha: float = 0.15
    """Under --loss-weighting effective-context: by how much the mean weight of targets with a long
    context exceeds 1."""

    effective_context_gamma: float = 0.5
    """Under --loss-weighting effective-context: how much more rare contexts weigh; 0 = alike."""

    effective_context_tail: int | None = None
    """Under --loss-weighting effective-context: tokens from which on a context is long. Default: a
    quarter of --seq-length."""

    interleave_chunks: bool = False
    """Split the documents of a sample at random into chunks and shuffle these, in order inside each
    document. The paper found it harmful together with masked attention."""

    interleave_max_chunks: int = Interleaving.max_chunks
    """Chunks of a document in a sample, at most."""

    interleave_min_chunk_length: int = Interleaving.min_chunk_length
    """Slots of a chunk, at least; shorter documents stay whole."""

    interleave_max_chunk_length: int | None = Interleaving.max_chunk_length
    """Slots of a chunk, at most; longer documents get as many chunks as that takes, be they more
    than --interleave-max-chunks. Default: no bound."""

    @property
    def alignment(self) -> int:
        """Slots of which every document slice takes a multiple."""
        return self.document_alignment or 1

    def interleaving(self) -> Interleaving | None:
        """Bounds of the chunks, None where documents are not split.

        Raises:
            UserError: the bounds cannot be kept.
        """
        if not self.interleave_chunks:
            return None
        return Interleaving(
            max_chunks=self.interleave_max_chunks,
            min_chunk_length=self.interleave_min_chunk_length,
            max_chunk_length=self.interleave_max_chunk_length,
        )

    def refusals(self, *, sequence_length: int | None) -> Iterator[str]:
        """Say what cannot be done, each with the remedy.

        Args:
            sequence_length: slots of a sample; None = not known yet.
        """
        yield from _errors(
            lambda: attention_pattern(self.attention_pattern),
            self.interleaving,
            lambda: check_format(self.domain_tag_format),
        )
        if self.packing not in PACKINGS:
            yield f"--packing {self.packing}: expected one of {', '.join(PACKINGS)}"
        yield from self._alignment(sequence_length)
        if self.anchor_position < 0:
            yield f"--anchor-position {self.anchor_position}: expected 0 or more"
        yield from self._pattern()
        yield from self._weighting(sequence_length)

    def _weighting(self, sequence_length: int | None) -> Iterator[str]:
        if self.loss_weighting not in LOSS_WEIGHTINGS:
            yield f"--loss-weighting {self.loss_weighting}: expected {', '.join(LOSS_WEIGHTINGS)}"
        for name in ("alpha", "gamma"):
            value = getattr(self, f"effective_context_{name}")
            if not (math.isfinite(value) and value >= 0):
                yield f"--effective-context-{name} {value}: expected a number of 0 or more"
        tail = self.effective_context_tail
        if tail is not None and (tail < 1 or (sequence_length and tail >= sequence_length)):
            yield (
                f"--effective-context-tail {tail}: expected 1 or more, and less than --seq-length "
                f"{sequence_length or ''}".rstrip()
            )

    def _alignment(self, sequence_length: int | None) -> Iterator[str]:
        alignment = self.document_alignment
        if alignment is None:
            return
        if alignment < 1:
            yield f"--document-alignment {alignment}: expected 1 or more"
        elif sequence_length and sequence_length % alignment:
            yield (
                f"--document-alignment {alignment}: --seq-length {sequence_length} must be a "
                "multiple of it"
            )

    def _pattern(self) -> Iterator[str]:
        known = {pattern.name: pattern for pattern in attention_patterns()}
        pattern = known.get(self.attention_pattern)
        if pattern is None:
            return
        chosen, alignment = f"--attention-pattern {pattern.name}", self.document_alignment
        if self.anchor_position > 0 and not pattern.one_anchor:
            names = [name for name, other in known.items() if other.one_anchor]
            yield (
                f"--anchor-position {self.anchor_position} has a meaning under "
                f"--attention-pattern {' and '.join(names)} only, got {pattern.name}"
            )
        if alignment and alignment > 1 and pattern.separates_anchors:
            yield (
                f"{chosen} makes anchors segments of one slot, which no --document-alignment "
                f"{alignment} (nor Transformer Engine's context parallelism) can keep; leave it "
                "out, and use --cp-comm-type a2a"
            )
        if self.interleave_chunks and pattern.restarts_positions:
            yield (
                f"--interleave-chunks has no effect under {chosen}, where every document counts "
                "its positions alone"
            )


def _errors(*checks: Callable[[], object]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield str(error)
