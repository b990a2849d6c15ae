"""What every command shares: its parser, its exit codes, and how it ends on an error."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from megatron_anchor.errors import UserError
from megatron_anchor.flags import tell_default
from megatron_anchor.terminal import say

FAILED, WRONG = 1, 2
INTERRUPTED, PIPE_CLOSED, TERMINATED = (
    128 + s for s in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
)

Main = Callable[[Sequence[str] | None], int]
"""The main function of a command: arguments (None = those of the process) to an exit code."""


class CommandParser(argparse.ArgumentParser):
    """A parser that answers a wrong argument with one line instead of all flags.

    Its help begins with what must be given, not with all flags, and tells the default of each.
    """

    def format_usage(self) -> str:
        """The arguments that must be given; help lists the others."""
        needed = [a for a in self._actions if a.required or not a.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, needed, [])
        return f"{formatter.format_help().rstrip()} [flags]\n"

    def format_help(self) -> str:
        """Usage, flags with their defaults, and the example."""
        for action in self._actions:
            tell_default(action)
        _, _, rest = super().format_help().partition("\n\n")
        return f"{self.format_usage()}\n{rest}"

    def error(self, message: str) -> NoReturn:
        """End with a message; file names in the arguments may hold control characters."""
        say(f"error: {message}; `{self.prog} --help` lists all flags", file=sys.stderr)
        raise SystemExit(WRONG)


def make_parser(description: str, example: str) -> argparse.ArgumentParser:
    """A parser whose help ends with a worked example."""
    return CommandParser(
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(main: Main, argv: Sequence[str] | None = None) -> int:
    """Run a command to its exit code.

    0: done. 1: done, and the answer is no (the files do not agree, the models differ). 2: the user
    can change something: one line says what. 130: Ctrl-C; 143: SIGTERM; 141: whoever read the
    output, such as `head`, has closed it. A bug keeps its traceback.
    """
    try:
        with _sigterm_raises():
            code = main(argv)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except (UserError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return WRONG
    except _Terminated:
        say("ended by SIGTERM", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        return INTERRUPTED


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it: ends a command like Ctrl-C."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Let the interpreter flush what is left of stdout at its end without an error."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
