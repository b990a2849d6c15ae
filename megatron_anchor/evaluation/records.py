"""What was finished, one JSON object a line: kept through a crash, never mixed with other settings.

The first line of a file has the settings, every other one a finished sample or perplexity window.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.terminal import logger_of
from megatron_anchor.whole_files import atomic_write

Key = tuple[Any, ...]

_REQUIRED = {
    "sample": ("task", "length", "index", "score"),
    "window": ("text", "window", "nats", "tokens"),
}


class Records:
    """The file of one checkpoint, opened by one process at a time."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Open or make the file.

        Args:
            path: of the file.
            settings: JSON values that decide the results.
            resume: False: refuse a file that has results.

        Raises:
            UserError: if it belongs to other settings, is damaged, or in use.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._begin()
        self._stream = path.open("r+b")
        try:
            self._lock()
            self.found = self._read()
            if self.found and not resume:
                raise UserError(
                    f"--no-resume: {path} has {len(self.found)} results; remove it, or name "
                    "another --output-dir"
                )
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append finished results; they are on the disk when this returns."""
        lines = b""
        for record in records:
            self.found[key_of(record)] = dict(record)
            lines += _line(record)
        self._stream.write(lines)
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _begin(self) -> None:
        with atomic_write(self.path) as stream:
            stream.write(_line({"settings": self._settings}))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self.path} is being written by another evaluation") from error

    def _read(self) -> dict[Key, dict[str, Any]]:
        content = self._stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            logger_of(__name__).warning(
                "%s: the last line is torn, as by a crash; that result is made again", self.path
            )
            self._stream.truncate(len(whole))
            self._stream.seek(len(whole))
        lines = whole.splitlines()
        if not lines:
            raise self._damaged(1, "it is empty")
        self._compare(self._parse(1, lines[0]).get("settings"))
        found = {}
        for number, line in enumerate(lines[1:], 2):
            record = self._parse(number, line)
            required = _REQUIRED.get(str(record.get("kind")))
            if required is None or not all(name in record for name in required):
                raise self._damaged(number, f"no result: {line[:60]!r}")
            found[key_of(record)] = record
        return found

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise self._damaged(number, str(error)) from error
        if not isinstance(value, dict):
            raise self._damaged(number, f"expected an object, got {line[:60]!r}")
        return value

    def _compare(self, before: Any) -> None:
        if not isinstance(before, dict):
            raise self._damaged(1, "no settings")
        now = self._settings
        different = [
            f"{name} {json.dumps(before.get(name))} -> {json.dumps(now.get(name))}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if different:
            raise UserError(
                f"{self.path} belongs to other settings (there -> now): {'; '.join(different)}. "
                "Name another --output-dir, or give the same settings"
            )

    def _damaged(self, number: int, what: str) -> UserError:
        return UserError(
            f"{self.path}, line {number}: damaged ({what}); remove that line to make its result "
            "again, or the file to begin anew"
        )


def key_of(record: Mapping[str, Any]) -> Key:
    """What a result is of."""
    names = ("task", "length", "index") if record["kind"] == "sample" else ("text", "window")
    return (record["kind"], *(record[name] for name in names))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
