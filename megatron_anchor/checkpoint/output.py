"""An output folder that is there whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_anchor.checkpoint.errors import CheckpointError
from megatron_anchor.terminal import logger_of


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder next to ``path`` that takes its name when all went well.

    A link is followed: the folder it leads to is written.

    Raises:
        CheckpointError: if ``path`` holds something already, or cannot be written.
    """
    path = Path(path).resolve()
    if path.is_mount():
        raise CheckpointError(
            f"{path} is a mount point, which cannot be renamed; name a folder in it"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not empty; choose another --out or remove it")
    prefix = f".{path.name}.partial-"
    for stale in path.parent.glob(f"{glob.escape(prefix)}*"):
        logger_of(__name__).warning(
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
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
