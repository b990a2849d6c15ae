"""One writer for one output: a lock that the kernel lets go when its process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_anchor.errors import UserError

_WAIT_SECONDS = 5.0  # for one that ends just now


class Lock:
    """A locked file, made with its folder; it says who holds it.

    Whoever holds it may remove the file, or its folder, before letting go.
    """

    def __init__(self, path: Path, *, output: str | Path) -> None:
        """Take the lock.

        Args:
            path: of the file.
            output: what is written under it, for messages.

        Raises:
            UserError: another process holds it, or it cannot be made.
        """
        self.path, self._output = path, output
        deadline = time.monotonic() + _WAIT_SECONDS
        while (stream := self._taken()) is None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another run is writing {output} ({self._holder()}); wait for it to end, or "
                    "choose another output"
                )
            time.sleep(0.1)
        self._stream = stream
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()

    def _taken(self) -> IO[str] | None:
        """The locked file; None where it is in other hands, or was removed in the same moment."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = open(self.path, "a+")  # noqa: SIM115 - held until release
        except FileNotFoundError:  # the holder removed the folder
            return None
        except FileExistsError as error:  # the folder was there, and was removed before a look
            if self.path.parent.exists():
                raise UserError(f"{self._output} cannot be made: {error.strerror}") from error
            return None
        except OSError as error:
            raise UserError(f"{self._output} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(stream.fileno()).st_ino == os.stat(self.path).st_ino:
                return stream
        except OSError:
            pass
        stream.close()
        return None

    def _holder(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self.path.read_text()[:200] or "of unknown number"
        return "of unknown number"

    def release(self) -> None:
        """Let go."""
        self._stream.close()


@contextlib.contextmanager
def locked(path: Path, *, output: str | Path) -> Iterator[None]:
    """Hold a lock; its file is removed at the end. See `Lock`."""
    lock = Lock(path, output=output)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def working_folder(folder: Path, *, output: str | Path) -> Iterator[Path]:
    """A locked folder, empty but for its lock, that is removed at the end. See `Lock`."""
    lock = Lock(folder / "lock", output=output)
    try:
        empty(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def empty(folder: Path) -> None:
    """Remove what a killed process left, and not the lock."""
    for path in folder.iterdir():
        if path.name == "lock":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
