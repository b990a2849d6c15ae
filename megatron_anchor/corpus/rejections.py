"""Rows of the input that give no document."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from megatron_anchor.errors import UserError


@dataclass(frozen=True)
class Rejection:
    """One row of the input that gave no document, and why.

    `row` is the number of the row in its file counted from 1 (the line number of a JSON-lines
    file), or 0 where the whole file is meant. `kind` groups the reasons in summaries.
    """

    file: str
    row: int
    kind: str
    detail: str = ""
    raw: bytes | None = None

    @property
    def place(self) -> str:
        """`FILE:ROW`, or the file alone."""
        return f"{self.file}:{self.row}" if self.row else self.file

    @property
    def reason(self) -> str:
        """Kind and detail in one phrase."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def as_json(self) -> str:
        """One line for the side file; bytes that are not UTF-8 travel as base64."""
        entry: dict[str, object] = {"file": self.file, "row": self.row, "reason": self.reason}
        if self.raw is not None:
            try:
                entry["raw"] = self.raw.decode("utf-8")
            except UnicodeDecodeError:
                entry["raw_base64"] = base64.b64encode(self.raw).decode("ascii")
        return json.dumps(entry)


class RowError(UserError):
    """The first bad row of a run with `--on-error stop`.

    `kept` is the folder from which `--resume` goes on; empty where nothing was written before.
    """

    def __init__(self, rejection: Rejection, kept: str = "") -> None:
        self.rejection = rejection
        self.kept = kept
        mend = "Mend the row"
        if rejection.kind.startswith("file "):
            mend = "Put a whole copy in its place"
        skip = "run again with --on-error skip"
        if kept:
            mend, skip = f"{mend} and begin anew with --overwrite", "go on with"
            skip += f" --on-error skip --resume from {kept}"
        super().__init__(
            f"{rejection.place}: {rejection.reason}. {mend}, or {skip} to leave such rows out and "
            "list them in a side file."
        )

    def __reduce__(self) -> tuple[type[RowError], tuple[Rejection, str]]:
        """Travel between processes by the rejection, not by the message."""
        return RowError, (self.rejection, self.kept)
