"""A corpus in the making: streams in `PREFIX.partial/`, checkpoints, and the final renames.

Nothing carries a final name before everything is written. A checkpoint is a small JSON with the
place in the input and the sizes of all streams; a resumed run cuts the streams back to it and goes
on, so its result is the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_anchor.corpus.encoding import EncodedChunk, KeyOutput
from megatron_anchor.corpus.identity import require_same
from megatron_anchor.corpus.locks import Lock, empty
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import DomainCount, KeyManifest, write_domains
from megatron_anchor.indexed.pair import write_index
from megatron_anchor.indexed.weights import describe_weights
from megatron_anchor.whole_files import atomic_write_text, move_finished

_MOST_DOMAINS = 10_000
_STREAMS = ("bin", "lengths", "ends", "domains")
_WEIGHTS = ("weights.bin", "weights.json")


@dataclass
class Progress:
    """Where a run stands: the next place of the input, and what was written up to there."""

    span: int = 0
    offset: int = 0
    row: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of every stream."""
    rows_read: int = 0
    blank_lines: int = 0
    text_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Rows by kind of reason."""
    empty: list[int] = field(default_factory=list)
    """Documents without tokens that were left out, by key."""
    kept: list[int] = field(default_factory=list)
    """Documents without tokens that were written, by key."""
    sequences: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    """Names by id, in the order in which they were met."""
    domain_documents: list[list[int]] = field(default_factory=list)
    domain_tokens: list[list[int]] = field(default_factory=list)
    source_rows: dict[str, int] = field(default_factory=dict)
    """Rows read of a source, by its number."""
    engines: list[str] = field(default_factory=list)
    """`NAME VERSION` of every package that made ids."""
    weighted: list[int] = field(default_factory=list)
    """Tokens that weigh more than nothing, by key; 0 where there are no weights."""
    chat: dict[str, int] = field(default_factory=dict)
    """Counts of conversations."""
    complete: bool = False

    @classmethod
    def restored(cls, value: Mapping[str, Any], *, keys: int, path: Path) -> Progress:
        """The progress that a checkpoint holds; `UserError` where it is none."""
        expected = {name: type(held) for name, held in asdict(cls()).items()}
        found = {name: type(held) for name, held in value.items()}
        if found != expected:
            wrong = [
                name for name in {**expected, **found} if expected.get(name) != found.get(name)
            ]
            raise _lost(path, f"its {wrong[0]!r} is not what a checkpoint has")
        progress = cls(**value)
        by_key: list[Sequence[Any]] = [progress.empty, progress.kept, progress.sequences]
        by_key += [progress.documents, progress.tokens, progress.weighted]
        by_key += [progress.domain_documents, progress.domain_tokens]
        if {len(held) for held in by_key} != {keys}:
            raise _lost(path, f"it does not count for {keys} keys")
        return progress

    @property
    def rejected_rows(self) -> int:
        """Rows that gave no document because they are bad."""
        return sum(self.rejected.values())


class CorpusOutput:
    """The streams of one run; `close` it at the end, whatever happens."""

    def __init__(
        self,
        prefix: str | Path,
        *,
        keys: Sequence[str],
        level: str,
        dtype: np.dtype,
        identity: Mapping[str, Any],
        resume: bool,
        overwrite: bool,
        checkpoint_seconds: float = 10.0,
        weight_dtype: str | None = None,
    ) -> None:
        self.weight_dtype = weight_dtype
        self.prefix = Path(prefix)
        self.keys = tuple(keys)
        self.dtype = dtype
        if str(prefix).endswith(os.sep):
            raise UserError(
                f"--output-prefix {prefix} is a folder: add the beginning of a file name to it"
            )
        self.folder = Path(f"{prefix}.partial")
        self._level = level
        self.identity = dict(identity)
        self._every = checkpoint_seconds
        self._last = time.monotonic()
        self._files: dict[str, BinaryIO] = {}
        self.progress = Progress()
        self.already_finished = False
        self._open(resume=resume, overwrite=overwrite)

    def corpus_prefix(self, key: str) -> Path:
        """The prefix of one key's corpus, named as Megatron's tool names it."""
        return Path(f"{self.prefix}_{key}_{self._level}")

    @property
    def rejected_path(self) -> Path:
        """The side file of rejected rows."""
        return Path(f"{self.prefix}.rejected.jsonl")

    @property
    def final_paths(self) -> list[Path]:
        """All files of a finished run but the list of rejected rows, which may have none."""
        return [path for name, path in self._finals().items() if name in self._written]

    @property
    def _written(self) -> set[str]:
        """The stream names of `final_paths`."""
        endings: tuple[str, ...] = ("bin", "domains.npy", "manifest.json", "idx")
        if self.weight_dtype is not None:
            endings += _WEIGHTS
        return {f"{number}.{ending}" for number in range(len(self.keys)) for ending in endings}

    def _finals(self) -> dict[str, Path]:
        """Stream name -> final path, in the order of renaming: an index makes a corpus whole."""
        numbered = [(str(i), self.corpus_prefix(key)) for i, key in enumerate(self.keys)]
        finals = {"rejected": self.rejected_path}
        for ending in ("bin", *_WEIGHTS, "domains.npy", "manifest.json", "idx"):
            finals |= {f"{number}.{ending}": Path(f"{p}.{ending}") for number, p in numbered}
        return finals

    def _open(self, *, resume: bool, overwrite: bool) -> None:
        self._lock: Lock | None = Lock(self.folder / "lock", output=self.folder)
        try:
            self._refuse_what_is_there(resume=resume, overwrite=overwrite)
            if not self.already_finished:
                self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self.close()
            raise
        if self.already_finished:
            self.close()

    def _refuse_what_is_there(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to go on from an unfinished run, or to replace a finished one, unasked."""
        unfinished = any(path.name != "lock" for path in self.folder.iterdir())
        existing = [path for path in self._finals().values() if path.exists()]
        if unfinished and not (resume or overwrite):
            raise UserError(
                f"{self.folder} holds what an unfinished run left; add --resume to go on from "
                "there, or --overwrite to begin anew"
            )
        if not existing or overwrite or (resume and (self.folder / "state.json").exists()):
            return
        self.already_finished = resume and not unfinished
        if not self.already_finished:
            raise UserError(f"{existing[0]} exists; choose another --output-prefix or --overwrite")

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        if overwrite and not resume:
            empty(self.folder)
        state = self.folder / "state.json"
        if state.exists():
            require_same(self._read_json("run.json"), self.identity)
            self.progress = Progress.restored(
                self._read_json("state.json"), keys=len(self.keys), path=state
            )
        else:
            count = len(self.keys)
            self.progress.empty = [0] * count
            self.progress.kept = [0] * count
            self.progress.sequences = [0] * count
            self.progress.documents = [0] * count
            self.progress.tokens = [0] * count
            self.progress.weighted = [0] * count
            self.progress.domain_documents = [[] for _ in self.keys]
            self.progress.domain_tokens = [[] for _ in self.keys]
            self._write_json("run.json", self.identity)
        self._domain_ids = {name: id_ for id_, name in enumerate(self.progress.domains)}
        if not self.progress.complete:
            self._open_streams()
            self.checkpoint()

    def _open_streams(self) -> None:
        endings = _STREAMS if self.weight_dtype is None else (*_STREAMS, _WEIGHTS[0])
        names = [f"{i}.{ending}" for i in range(len(self.keys)) for ending in endings]
        for name in [*names, "rejected"]:
            path = self.folder / name
            path.touch()
            size = self.progress.sizes.setdefault(name, 0)
            if path.stat().st_size < size:
                raise UserError(
                    f"{path} holds {path.stat().st_size} bytes, the checkpoint says {size}: the "
                    "disk lost data; use --overwrite to begin anew"
                )
            stream = open(path, "r+b", buffering=0)  # noqa: SIM115 - held until close
            stream.truncate(size)
            stream.seek(size)
            self._files[name] = stream

    def append(
        self, encoded: EncodedChunk, *, source: int, span: int, offset: int, row: int
    ) -> None:
        """Write one chunk; `span`, `offset`, `row` say where the next one begins."""
        state = self.progress
        ids = np.array([self._domain_id(name) for name in encoded.domain_names], dtype=np.int32)
        for number, output in enumerate(encoded.outputs):
            self._append_key(number, output, ids)
        for rejection in encoded.rejections:
            state.rejected[rejection.kind] = state.rejected.get(rejection.kind, 0) + 1
        lines = "".join(rejection.as_json() + "\n" for rejection in encoded.rejections)
        self._write("rejected", lines.encode())
        state.rows_read += encoded.rows_read
        state.blank_lines += encoded.blank_lines
        state.text_bytes += encoded.text_bytes
        for name, count in encoded.chat.items():
            state.chat[name] = state.chat.get(name, 0) + count
        state.source_rows[str(source)] = state.source_rows.get(str(source), 0) + encoded.rows_read
        state.span, state.offset, state.row = span, offset, row
        if time.monotonic() - self._last >= self._every:
            self.checkpoint()

    def _append_key(self, number: int, output: KeyOutput, ids: np.ndarray) -> None:
        state = self.progress
        state.empty[number] += output.empty
        state.kept[number] += output.kept
        if not len(output.document_ends):
            return
        domains = ids[output.domains]
        self._write(f"{number}.bin", output.tokens.data)
        self._write(f"{number}.lengths", output.lengths.data)
        self._write(f"{number}.ends", (output.document_ends + state.sequences[number]).data)
        self._write(f"{number}.domains", domains.data)
        if output.weights is not None:
            self._write(f"{number}.{_WEIGHTS[0]}", output.weights.data)
            state.weighted[number] += int(np.count_nonzero(output.weights))
        ends = np.concatenate(([0], np.cumsum(output.lengths, dtype=np.int64)))
        sizes = np.diff(ends[output.document_ends], prepend=0)
        documents, tokens = state.domain_documents[number], state.domain_tokens[number]
        for id_ in np.unique(domains).tolist():
            chosen = domains == id_
            documents[id_] += int(chosen.sum())
            tokens[id_] += int(sizes[chosen].sum())
        state.sequences[number] += len(output.lengths)
        state.documents[number] += len(output.document_ends)
        state.tokens[number] += len(output.tokens)

    def _domain_id(self, name: str) -> int:
        state, known = self.progress, self._domain_ids
        if name not in known:
            if len(known) >= _MOST_DOMAINS:
                raise UserError(
                    f"more than {_MOST_DOMAINS} domains, the last one {name!r}: --domain-key names "
                    "a field that is no domain"
                )
            known[name] = len(known)
            state.domains.append(name)
            for counts in (*state.domain_documents, *state.domain_tokens):
                counts.append(0)
        return known[name]

    def _write(self, name: str, data: bytes | memoryview) -> None:
        stream, left = self._files[name], memoryview(data).cast("B") if len(data) else b""
        try:
            while len(left):
                left = left[stream.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.folder / name} cannot be written: {error.strerror}. Make room, then go on "
                "with --resume (the last checkpoint is kept)"
            ) from error
        self.progress.sizes[name] = stream.tell()

    def checkpoint(self) -> None:
        """Make everything so far durable, then say so."""
        try:
            for stream in self._files.values():
                os.fsync(stream.fileno())
            self._write_json("state.json", asdict(self.progress))
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error
        self._last = time.monotonic()

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise _lost(self.folder / name, str(error)) from error
        if not isinstance(value, dict):
            raise _lost(self.folder / name, f"it holds a JSON {type(value).__name__}")
        return value

    def _write_json(self, name: str, value: object) -> None:
        with atomic_write_text(self.folder / name) as stream:
            json.dump(value, stream)

    def finish(
        self, manifest: Mapping[str, Any], *, weights_from: Mapping[str, Any] | None = None
    ) -> list[KeyManifest]:
        """Build indices and manifests, rename everything, remove the folder.

        `manifest` holds the fields that this class does not know, `weights_from` what made the
        weights. A run killed in here finishes when it is resumed.
        """
        manifests = [self._manifest(number, manifest) for number in range(len(self.keys))]
        if not self.progress.complete:
            try:
                for number, entry in enumerate(manifests):
                    self._build(number, entry, dict(weights_from or {}))
            except OSError as error:
                raise UserError(
                    f"{self.folder} cannot be written: {error.strerror}; go on with --resume"
                ) from error
            self.progress.complete = True
            self.checkpoint()
        finals = self._finals()
        for name, final in finals.items():  # a corpus that is replaced stops being whole first
            if name.endswith("idx") and (self.folder / name).exists():
                final.unlink(missing_ok=True)
        for name, final in finals.items():
            if name.endswith(_WEIGHTS) and self.weight_dtype is None:
                final.unlink(missing_ok=True)  # those of a corpus that is replaced
        for name, final in finals.items():
            part = self.folder / name
            if name == "rejected" and part.exists() and not part.stat().st_size:
                part.unlink()
                final.unlink(missing_ok=True)
            if part.exists():
                move_finished(part, final)
        self._remove_folder()
        return manifests

    def _build(self, number: int, entry: KeyManifest, weights_from: dict[str, Any]) -> None:
        part = self.folder / str(number)
        write_index(
            Path(f"{part}.idx"),
            dtype=self.dtype,
            lengths_file=Path(f"{part}.lengths"),
            document_ends_file=Path(f"{part}.ends"),
        )
        write_domains(Path(f"{part}.domains.npy"), Path(f"{part}.domains"))
        if self.weight_dtype is not None:
            describe_weights(
                part,
                dtype=self.weight_dtype,
                made_from=weights_from,
                may_be_zero=entry.shard is not None,
            )
        entry.write(Path(f"{part}.manifest.json"))

    def _manifest(self, number: int, extra: Mapping[str, Any]) -> KeyManifest:
        state = self.progress
        return KeyManifest(
            key=self.keys[number],
            level=self._level,
            documents=state.documents[number],
            sequences=state.sequences[number],
            tokens=state.tokens[number],
            dtype=self.dtype.name,
            rows_read=state.rows_read,
            rejected=dict(sorted(state.rejected.items())),
            empty_documents=state.empty[number],
            empty_kept=state.kept[number],
            blank_lines=state.blank_lines,
            text_bytes=state.text_bytes,
            domains=[
                DomainCount(name, documents, tokens)
                for name, documents, tokens in zip(
                    state.domains,
                    state.domain_documents[number],
                    state.domain_tokens[number],
                    strict=True,
                )
            ],
            **extra,
        )

    def discard(self) -> None:
        """Leave nothing but the list of rejected rows: there is nothing to go on from."""
        rejected = self.folder / "rejected"
        if rejected.exists() and rejected.stat().st_size:
            move_finished(rejected, self.rejected_path)
        self._remove_folder()

    def close(self) -> None:
        """Close all files; the folder stays for --resume, if there is anything in it."""
        self._close_files()
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == ["lock"]:
                self._remove_folder()
                return
        self._release()

    def _remove_folder(self) -> None:
        """Remove it while no other run can take it."""
        self._close_files()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def _close_files(self) -> None:
        for stream in self._files.values():
            stream.close()
        self._files.clear()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _lost(path: Path, why: str) -> UserError:
    return UserError(
        f"--resume: {path} does not say where the unfinished run stands ({why}); use --overwrite "
        "to begin anew"
    )
