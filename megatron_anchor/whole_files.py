"""Files and folders that are there whole or not at all, whatever happens to their writer."""

from __future__ import annotations

import glob
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from megatron_anchor.errors import UserError
from megatron_anchor.terminal import logger_of

logger = logger_of(__name__)

ABANDONED_AFTER = 24 * 3600
"""Seconds without a write after which a temporary file counts as left behind. Its writer may run on
another machine, where nobody can ask; none pauses for a day."""

_SUFFIX = ".tmp"


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Give a stream to a temporary file that replaces `path` once it is on the disk.

    Readers see the old file or the whole new one; several writers may write one path at once.

    Raises:
        OSError: the file cannot be written; the old one is untouched and nothing is left behind.
    """
    path = Path(path)
    own = path.with_name(f".{path.name}.{uuid4().hex}{_SUFFIX}")
    try:
        with own.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(own, path)
    except BaseException:
        with suppress(OSError):
            own.unlink()
        raise


@contextmanager
def atomic_write_text(path: str | Path, *, newline: str | None = None) -> Iterator[IO[str]]:
    """Do the same with a stream of UTF-8 text; `newline` as in `open`."""
    with atomic_write(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline=newline)
        yield text
        text.flush()
        text.detach()


def move_finished(part: Path, final: Path) -> None:
    """Give a finished file its final name, its contents on the disk first.

    For what is too large to be written twice, or is written over several runs.

    Raises:
        OSError: the contents or the name cannot be written.
    """
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, final)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder next to `path` that takes its name at the end.

    A link is followed: the folder that it leads to is written.

    Args:
        path: of a folder that does not exist, or is empty; what --out names.

    Raises:
        UserError: `path` holds something already, or cannot be written.
    """
    path = Path(path).resolve()
    if path.is_mount():
        raise UserError(f"{path} is a mount point, which cannot be renamed; name a folder in it")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty; choose another --out or remove it")
    prefix = f".{path.name}.partial-"
    for stale in path.parent.glob(f"{glob.escape(prefix)}*"):
        logger.warning(
            "%s was left by a run that was killed; remove it if no other is writing it", stale
        )
    temporary = path.with_name(f"{prefix}{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            path.rmdir()
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_abandoned(directory: str | os.PathLike[str]) -> None:
    """Remove the temporary files of `atomic_write` whose writers were killed; younger ones stay."""
    for path in Path(directory).glob(f".*.{'[0-9a-f]' * 32}{_SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime < ABANDONED_AFTER:
                continue
            path.unlink()
        except FileNotFoundError:  # another process was quicker
            continue
        except OSError as error:
            logger.warning("cannot remove %s, which a killed process left: %s", path, error)
            continue
        logger.info("removed %s, which a killed process left", path)
