"""The checkpoints of an evaluation: named, and as Hugging Face folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.torch_dist_reader import iteration_folder
from megatron_anchor.compat import TRACKER
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.fingerprint import fingerprint
from megatron_anchor.terminal import logger_of
from megatron_anchor.whole_files import atomic_write_text

EXPORTS = "exports"
"""Folder under the output for Megatron checkpoints as Hugging Face models."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint."""

    label: str
    """Of the group that it is averaged in."""
    name: str
    """Unique in the evaluation; a part of file names."""
    source: Path
    """As given: a Hugging Face folder, or one iteration of a Megatron run."""

    @property
    def is_megatron(self) -> bool:
        """It has to be exported first."""
        return not (self.source / "config.json").is_file()

    def behind(self, first_token: str) -> Checkpoint:
        """Return the same checkpoint, told apart by what its prompts begin with."""
        return dataclasses.replace(
            self,
            label=f"{self.label} first-token {first_token}",
            name=f"{self.name}.first-token-{first_token}",
        )


def split_label(word: str) -> tuple[str | None, Path]:
    """Split ``LABEL=DIR``; an existing path is never split.

    Raises:
        UserError: for a label that cannot be a part of a file's name.
    """
    if "=" not in word or Path(word).exists():
        return None, Path(word)
    label, _, path = word.partition("=")
    if not re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", label):
        raise UserError(f"{word}: a label has letters, digits, spaces and . + - _, got {label!r}")
    return label, Path(path)


def find_checkpoints(words: Sequence[str]) -> list[Checkpoint]:
    """Find what ``--checkpoints`` names.

    Args:
        words: ``[LABEL=]DIR``; those without a label are one group.

    Raises:
        UserError: if there is no checkpoint, or one is named twice.
    """
    given = [(label, _source(path)) for label, path in map(split_label, words)]
    seen: set[tuple[str | None, Path]] = set()
    for label, path in given:
        if (label, path.resolve()) in seen:
            raise UserError(f"--checkpoints names {path} twice")
        seen.add((label, path.resolve()))
    bare = [path for label, path in given if label is None]
    default = _default_label(bare)
    if default in {label for label, _ in given}:
        raise UserError(
            f"--checkpoints: {default!r} names a group, and the checkpoints without a label would "
            "be called so too; give them one: LABEL=DIR"
        )
    labels = [label if label is not None else default for label, _ in given]
    names = _unique_names([path for _, path in given], labels)
    return [
        Checkpoint(label, name, path)
        for label, name, (_, path) in zip(labels, names, given, strict=True)
    ]


def _source(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"--checkpoints {path}: there is no such folder")
    if (path / "config.json").is_file():
        return path
    is_run = (path / TRACKER).is_file() or (path / "metadata.json").is_file()
    if not is_run:
        raise UserError(
            f"--checkpoints {path}: neither a Hugging Face model (config.json) nor a Megatron "
            f"checkpoint ({TRACKER} of a run, or an iter_ folder's metadata.json)"
        )
    return iteration_folder(path)


def _short_name(path: Path, parts: int) -> str:
    named = path.resolve().parts[-parts:]
    return re.sub(r"[^\w.+-]", "_", "-".join(part.strip("/") for part in named)) or "root"


def _own_parts(path: Path) -> int:
    return 1 if (path / "config.json").is_file() else 2  # run and iteration


def _default_label(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return _short_name(paths[0], _own_parts(paths[0]))
    common = os.path.commonpath([path.resolve() for path in paths]) if paths else "/"
    return Path(common).name or "all"


def _unique_names(paths: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Give names of so many of the last folders that all differ."""
    for more in range(max(len(path.resolve().parts) for path in paths)):
        names = [_short_name(path, _own_parts(path) + more) for path in paths]
        if len(set(names)) == len(names):
            return names
    # the same checkpoint in two groups
    return [f"{label}-{name}".replace(" ", "_") for label, name in zip(labels, names, strict=True)]


def hugging_face_folder(
    checkpoint: Checkpoint, output: Path, *, like: str | None, progress: bool
) -> Path:
    """Give the checkpoint as a Hugging Face folder, exported under ``output`` where needed.

    An export is used again while the checkpoint's files are the same.

    Raises:
        UserError: if it cannot be exported.
    """
    if not checkpoint.is_megatron:
        return checkpoint.source
    target = output / EXPORTS / checkpoint.name
    note = target.with_name(f"{target.name}.source.json")
    source = checkpoint.source
    made_of = {
        "like": like,
        "files": {
            path.name: [path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(source.iterdir())
            if path.is_file()
        },
    }
    if target.is_dir():
        if note.is_file() and note.read_text() == json.dumps(made_of):
            return target
        logger_of(__name__).warning("%s has changed: exporting it anew", source)
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Prompts get the recorded anchor here, whatever the tokenizer does.
    done = convert_to_hugging_face(
        source, target, like=like, keep_tokenizer=True, progress=progress
    )
    for told in done.notes:
        logger_of(__name__).info("%s: %s", source, told)
    with atomic_write_text(note) as stream:
        stream.write(json.dumps(made_of))
    return target


def digest_of_model(folder: Path) -> str:
    """Tell models apart by config.json and a look at every weight file.

    Raises:
        UserError: if there are no weights.
    """
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise UserError(f"{folder} has no weights ({' or '.join(_WEIGHTS)})")
    parts = [fingerprint(folder / "config.json"), *map(fingerprint, files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
