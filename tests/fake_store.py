"""An object store that is a folder: what Megatron's readers ask of boto3 and of MSC."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from megatron.core import msc_utils
from megatron.core.datasets import indexed_dataset, object_storage_utils


class Range(NamedTuple):
    """MSC's way to name bytes."""

    offset: int
    size: int


class Store:
    """A folder as bucket (s3://bucket/...) and profile (msc://profile/...)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, int]] = []
        """Object and bytes of every read."""

    def client(self, kind: str) -> Any:
        """As boto3's."""
        assert kind == "s3"
        return SimpleNamespace(
            download_file=self._download, get_object=self._get_object, close=lambda: None
        )

    def _download(self, Bucket: str, Key: str, Filename: str) -> None:
        assert Bucket == "bucket"
        shutil.copyfile(self.folder / Key, Filename)

    def _get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]:
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        return {"Body": BytesIO(self._read(Key, first, last + 1 - first))}

    def _read(self, name: str, offset: int, size: int) -> bytes:
        found = (self.folder / name).read_bytes()[offset : offset + size]
        self.requests.append((name, len(found)))
        return found

    def msc(self) -> Any:
        """As the package multistorageclient."""

        def resolve(path: str) -> tuple[Any, str]:
            name = path.removeprefix("msc://profile/")
            read = lambda path, byte_range: self._read(path, *byte_range)  # noqa: E731
            return SimpleNamespace(read=read), name

        def download(path: str, local: str) -> None:
            Path(local).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path.removeprefix("msc://profile/"), local)

        types = SimpleNamespace(Range=Range)
        return SimpleNamespace(resolve_storage_client=resolve, download_file=download, types=types)


def installed(store: Store) -> ExitStack:
    """Let Megatron find the store by both ways."""
    stack = ExitStack()
    boto3 = SimpleNamespace(client=store.client)
    for module in (indexed_dataset, object_storage_utils):
        stack.enter_context(mock.patch.object(module, "boto3", boto3, create=True))
    stack.enter_context(mock.patch.object(msc_utils, "msc", store.msc()))
    flag = msc_utils.MultiStorageClientFeature
    stack.enter_context(mock.patch.object(flag, "_enabled", True))
    return stack
