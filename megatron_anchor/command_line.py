"""What all commands share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron_anchor.terminal import escaped


class CommandParser(argparse.ArgumentParser):
    """A parser that shows wrong arguments escaped."""

    def error(self, message: str) -> NoReturn:
        """End with a message; a shell may have put names of files into the arguments."""
        super().error(escaped(message))


def make_parser(description: str, example: str) -> argparse.ArgumentParser:
    """A parser whose help ends with a worked example."""
    return CommandParser(
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
