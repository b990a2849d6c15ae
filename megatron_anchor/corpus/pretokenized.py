"""Rows that hold token ids: `input_ids` with `source` spans, as AnchorContext reads them.

A row is a long sequence packed by others; `source` lists its documents, such as
`[{"source": "RedPajamaC4", "start": 0, "end": 812}, ...]`. Every span becomes a document of the
domain `source`; a row without spans is one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class SpanError(Exception):
    """The ids or the spans of a row make no documents; the argument completes `KEY ...`."""


def split_spans(
    input_ids: Any, spans: Any, *, vocab_size: int
) -> list[tuple[np.ndarray, str | None]]:
    """The documents of a row: (ids int64 [length], domain name or None).

    Spans must cover the row without gaps or overlaps, so that no token is lost or doubled. `start`
    may be left out: AnchorContext itself looks at the ends only.
    """
    ids = _checked_ids(input_ids, vocab_size)
    if spans is None:
        return [(ids, None)]
    if not isinstance(spans, list):
        raise SpanError(f"has a 'source' that is no list: {str(spans)[:60]}")
    documents, at = [], 0
    for span in spans:
        if not isinstance(span, Mapping) or type(span.get("end")) is not int:
            raise SpanError(f"has a span without an 'end': {str(span)[:60]}")
        start, end, name = span.get("start", at), span["end"], span.get("source")
        if start != at or end < start or end > len(ids):
            raise SpanError(
                f"has the span {start}..{end} where one from {at} to {len(ids)} at most should "
                "follow"
            )
        documents.append((ids[start:end], name if isinstance(name, str) and name else None))
        at = end
    if at != len(ids):
        raise SpanError(f"has {len(ids)} ids, but its spans end at {at}")
    return documents


def _checked_ids(value: Any, vocab_size: int) -> np.ndarray:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise SpanError("is no list of whole numbers")
    try:
        ids = np.array(value, dtype=np.int64)
    except OverflowError:
        raise SpanError("holds a number over 64 bits") from None
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise SpanError(
            f"holds ids from {ids.min()} to {ids.max()}; the vocabulary has {vocab_size}"
        )
    return ids
