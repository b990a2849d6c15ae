"""The command line of `tools/merge_corpora.py`."""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import asdict

from megatron_anchor.command_line import make_parser
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.pair import IndexedCorpus
from megatron_anchor.terminal import say, say_json

_EXAMPLE = """\
  for i in 0 1 2 3; do   # each on its own machine
    python tools/preprocess_data.py --input 'data/*.jsonl' --shard $i/4 \\
        --tokenizer-model my-tokenizer --append-eod --output-prefix parts/$i
  done
  python tools/merge_corpora.py --input 'parts/*_text_document' --output-prefix corpus/all"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser("Merge .bin/.idx corpora: in the order given, shards in theirs.", _EXAMPLE)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="prefixes without .bin/.idx, or patterns in quotes (sorted by the numbers in them)",
    )
    add("--output-prefix", required=True, metavar="PREFIX")
    add(
        "--allow-missing-shards",
        action="store_true",
        help="merge the shards of a job array though some are not there",
    )
    add("--overwrite", action="store_true", help="replace what is there")
    add("--json", action="store_true", help="print the result as JSON")
    add("--no-progress", action="store_true", help="no progress bar")
    return parser


def expand(inputs: Sequence[str]) -> list[str]:
    """Prefixes as given; patterns give every prefix that has an index, 2 before 10."""
    prefixes: list[str] = []
    for text in inputs:
        if not glob.has_magic(text) or os.path.isfile(f"{text}.idx"):
            prefixes.append(text.removesuffix(".idx").removesuffix(".bin"))
            continue
        found = [
            path.removesuffix(".idx") for path in glob.glob(f"{text.removesuffix('.idx')}.idx")
        ]
        if not found:
            raise UserError(f"--input {text}: no .idx file matches {text}.idx")
        prefixes += sorted(found, key=_numbers_as_numbers)
    return prefixes


def _numbers_as_numbers(text: str) -> list[tuple[int, str | int]]:
    parts = re.split(r"(\d+)", text)
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, merge, print."""
    args = parser().parse_args(argv)
    prefixes = expand(args.input)
    manifest = merge_corpora(
        prefixes,
        args.output_prefix,
        overwrite=args.overwrite,
        allow_missing_shards=args.allow_missing_shards,
        progress=not args.no_progress and not args.json,
    )
    corpus = IndexedCorpus.open(args.output_prefix)
    if args.json:
        say_json(
            {
                "prefix": args.output_prefix,
                "parts": prefixes,
                "documents": len(corpus),
                "tokens": len(corpus.tokens),
                "manifest": asdict(manifest) if manifest else None,
            }
        )
        return 0
    say(
        f"{args.output_prefix}: {len(corpus)} documents, {len(corpus.tokens)} tokens from "
        f"{len(prefixes)} parts"
    )
    return 0
