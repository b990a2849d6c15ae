"""Disks that are small or read-only, for one test: real mounts that nobody else sees."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Mounts:
    """A mount namespace that a shell of ours keeps alive."""

    def __init__(self, shell: subprocess.Popen[str]) -> None:
        self._shell = shell

    def mount(self, command: str) -> None:
        """Run a shell command in the namespace."""
        assert self._shell.stdin
        assert self._shell.stdout
        self._shell.stdin.write(f"{command} && echo done || echo failed\n")
        self._shell.stdin.flush()
        assert self._shell.stdout.readline() == "done\n", command

    @property
    def pid(self) -> int:
        """Of a process in the namespace, for `enter`."""
        return self._shell.pid

    def seen(self, path: Path) -> Path:
        """Where a path of the namespace is seen from outside."""
        return Path(f"/proc/{self.pid}/root{path}")


@contextmanager
def private_mounts() -> Iterator[Mounts]:
    """A namespace of our own; the test is skipped where the system allows none."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh"]
    try:
        shell = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        mounts = Mounts(shell)
        mounts.mount("mount --make-rprivate /")
    except (OSError, AssertionError) as error:
        pytest.skip(f"no mount namespace can be made here ({error})")
    try:
        yield mounts
    finally:
        assert shell.stdin
        shell.stdin.close()
        shell.wait()


def enter(pid: int) -> None:
    """See what another process of ours has mounted, from now on and in children."""
    if os.geteuid() != 0:
        _join(pid, "user", os.CLONE_NEWUSER)
    _join(pid, "mnt", os.CLONE_NEWNS)


def _join(pid: int, kind: str, flag: int) -> None:
    here = os.getcwd()
    descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        os.setns(descriptor, flag)
    finally:
        os.close(descriptor)
    os.chdir(here)  # joining leads to the root
