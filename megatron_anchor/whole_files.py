"""Files that are there whole or not at all, whenever the writer is killed or the disk is full."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from megatron_anchor.terminal import logger_of

logger = logger_of(__name__)

ABANDONED_AFTER = 24 * 3600
"""Seconds without a write after which a temporary file belongs to nobody: writers on other
machines cannot be asked, and none pauses for a day."""

_SUFFIX = ".tmp"


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Give a stream to a name of our own that takes the place of `path` when all is on the disk.

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
def replacing_text(path: str | Path, *, newline: str | None = None) -> Iterator[IO[str]]:
    """Do the same with a stream of UTF-8 text; `newline` as in `open`."""
    with replacing(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline=newline)
        yield text
        text.flush()
        text.detach()


def remove_abandoned(directory: str | os.PathLike[str]) -> None:
    """Remove the temporary files of `replacing` whose writers were killed; younger ones stay."""
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
