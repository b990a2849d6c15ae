"""What lies in an input folder: files and saved datasets to read, and all that is passed over.

Every folder is judged once, by what is in it, and nothing in it is left out without a word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_anchor.corpus.file_kinds import (
    HIDDEN,
    OUTPUT,
    SAVED_DATASET,
    format_of,
    never_documents,
)
from megatron_anchor.errors import UserError

UNKNOWN = "no kind of file that is read"
OTHER_SPLIT = "another split than --hf-split"
LINKED = "a link to a folder, which is not followed"
UNFINISHED = (".partial", ".merging")
_SHOWN = 20  # paths listed for each reason


@dataclass
class Contents:
    """Paths to read, sorted, and the others with the reason why they are not read."""

    inputs: list[str] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)

    def add(self, other: Contents) -> None:
        """Take in what another place holds."""
        self.inputs += other.inputs
        self.passed_over |= other.passed_over


def contents_of(folder: Path, *, split: str) -> Contents:
    """Everything in a folder and the folders in it.

    `split` is the one that is read of a saved dataset with several.
    """
    found = Contents()
    _walk(folder, found, split=split)
    found.inputs.sort()
    return found


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    has_parts = (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    return has_parts or (folder / "dataset_dict.json").is_file()


def _walk(folder: Path, found: Contents, *, split: str) -> None:
    if is_saved_dataset(folder):
        found.inputs.append(str(folder))
        found.passed_over |= dict(_beside_dataset(folder, split=split))
        return
    for path in _listed(folder):
        why = _why_passed_over(path)
        if why is not None:
            found.passed_over[str(path)] = why
        elif path.is_dir():
            _walk(path, found, split=split)
        else:
            found.inputs.append(str(path))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"--input {folder} cannot be read: {error.strerror}") from error


def _why_passed_over(path: Path) -> str | None:
    if path.name.startswith("."):
        return HIDDEN
    if path.is_dir():
        if path.is_symlink():
            return LINKED
        return OUTPUT if _is_unfinished(path) else None
    if not path.is_file():
        return "a broken link" if path.is_symlink() else "no ordinary file"
    return never_documents(path) or (None if format_of(path) else UNKNOWN)


def _is_unfinished(folder: Path) -> bool:
    return folder.suffix in UNFINISHED and (folder / "lock").is_file()


def _beside_dataset(folder: Path, *, split: str) -> Iterator[tuple[str, str]]:
    """What lies in a saved dataset's folder and is no part of what is read of it."""
    parts = _parts_of(folder)
    for path in _listed(folder):
        if path.is_dir() and is_saved_dataset(path) and path.name in parts:
            if path.name == split:
                yield from _beside_dataset(path, split=split)
            else:
                yield str(path), OTHER_SPLIT
        elif path.name not in parts and never_documents(path) != SAVED_DATASET:
            yield str(path), "lies in a saved dataset, but is no part of it"


def _parts_of(folder: Path) -> set[str]:
    """The names of a dataset's splits, or of its Arrow files."""
    try:
        if (folder / "dataset_dict.json").is_file():
            return set(json.loads((folder / "dataset_dict.json").read_text())["splits"])
        state = json.loads((folder / "state.json").read_text())
        return {entry["filename"] for entry in state["_data_files"]}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UserError(
            f"--input {folder} is no readable saved dataset ({type(error).__name__}: {error}); "
            "save it again"
        ) from error


def outside_datasets(paths: Sequence[str]) -> Contents:
    """What a pattern found, without the files of saved datasets that it found as well."""
    datasets = [path for path in paths if os.path.isdir(path) and is_saved_dataset(Path(path))]
    found = Contents()
    for text in paths:
        path = Path(text)
        if text in datasets:
            found.inputs.append(text)
        elif any(path.is_relative_to(dataset) for dataset in datasets):
            continue
        elif any(map(_is_unfinished, path.parents)):
            found.passed_over[text] = OUTPUT
        elif path.is_dir():
            if not any(Path(other).is_relative_to(path) for other in paths if other != text):
                found.passed_over[text] = "a folder that a pattern matches: name it with --input"
        elif (why := _why_passed_over(path)) is not None and why is not HIDDEN:
            found.passed_over[text] = why
        else:
            found.inputs.append(text)
    return found


def counted(passed_over: dict[str, str]) -> dict[str, int]:
    """How many paths there are for each reason, by its first words."""
    counts: dict[str, int] = {}
    for why in passed_over.values():
        counts[why] = counts.get(why, 0) + 1
    return dict(sorted(counts.items()))


def described(passed_over: dict[str, str]) -> list[str]:
    """One sentence for each reason, with the paths."""
    sentences = []
    for why, count in counted(passed_over).items():
        paths = [path for path, reason in passed_over.items() if reason == why]
        shown = ", ".join(paths[:_SHOWN]) + (f" and {count - _SHOWN} more" * (count > _SHOWN))
        sentences.append(f"not read ({why}): {shown}")
    return sentences
