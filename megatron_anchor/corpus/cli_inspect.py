"""The command line of `tools/inspect_corpus.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_anchor.command_line import make_parser
from megatron_anchor.corpus.inspection import (
    PERCENTILES,
    Report,
    inspect_corpus,
    weights_of_document,
)
from megatron_anchor.corpus.pictures import draw_lengths
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.manifest import KeyManifest, read_manifest
from megatron_anchor.indexed.pair import IndexedCorpus
from megatron_anchor.shell_words import quoted
from megatron_anchor.terminal import escaped, say, say_block, say_json
from megatron_anchor.tokenizers import Tokenizer, load_tokenizer
from megatron_anchor.tokenizers.flags import add_tokenizer_arguments, tokenizer_config

_EXAMPLE = """\
  python tools/inspect_corpus.py corpus/all_text_document --png lengths.png
  python tools/inspect_corpus.py corpus/all_text_document --document 17 --tokenizer-model my-model
  exit code 0 where the files agree, 1 where they do not"""

_MOST_DRAWN = 9
_MOST_LISTED = 30


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser("Count, measure and verify a .bin/.idx corpus.", _EXAMPLE)
    add = parser.add_argument
    add("prefix", help="the corpus, without .bin or .idx")
    add(
        "--document",
        type=int,
        metavar="N",
        help="show document N (from 0), decoded; if weighted, \u27e6 \u27e7 around what is learned",
    )
    add("--max-tokens", type=int, default=2000, help="of a shown document (default 2000)")
    add("--png", metavar="FILE", help="write a picture of the document lengths")
    add("--json", action="store_true", help="print the report as JSON")
    add_tokenizer_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, inspect, print; 1 where something does not agree."""
    args = parser().parse_args(argv)
    prefix = args.prefix.removesuffix(".idx").removesuffix(".bin")
    given = bool(args.tokenizer_model or args.tokenizer_type or args.vocab_file)
    tokenizer = load_tokenizer(tokenizer_config(args)) if given else None
    if tokenizer is not None:
        _check_same(prefix, tokenizer)
    if args.document is not None:
        return _show_document(args, prefix, tokenizer)
    report = inspect_corpus(
        prefix,
        vocab_size=tokenizer.vocab_size if tokenizer else args.vocab_size,
        eod_id=args.eod_id,
    )
    if args.png:
        name = Path(prefix).name
        draw_lengths(args.png, report.edges, _groups(report), title=f"{name}: tokens by length")
    say_json(asdict(report)) if args.json else print_report(report)
    return 1 if report.problems else 0


def _groups(report: Report) -> dict[str, tuple[int, ...]]:
    """Tokens by length of the largest domains, and of all others together."""
    whole, *domains = report.domains
    if not domains:
        return {whole.name: whole.bin_tokens}
    groups = {domain.name: domain.bin_tokens for domain in domains[:_MOST_DRAWN]}
    others = [domain.bin_tokens for domain in domains[_MOST_DRAWN:]]
    if others:
        groups[f"{len(others)} others"] = tuple(map(sum, zip(*others, strict=True)))
    return groups


def _check_same(prefix: str, tokenizer: Tokenizer) -> None:
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    own, theirs = tokenizer.fingerprint(), manifest.tokenizer.get("fingerprint")
    if own != theirs:
        made = manifest.tokenizer.get("path") or manifest.tokenizer.get("kind")
        say(
            f"note: the corpus was made with another tokenizer ({made}, fingerprint {theirs}) than "
            f"the one given ({own})",
            file=sys.stderr,
        )


def _flags_of(manifest: KeyManifest | None) -> str:
    """The tokenizer flags that the corpus was made with, as far as its manifest tells."""
    if manifest is None:
        return "--tokenizer-model"
    made = manifest.tokenizer
    if made.get("path"):
        return f"--tokenizer-model {quoted(str(made['path']))}, with which the corpus was made"
    types = {"bytes": "ByteLevelTokenizer", "null": "NullTokenizer"}
    flags = f"--tokenizer-type {types.get(made.get('kind', ''), '...')}"
    return f"{flags} --vocab-size ..." if made.get("kind") == "null" else flags


