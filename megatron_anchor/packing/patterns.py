"""Attention patterns: what a token sees, and where its position lies.

All patterns use the same token buffer and differ in segments and position ids. Drawn
for the documents `a b` and `c d e` with the anchor `A` at the head of each (rows attend to the
columns marked x); the masked patterns share one mask and differ in position ids only:

    full        A a b A c d e           masked      A a b A c d e
            A   x                               A   x
            a   x x                             a   x x
            b   x x x                           b   x x x
            A   x x x x                         A         x
            c   x x x x x                       c         x x
            d   x x x x x x                     d         x x x
            e   x x x x x x x                   e         x x x x

    position ids    anchor                  0 1 2 0 3 4 5   (and anchor-masked)
                    intra-document          0 1 2 3 4 5 6   (and full)
                    intra-document-reset    0 1 2 0 1 2 3

`anchor-masked` is a control: one anchor as under `anchor`, but masked like any other token of the
first document, so that `c d e` do not see it. Its later copies are segments of their own; they only
predict the first token of their document, as the one anchor would.

A pattern of your own is one object, `register`ed before the arguments are parsed:

    register(AttentionPattern(name="mine", summary="...", one_anchor=True, segments=my_segments))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from megatron_anchor.errors import UserError


def whole_documents(document_borders: np.ndarray) -> np.ndarray:
    """Segments that are the documents."""
    return document_borders


def _first_anchor_only(document_borders: np.ndarray) -> np.ndarray:
    """Documents without their anchors, which are segments of one slot, but for the first one."""
    return separate_anchors(document_borders, np.arange(1, len(document_borders) - 1))


def separate_anchors(document_borders: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Segments where the anchors of some documents are segments of their own, not seen by them.

    Args:
        document_borders: integers [P + 1], slots where the document slices begin, and the end.
        documents: integers, numbers from 0 of the slices in question.

    Returns:
        Borders without empty segments.
    """
    return np.unique(np.concatenate((document_borders, document_borders[documents] + 1)))


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """One attention pattern, and all that other parts of the package ask about it."""

    name: str
    """Value of --attention-pattern."""
    summary: str
    """What a token sees, in a few words for --help."""
    one_anchor: bool = False
    """Whether the anchors are copies of one, at --anchor-position, which neither the positions of
    other tokens nor a router of experts count."""
    masks_documents: bool = True
    """Whether documents are kept apart. If not, a sample is one segment with its padding at the
    end, and interleaving moves tokens and not only positions."""
    restarts_positions: bool = False
    """Whether every document counts its positions from 0."""
    segments: Callable[[np.ndarray], np.ndarray] = whole_documents
    """Where documents are kept apart: from the borders of a sample's document slices, integers
    [P + 1] from 0 on, to those of the segments that attend, among which are all of these."""
    separates_anchors: bool = False
    """Whether some segments are an anchor alone."""
    is_control: bool = False
    """Whether it is of use in experiments only, and nobody plans for it."""

    @property
    def has_whole_documents(self) -> bool:
        """Whether every segment is a document slice."""
        return self.masks_documents and not self.separates_anchors

    def segment_lengths(self, slots_P: np.ndarray, *, sequence_length: int) -> np.ndarray:
        """Slots of the segments of a sample, the padding behind its last document included.

        Args:
            slots_P: integers, slots of the sample's document slices, filling included.
            sequence_length: S.
        """
        if not self.masks_documents:
            return np.array([sequence_length])
        borders = np.concatenate(([0], np.cumsum(slots_P)))
        lengths = np.diff(self.segments(borders))
        padding = sequence_length - int(borders[-1])
        return np.append(lengths, padding) if padding else lengths

    def max_segments(self, sequence_length: int) -> int:
        """Most segments that a sample of `sequence_length` slots can have.

        Every document slice takes at least two slots (anchor and token). Only the last segment of
        a sample, an anchor at its end or padding, can take one, if anchors are not separated.
        """
        return sequence_length if self.separates_anchors else (sequence_length + 1) // 2


_PATTERNS: dict[str, AttentionPattern] = {}


def register(pattern: AttentionPattern) -> AttentionPattern:
    """Make a pattern known by its name.

    Raises:
        UserError: another pattern has this name.
    """
    if _PATTERNS.setdefault(pattern.name, pattern) != pattern:
        raise UserError(f"there is another attention pattern {pattern.name!r}: choose a new name")
    return pattern


def attention_pattern(name: str) -> AttentionPattern:
    """The pattern of this name.

    Raises:
        UserError: there is none; with the nearest name that exists.
    """
    if name in _PATTERNS:
        return _PATTERNS[name]
    near = get_close_matches(str(name), _PATTERNS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"unknown attention pattern {name!r}: {hint}"
        f"set --attention-pattern to one of {', '.join(_PATTERNS)}"
    )


def attention_patterns() -> tuple[AttentionPattern, ...]:
    """All patterns that are known."""
    return tuple(_PATTERNS.values())


def planned_patterns() -> tuple[str, ...]:
    """Names of the patterns that are worth planning for: no controls."""
    return tuple(pattern.name for pattern in attention_patterns() if not pattern.is_control)


def patterns_help() -> str:
    """What every known pattern means, for --help."""
    meanings = (f"'{pattern.name}' ({pattern.summary})" for pattern in attention_patterns())
    return f"What a token sees: {'; '.join(meanings)}"


ANCHOR = register(
    AttentionPattern(
        name="anchor",
        summary="its document and the anchor; positions run on through the sample",
        one_anchor=True,
    )
)
register(
    AttentionPattern(name="intra-document", summary="its document; positions run on"),
)
register(
    AttentionPattern(
        name="intra-document-reset",
        summary="its document; positions restart",
        restarts_positions=True,
    )
)
FULL_ATTENTION = register(
    AttentionPattern(name="full", summary="everything before it", masks_documents=False)
)
register(
    AttentionPattern(
        name="anchor-masked",
        summary="as 'anchor', but only the sample's first document sees the anchor: a control",
        one_anchor=True,
        segments=_first_anchor_only,
        separates_anchors=True,
        is_control=True,
    )
)
