"""Lists of a corpus' documents: what --document-list names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import sha256_of
from megatron_anchor.indexed.id_arrays import map_ids, require_below
from megatron_anchor.indexed.pair import IndexedCorpus, idx_path

DOCUMENT_LIST_FORMAT = "megatron_anchor document list 1"
_ANEW = "make it anew with tools/upsample_long_documents.py, or np.save integers, one a document"


def read_document_list(path: str | Path, prefix: str | Path) -> np.ndarray:
    """The ids of a list, integers (mapped).

    A list that was saved by hand has no `.json` beside it that says what corpus it is for.

    Raises:
        UserError: it is no list of documents, is empty, or was made for another corpus.
    """
    path, what = Path(path), "--document-list"
    ids = map_ids(path, what=what, remedy=_ANEW)
    if not len(ids):
        raise UserError(f"{what} {path} is empty; {_ANEW}")
    beside = path.with_suffix(".json")
    if beside.exists():
        _require_made_for(prefix, beside, what=f"{what} {path}", documents=len(ids))
    documents = len(IndexedCorpus.open(prefix))
    require_below(ids, documents, what=f"{what} {path}", of="document", remedy=_ANEW)
    return ids


def _require_made_for(prefix: str | Path, beside: Path, *, what: str, documents: int) -> None:
    try:
        described = json.loads(beside.read_text(encoding="utf-8"))
        form, corpus, digest, count = (
            described[name] for name in ("format", "corpus", "index_sha256", "documents")
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{what}: {beside} does not describe a list ({type(error).__name__}: {error}); {_ANEW}"
        ) from error
    if form != DOCUMENT_LIST_FORMAT:
        raise UserError(
            f"{what}: {beside} has the format {form!r}, not {DOCUMENT_LIST_FORMAT!r}; {_ANEW}"
        )
    if digest != sha256_of(idx_path(prefix)):
        raise UserError(
            f"{what} was made for {corpus}, whose index differs from that of {prefix}; {_ANEW}"
        )
    if count != documents:
        raise UserError(
            f"{what} holds {documents} ids, but {beside} speaks of {count}: the files do not "
            f"belong together; {_ANEW}"
        )
