"""Run a launcher such as torchrun, and hand SIGTERM on to the processes that it started.

    python examples/recipe/forward_term.py python -m torch.distributed.run --nproc-per-node 8 ...

torchrun itself gives its ranks 30 seconds after a SIGTERM, too few for a large checkpoint, and puts
them in sessions of their own, where a signal to the job's process group does not come. Here it
ignores the signal, and the ranks get it: with --exit-signal-handler they save and end.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from types import FrameType

import psutil


def main(command: list[str]) -> int:
    """Run a command to its end; give its status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what the launcher inherits
    launcher = subprocess.Popen(command)

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            for rank in psutil.Process(launcher.pid).children():
                rank.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    return launcher.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
