"""The command line of `tools/preprocess_data.py`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_anchor.command_line import make_parser
from megatron_anchor.corpus.chat_encoding import TOO_LONG
from megatron_anchor.corpus.preprocess import NO_ENGINE, PreprocessConfig, Summary, preprocess
from megatron_anchor.corpus.sources import FORMATS
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.weights import WEIGHT_DTYPES
from megatron_anchor.terminal import say, say_json
from megatron_anchor.tokenizers.flags import add_tokenizer_arguments, tokenizer_config

_EXAMPLE = """\
  python tools/preprocess_data.py --input 'data/*.jsonl.gz' --json-keys text \\
      --domain-key meta.redpajama_set_name --tokenizer-model meta-llama/Llama-3.1-8B \\
      --append-eod --output-prefix corpus/slimpajama
  writes corpus/slimpajama_text_document.bin and .idx for Megatron's --data-path, and beside them
  .manifest.json and .domains.npy

  python tools/preprocess_data.py --chat --input 'chats/*.jsonl' --tokenizer-model my-model \\
      --chat-template tagged.jinja --max-conversation-tokens 32768 --output-prefix corpus/chats
  writes corpus/chats_messages_document.bin, .idx, and .weights.bin, which says what is learned"""


def parser() -> argparse.ArgumentParser:
    """All flags; names that Megatron's tool has mean the same here."""
    parser = make_parser("Turn texts into Megatron's .bin/.idx corpora.", _EXAMPLE)
    _add_input(parser)
    _add_targets(parser)
    add_tokenizer_arguments(parser)
    _add_processing(parser)
    _add_output(parser)
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    add = group.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, patterns in quotes, or folders: .jsonl, .json, .jsonl.gz, .jsonl.zst, "
        ".parquet, .txt (one document a file), a folder of Dataset.save_to_disk, or hf://owner/name",
    )
    add(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="keys to take, one corpus each (default: text; with --chat, messages)",
    )
    add("--input-format", choices=FORMATS, help="for files whose names do not tell")
    add("--domain", nargs="+", default=(), metavar="NAME", help="one for all inputs, or one each")
    add("--domain-key", metavar="KEY", help="dotted path to a row's domain")
    add(
        "--pretokenized",
        action="store_true",
        help="rows hold input_ids, and source spans that name their documents (AnchorContext)",
    )
    add("--hf-split", default="train", help="split of a saved or hub dataset")
    add("--hf-config", help="configuration of a hub dataset")
    add("--max-row-mb", type=int, default=100, help="rows above this are bad rows (default 100)")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is learned", "by default every token, and all alike")
    add = group.add_argument
    add(
        "--chat",
        action="store_true",
        help="rows hold conversations (Hugging Face messages, or Megatron's --sft files): render "
        "them with the chat template, and learn what stands in its {%% generation %%} tags",
    )
    add("--chat-template", metavar="FILE", help="in place of the tokenizer's own")
    add(
        "--chat-template-kwargs",
        metavar="JSON",
        help='variables of the template, such as \'{"date_string": "26 Jul 2024"}\'',
    )
    add("--tools-key", default="tools", metavar="KEY", help="where a row may have tools (tools)")
    add(
        "--max-conversation-tokens",
        type=int,
        metavar="N",
        help="longer ones lose whole turns at their end, or are bad rows",
    )
    add("--long-conversations", choices=TOO_LONG, default=TOO_LONG[0])
    add(
        "--weight-key",
        metavar="KEY",
        help="dotted path to a row's weight as a target: a number, or a list of one for each token",
    )
    add(
        "--weight-dtype",
        choices=WEIGHT_DTYPES,
        default="float32",
        help="of the file of weights (default float32)",
    )


def _add_processing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processing")
    add = group.add_argument
    add("--append-eod", action="store_true", help="end every document with the eod token")
    add("--split-sentences", action="store_true", help="one sequence a sentence (nltk Punkt)")
    add("--keep-newlines", action="store_true", help="sentences keep the newlines after them")
    add("--lang", default="english", help="language of the Punkt model")
    add("--punkt-path", metavar="PATH", help="local punkt_tab folder or punkt_tab.zip")
    add("--workers", type=int, default=0, help="cores to use (default: all)")
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="stop at the first bad row, or leave bad rows out and list them in a side file",
    )
    add("--shard", metavar="I/N", help="do only part I (from 0) of N; then tools/merge_corpora.py")
    add(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="ray: run the shards as tasks of --workers CPUs on a Ray cluster and merge them",
    )
    add("--shards", type=int, default=0, help="of --executor ray (default: what the CPUs allow)")
    add("--chunk-kb", type=int, default=0, help="text a worker gets at once (0: as suits)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output-prefix", required=True, metavar="PREFIX")
    add("--resume", action="store_true", help="go on where a killed run stopped")
    add("--overwrite", action="store_true", help="replace what is there")
    add("--checkpoint-seconds", type=float, default=10.0, help="how much work a kill may cost")
    add("--json", action="store_true", help="print the summary as JSON on stdout")
    add("--no-progress", action="store_true", help="no progress bar")


