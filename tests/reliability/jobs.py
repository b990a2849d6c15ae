"""Training jobs of one or a few processes that may be killed, each in a process group of its own.

They are forked from one warm process, as in tests.distributed.ranks, but end with a real exit code
and write what they say to a file.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.pretraining import run_program
from tests.distributed.ranks import _CONTEXT, free_port

TIMEOUT = 110
"""Seconds; only a hang takes so long."""

LINE = re.compile(r"^exactly: iteration (\d+) loss (\S+) norm (\S+)$", re.MULTILINE)
"""Not Megatron's own line: its second one after each start shows the mean of two iterations."""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A moment to kill a job at: its `event`-th change to the file system below `folder`.

    A change is a file opened for writing, a folder made, a file renamed or removed. With `after`
    the job lives on for so many seconds, and dies somewhere in the middle of what comes next.
    """

    folder: Path
    event: int
    after: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a job."""

    exit_code: int
    """negative: the signal that ended it"""
    log: str

    @property
    def curve(self) -> dict[int, tuple[float, float]]:
        """Iteration to loss and gradient norm, with all their bits."""
        found = LINE.findall(self.log)
        return {int(n): (float.fromhex(loss), float.fromhex(norm)) for n, loss, norm in found}


class Job:
    """One process of a job, running."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process = process
        self.log = log

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        """Wait for its end; a job that hangs is killed, and the test fails."""
        self.process.join(timeout)
        hangs = self.process.exitcode is None
        if hangs:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        text = self.log.read_text(errors="replace")
        assert not hangs, f"the job hangs:\n{text[-3000:]}"
        return Ended(exit_code=self.process.exitcode, log=text)


def start(
    arguments: str,
    *,
    log: Path,
    rank: int = 0,
    ranks: int = 1,
    port: int | None = None,
    killed: Killed | None = None,
    before: Callable[..., None] | None = None,
    before_args: tuple = (),
) -> Job:
    """Start one rank of a training run.

    Args:
        arguments: of the program, behind those of tests.distributed.pretraining.
        log: file for all that it says.
        rank: number of the process.
        ranks: of the job.
        port: where ranks meet.
        killed: when it dies.
        before: importable function that is called in the process first.
        before_args: its arguments.
    """
    process = _CONTEXT.Process(
        target=_main,
        args=(arguments, log, rank, ranks, port or free_port(), killed, before, before_args),
    )
    process.start()
    return Job(process, log)


def run(arguments: str, *, log: Path, **settings: Any) -> Ended:
    """Train in one process until the end, whatever that is."""
    return start(arguments, log=log, **settings).wait()


def run_ranks_until_one_ends(
    arguments: str, ranks: int, *, log: Path, before: Callable[..., None] | None = None
) -> dict[int, Ended]:
    """Train on several ranks; when one fails the others are stopped after it, as torchrun does.

    Returns:
        The ranks that ended by themselves.
    """
    port = free_port()
    jobs = {
        rank: start(
            arguments,
            log=log.with_name(f"{log.name}.{rank}"),
            rank=rank,
            ranks=ranks,
            port=port,
            before=before,
        )
        for rank in range(ranks)
    }
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        codes = [job.process.exitcode for job in jobs.values()]
        if any(codes) or None not in codes:
            break
        time.sleep(0.1)
    ended = {r: job.wait() for r, job in jobs.items() if job.process.exitcode is not None}
    for rank in set(jobs) - set(ended):
        os.killpg(jobs[rank].process.pid, signal.SIGKILL)
    assert ended, "the job hangs"
    return ended


def _main(
    arguments: str,
    log: Path,
    rank: int,
    ranks: int,
    port: int,
    killed: Killed | None,
    before: Callable[..., None] | None,
    before_args: tuple,
) -> None:
    os.setsid()
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if before is not None:
        before(*before_args)
    if killed is not None:
        _die(killed)
    _log_exactly()
    run_program(arguments)


def _log_exactly() -> None:
    """Print loss and gradient norm of every iteration with all their bits."""
    from megatron.training import training

    training_log = training.training_log

    def log(loss_dict: dict, *args: Any, **settings: Any) -> Any:
        iteration, norm = args[2], args[6]
        if "lm loss" in loss_dict:
            loss = float(loss_dict["lm loss"]).hex()
            print(
                f"exactly: iteration {iteration} loss {loss} norm {float(norm).hex()}", flush=True
            )
        return training_log(loss_dict, *args, **settings)

    training.training_log = log


def _die(moment: Killed) -> None:
    """Kill the process group, its helpers too, at a moment."""
    count = mmap.mmap(-1, 8)  # shared with forked helpers
    below = f"{moment.folder}/"

    def kill() -> None:
        os.killpg(0, signal.SIGKILL)

    def watch(event: str, args: tuple) -> None:
        if event not in CHANGES or not isinstance(args[0], str) or not args[0].startswith(below):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        happened = int.from_bytes(count[:], "little") + 1
        count[:] = happened.to_bytes(8, "little")
        print(f"change {happened} below {below}: {event} {args[0]}", file=sys.stderr, flush=True)
        if happened == moment.event:
            if not moment.after:
                kill()
            threading.Timer(moment.after, kill).start()

    sys.addaudithook(watch)


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate")
