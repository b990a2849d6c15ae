"""What all commands share."""

from __future__ import annotations

import argparse


def make_parser(description: str, example: str) -> argparse.ArgumentParser:
    """A parser whose help ends with a worked example."""
    return argparse.ArgumentParser(
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
