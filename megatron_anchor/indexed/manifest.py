"""The small JSON beside a corpus, and the domain of every document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.indexed.id_arrays import map_ids, require_below

FORMAT = "megatron_anchor corpus 1"


@dataclass
class DomainCount:
    """A domain of a corpus; its id is its place in the manifest's list."""

    name: str
    documents: int
    tokens: int


@dataclass(kw_only=True)
class KeyManifest:
    """What one `.bin/.idx` pair holds and where it came from. Holds no times and no host names."""

    key: str
    level: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    vocab_size: int
    eod_id: int | None
    """Set where every document ends with it."""
    bos_id: int | None
    tokenizer: dict[str, Any]
    """kind, path, fingerprint (equal ones mean equal ids), and engines: the packages that made the
    ids, with their versions."""
    domains: list[DomainCount]
    rows_read: int
    rejected: dict[str, int]
    empty_documents: int
    """Rows without tokens that were left out."""
    blank_lines: int
    text_bytes: int
    sources: list[dict[str, Any]]
    """path, bytes and rows read, in order."""
    empty_kept: int = 0
    """Of the documents, those without tokens: their rows have tokens under another key."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """Files and folders in the inputs that are not read, by the reason."""
    shard: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """What else decides the bytes; see `identity.lasting_identity`."""
    format: str = field(default=FORMAT)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> KeyManifest:
        """Read; `UserError` where the file is no manifest of this format."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            form = value["format"]
            value["domains"] = [DomainCount(**domain) for domain in value["domains"]]
            manifest = cls(**value)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path} is no corpus manifest ({type(error).__name__}: {error})"
            ) from error
        if form != FORMAT:
            raise UserError(f"{path} has format {form!r}, expected {FORMAT!r}")
        return manifest


def manifest_path(prefix: str | Path) -> Path:
    """The manifest of a corpus."""
    return Path(f"{prefix}.manifest.json")


def domains_path(prefix: str | Path) -> Path:
    """The domain ids of a corpus."""
    return Path(f"{prefix}.domains.npy")


def read_manifest(prefix: str | Path) -> KeyManifest | None:
    """The manifest of the corpus at `prefix`, None for a corpus made by another tool."""
    path = manifest_path(prefix)
    return KeyManifest.read(path) if path.exists() else None


def read_domains(prefix: str | Path) -> tuple[list[str], np.ndarray] | None:
    """Domain names by id, and the id of every document (int32, mapped).

    None for a corpus without a manifest, which was made by another tool.

    Raises:
        UserError: the file of ids is missing, is no such file, or does not fit the manifest.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return None
    remedy, what = "write the corpus again with tools/preprocess_data.py", "the file of domains"
    ids = map_ids(domains_path(prefix), what=what, remedy=remedy)
    if len(ids) != manifest.documents:
        raise UserError(
            f"{domains_path(prefix)} has {len(ids)} entries, the manifest {manifest.documents} "
            f"documents: the files do not belong together; {remedy}"
        )
    what = f"{what} {domains_path(prefix)}"
    require_below(ids, len(manifest.domains), what=what, of="domain", remedy=remedy)
    return [domain.name for domain in manifest.domains], ids


def write_domains(path: Path, ids_file: Path) -> None:
    """Put an `.npy` header before a raw file of int32 ids, without loading it."""
    count = ids_file.stat().st_size // 4
    with open(path, "wb") as out, open(ids_file, "rb") as ids:
        header = {"descr": "<i4", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(out, header)
        while block := ids.read(1 << 22):
            out.write(block)
