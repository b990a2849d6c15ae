"""An output folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_anchor.checkpoint.errors import CheckpointError


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder next to ``path`` that takes its name when all went well.

    Raises:
        CheckpointError: if ``path`` holds something already, or cannot be written.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not empty; choose another --out or remove it")
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
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