def config_from(args: argparse.Namespace) -> PreprocessConfig:
    """The library's settings for parsed arguments."""
    special = {"tokenizer", "progress", "json_keys"}
    names = [name for name in PreprocessConfig.__dataclass_fields__ if name not in special]
    values: dict[str, Any] = {name: getattr(args, name) for name in names}
    default_keys = ["input_ids"] if args.pretokenized else ["text"]
    if args.chat:
        default_keys = ["messages"]
    for name in ("input", "domain"):
        values[name] = tuple(values[name])
    return PreprocessConfig(
        **values,
        json_keys=tuple(args.json_keys or default_keys),
        tokenizer=tokenizer_config(args),
        progress=not args.no_progress and not args.json,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, preprocess, print; 0 when every good row was written."""
    args = parser().parse_args(_with_shard_joined(sys.argv[1:] if argv is None else argv))
    config = config_from(args)
    if args.shards and args.executor != "ray":
        raise UserError("--shards is for --executor ray; --shard I/N does one part here")
    kept = Path(f"{config.output_prefix}.{'shards' if args.executor == 'ray' else 'partial'}")
    try:
        summary = _execute(args, config)
    except KeyboardInterrupt:
        if kept.exists():
            say(f"what was finished is kept in {kept}: go on with --resume", file=sys.stderr)
        raise
    if args.json:
        say_json(asdict(summary))
    else:
        print_summary(summary)
    return 0


def _execute(args: argparse.Namespace, config: PreprocessConfig) -> Summary:
    if args.executor == "local":
        return preprocess(config)
    from megatron_anchor.corpus.distributed import preprocess_on_ray

    return preprocess_on_ray(config, shards=args.shards)


def _with_shard_joined(argv: Sequence[str]) -> list[str]:
    """`--shard -1/5` as `--shard=-1/5`: a wrong value, not an unknown flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--shard" and word[:1] == "-" and word[1:2].isdigit():
            joined[-1] = f"--shard={word}"
        else:
            joined.append(word)
    return joined


def _counts_of(conversations: Mapping[str, int]) -> str:
    """The counts of --chat as a sentence."""
    counts = Counter(conversations)
    text = f"{counts['conversations']} conversations with {counts['answers']} answers"
    if counts["rows_of_several"]:
        text += f"; {counts['rows_of_several']} rows held several, each from a system message on"
    if counts["shortened"]:
        text += (
            f"; {counts['shortened']} were over --max-conversation-tokens and lost their last "
            f"{counts['dropped_messages']} messages in all"
        )
    return text


def print_summary(summary: Summary) -> None:
    """The summary for people."""
    for note in summary.notes:
        say(f"note: {note}", file=sys.stderr)
    for number, prefix in enumerate(summary.prefixes):
        kept = summary.empty_kept[number]
        beside = f" ({kept} empty, to stay beside the other keys)" if kept else ""
        say(
            f"{prefix}: {summary.documents[number]} documents{beside}, {summary.tokens[number]} "
            f"tokens, {summary.empty_documents[number]} empty left out"
        )
        if summary.weighted_tokens:
            learned = summary.weighted_tokens[number]
            share = learned / max(summary.tokens[number], 1)
            say(f"  {learned} of its tokens are learned ({share:.1%})")
    if summary.conversations:
        say(_counts_of(summary.conversations))
    if summary.engine != NO_ENGINE:
        rate = summary.processed_bytes / 1e6 / max(summary.seconds, 1e-9)
        say(f"{summary.rows_read} rows read in {summary.seconds:.1f} s ({rate:.2f} MB/s)")
    if summary.rejected:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.rejected.items())
        say(f"{sum(summary.rejected.values())} rows rejected ({kinds}): {summary.rejected_file}")
