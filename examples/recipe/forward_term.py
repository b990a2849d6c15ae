"""Run a launcher such as torchrun, and hand SIGTERM on to the processes that it started.

    python examples/recipe/forward_term.py python -m torch.distributed.run --nproc-per-node 8 ...

torchrun itself gives its ranks 30 seconds after a SIGTERM, too few for a large checkpoint, and puts
them in sessions of their own, where a signal to the job's process group does not come. Here it
ignores the signal, and each rank gets it once: with --exit-signal-handler they save and end. A rank
that has no handler yet ignores it too, so it gets the signal as soon as it has one.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

SECONDS = 0.5  # between two looks at the ranks


def main(command: list[str]) -> int:
    """Run a command to its end; give its status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what the launcher inherits
    launcher = subprocess.Popen(command)
    asked, told = False, set()

    def remember(*_: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, remember)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = launcher.wait(SECONDS)
            # Python gives a handled signal its default action back before it ends.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return status
        if asked:
            told |= _tell(launcher.pid, told)


def _tell(launcher: int, told: set[int]) -> set[int]:
    """Send SIGTERM to the launcher's ranks that handle it and were not told; give their ids."""
    now = set()
    with contextlib.suppress(psutil.NoSuchProcess):  # the launcher ended just now
        for rank in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                if rank.pid not in told and _handles_term(rank.pid):
                    rank.send_signal(signal.SIGTERM)
                    now.add(rank.pid)
    return now


def _handles_term(process: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
