"""The command line of `tools/upsample_long_documents.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_anchor.command_line import make_parser
from megatron_anchor.corpus.inspection import length_edges
from megatron_anchor.corpus.pictures import draw_lengths
from megatron_anchor.corpus.upsampling import (
    DocumentList,
    Share,
    make_document_list,
    parse_mixture,
)
from megatron_anchor.indexed.document_lists import read_document_list
from megatron_anchor.indexed.pair import IndexedCorpus
from megatron_anchor.terminal import escaped, say, say_json

_EXAMPLE = """\
  python tools/upsample_long_documents.py corpus/all_text_document \\
      --tokens 5000000000 --output corpus/long.npy
  then train with --document-list corpus/long.npy"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser(
        "Draw long documents more often, at constant shares of the domains (arXiv 2402.10171).",
        _EXAMPLE,
    )
    add = parser.add_argument
    add("prefix", help="the corpus, without .bin or .idx")
    add("--output", required=True, metavar="FILE.npy", help="the list; a .json goes beside it")
    add("--tokens", type=int, help="size of the drawn corpus (default: that of the corpus)")
    add("--long-tokens", type=int, default=4096, help="documents from here on are long")
    add("--short-weight", type=float, default=0.1, help="of a short document, against 1 of a long")
    add("--mixture", metavar="NAME=SHARE,...", help="shares of the domains (default: as they are)")
    add("--seed", type=int, default=0)
    add("--png", metavar="FILE", help="picture of the lengths before and after")
    add("--overwrite", action="store_true", help="replace what is there")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, draw, print."""
    args = parser().parse_args(argv)
    prefix = args.prefix.removesuffix(".idx").removesuffix(".bin")
    described = make_document_list(
        prefix,
        args.output,
        tokens=args.tokens,
        long_tokens=args.long_tokens,
        short_weight=args.short_weight,
        mixture=parse_mixture(args.mixture) if args.mixture else None,
        seed=args.seed,
        overwrite=args.overwrite,
    )
    if args.png:
        _draw(args.png, prefix, args.output)
    say_json(asdict(described)) if args.json else print_list(described, args.output)
    return 0


def print_list(described: DocumentList, output: str) -> None:
    """The mixture and the lengths before and after."""
    names = [escaped(share.name) for share in described.before]
    wide = max([*map(len, names), 6]) + 2
    for title, rows in (("before", described.before), ("after", described.after)):
        say(f"{title}:")
        say(
            f"  {'domain':<{wide}}{'draws':>10}{'distinct':>10}{'tokens':>14}{'share':>8}"
            f"{'long':>8}{'median':>9}{'longest':>10}"
        )
        for row in rows:
            say(_line(row, wide))
    say(
        f"{output}: {described.documents} documents, {described.tokens} tokens "
        f"(long: at least {described.long_tokens} tokens)"
    )


def _line(row: Share, wide: int) -> str:
    return (
        f"  {escaped(row.name):<{wide}}{row.documents:>10}{row.distinct:>10}{row.tokens:>14}"
        f"{row.share:>8.2%}{row.long_share:>8.1%}{row.median:>9}{row.longest:>10}"
    )


def _draw(png: str, prefix: str, output: str) -> None:
    lengths = IndexedCorpus.open(prefix).document_lengths()
    edges = length_edges(int(lengths.max(initial=1)))
    groups = {}
    for name, sizes in (
        ("before", lengths),
        ("after", lengths[read_document_list(output, prefix)]),
    ):
        bins = np.searchsorted(edges, sizes, side="right") - 1
        groups[name] = np.bincount(bins, weights=sizes, minlength=len(edges)).tolist()
    draw_lengths(
        png,
        edges.tolist(),
        groups,
        title=f"{Path(prefix).name}: tokens by document length",
        compare=True,
    )