def _show_document(args: argparse.Namespace, prefix: str, tokenizer: Tokenizer | None) -> int:
    corpus = IndexedCorpus.open(prefix)
    ids = corpus.document(args.document)
    if tokenizer is None:
        manifest = read_manifest(prefix)
        raise UserError(f"--document needs the tokenizer: give {_flags_of(manifest)}")
    shown = ids[: args.max_tokens]
    decode = tokenizer.native_engine.decode
    weights = weights_of_document(corpus, args.document)
    text = decode(shown.tolist())
    if args.json:
        value = {"document": args.document, "tokens": ids.tolist(), "text": text}
        say_json(value if weights is None else {**value, "weights": weights.tolist()})
        return 0
    say(f"document {args.document}: {len(ids)} tokens, {ids[:8].tolist()} ... {ids[-4:].tolist()}")
    if weights is not None:
        say(f"{np.count_nonzero(weights)} of them are learned: those in \u27e6 \u27e7")
        text = _marked(shown, weights, decode)
    say_block(text)
    if len(shown) < len(ids):
        say(f"... {len(ids) - len(shown)} more tokens (--max-tokens)")
    return 0


def _marked(ids: np.ndarray, weights: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """The text with \u27e6 \u27e7 around what is learned; a weight other than 1 is shown."""
    weights = weights[: len(ids)]
    borders = np.flatnonzero(np.diff(weights)) + 1
    parts = []
    for run, held in zip(np.split(ids, borders), np.split(weights, borders), strict=True):
        if not len(run):
            continue
        text, weight = decode(run.tolist()), float(held[0])
        shown = "" if weight == 1 else f"{weight:g}: "
        parts.append(f"\u27e6{shown}{text}\u27e7" if weight else text)
    return "".join(parts)


def print_report(report: Report) -> None:
    """Tables for people."""
    whole = report.domains[0]
    say(
        f"{report.prefix}: {whole.documents} documents, {report.sequences} sequences, "
        f"{whole.tokens} tokens of {report.dtype}",
        "",
    )
    names = [escaped(domain.name) for domain in report.domains]
    wide = max(map(len, names)) + 2
    percentiles = [f"p{p}" if p < 100 else "longest" for p in PERCENTILES]
    head = f"{'domain':<{wide}}{'documents':>12}{'tokens':>15}{'share':>8}"
    say(head + "".join(f"{p:>11}" for p in percentiles))
    for name, domain in zip(names[: _MOST_LISTED + 1], report.domains, strict=False):
        share = domain.tokens / max(whole.tokens, 1)
        row = f"{name:<{wide}}{domain.documents:>12}{domain.tokens:>15}{share:>8.1%}"
        say(row + "".join(f"{value:>11}" for value in domain.percentiles))
    if len(names) > _MOST_LISTED + 1:
        say(f"... and {len(names) - _MOST_LISTED - 1} smaller domains (--json lists all)")
    say("", f"{'length from':>12}{'documents':>12}{'tokens':>15}{'share':>8}")
    for edge, count, tokens in zip(report.edges, whole.counts, whole.bin_tokens, strict=True):
        if count:
            share = tokens / max(whole.tokens, 1)
            bar = "#" * round(40 * share)
            say(f"{edge:>12}{count:>12}{tokens:>15}{share:>8.1%} {bar}")
    if report.learned is not None:
        held = report.learned
        say(
            "",
            f"{held.weighted_tokens} tokens are learned ({held.share:.1%}), in {held.documents} "
            f"documents; weights of {held.dtype} up to {held.largest:g}, sum {held.weight_sum:g}",
        )
        if held.conversations:
            counts = (f"{count} {name}" for name, count in held.conversations.items())
            say(", ".join(counts).replace("_", " "))
    say("", *(f"PROBLEM: {problem}" for problem in report.problems))
    if not report.problems:
        say("the files agree with one another")
