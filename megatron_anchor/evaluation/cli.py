"""The command line of `tools/evaluate_long_context.py`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_anchor.command_line import make_parser
from megatron_anchor.compat import quiet_imports_without_gpu
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.answering import QUESTION_SETS
from megatron_anchor.evaluation.models import DTYPES, Placement
from megatron_anchor.evaluation.tasks import ALL, TASKS
from megatron_anchor.terminal import say, say_block, say_json
from megatron_anchor.whole_files import atomic_write_text

TABLES = "results.md"

_EXAMPLE = """\
  python tools/evaluate_long_context.py --checkpoints models/Llama-2-7b-64K --tasks ruler \\
      --seq-lengths 4096 8192 16384 32768 65536 --num-samples 100 --output-dir results/llama
the last five checkpoints of two runs, each averaged, on the same axes:
  python tools/evaluate_long_context.py --checkpoints full=run_full/iter_00009{60,70,80,90} \\
      full=run_full/iter_0001000 anchor=run_anchor/iter_00009{60,70,80,90} \\
      anchor=run_anchor/iter_0001000 --seq-lengths 4096 65536 --output-dir results/both
saved results of two evaluations on the same axes:
  python tools/evaluate_long_context.py --plot full=results/a anchor=results/b \\
      --output-dir results/both"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = make_parser(
        "Ask models questions about long texts, as RULER does (arXiv 2404.06654): retrieval, "
        "tracking, counting, question answering. Writes tables, JSON and pictures; finished "
        "samples are kept, and the same command goes on where it was stopped.",
        _EXAMPLE,
    )
    add = parser.add_argument
    add(
        "--checkpoints",
        nargs="+",
        default=(),
        metavar="[LABEL=]DIR",
        help="Hugging Face folders, Megatron runs (the latest iteration) or their iter_ folders; "
        "those with one label, or with none, are averaged with their spread",
    )
    add("--output-dir", required=True, metavar="DIR", help="for results, and exports of Megatron's")
    add(
        "--tasks",
        nargs="+",
        default=[ALL],
        metavar="TASK",
        help=f"`{ALL}` (all that there are texts for), `none`, or some of {', '.join(TASKS)}",
    )
    add("--seq-lengths", nargs="+", type=int, default=[4096], metavar="N")
    add("--num-samples", type=int, default=100, help="of a task and length (default 100)")
    add("--seed", type=int, default=42)
    add("--batch-size", type=int, default=1, help="prompts at a time (default 1)")
    add("--engine", choices=("hf", "lm-eval"), default="hf")
    add("--resume", action=argparse.BooleanOptionalAction, default=True)
    texts = parser.add_argument_group("texts").add_argument
    texts("--depths", nargs="+", type=float, default=(), metavar="PERCENT", help="of the needle")
    texts("--haystack", metavar="FILE", help="essays; default: Python's language reference")
    texts("--qa-file", metavar="FILE", help="SQuAD, HotpotQA or JSON lines, for the task qa")
    for name in QUESTION_SETS:
        flag = f"--{name.replace('_', '-')}"
        texts(flag, metavar="FILE", help=f"the same, for the task {name}, with a score of its own")
    texts("--perplexity", action="store_true", help="also by position, on --text")
    texts("--text", nargs="+", default=(), metavar="FILE_OR_GLOB")
    model = parser.add_argument_group("model").add_argument
    model("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on CUDA, else float32")
    model("--device", choices=("auto", "cpu", "cuda"), default="auto")
    model("--attn-implementation", default="sdpa", help="of transformers (default sdpa)")
    model("--tokenizer", metavar="DIR", help="default: the checkpoint's own")
    model(
        "--first-token",
        nargs="+",
        default=["auto"],
        metavar="TOKEN",
        help="auto (the anchor that config.json records, else the tokenizer's), none, bos, eos or "
        "an id; several are compared",
    )
    model("--like", metavar="DIR", help="for exports: config and tokenizer of the original model")
    model("--allow-longer", action="store_true", help="lengths beyond max_position_embeddings")
    output = parser.add_argument_group("output").add_argument
    output("--plot", nargs="+", default=(), metavar="[LABEL=]RESULTS", help="compare saved results")
    output("--json", action="store_true", help="print JSON instead of tables")
    output("--no-progress", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, evaluate, write, print."""
    args = parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    quiet_imports_without_gpu()
    _check(args)
    try:
        results = _saved(args) if args.plot else _evaluated(args)
    except KeyboardInterrupt:
        say("finished samples are kept: the same command goes on from there", file=sys.stderr)
        raise
    _write(args, results)
    return 0


def _check(args: argparse.Namespace) -> None:
    if bool(args.checkpoints) == bool(args.plot):
        raise UserError("give --checkpoints to evaluate, or --plot to compare saved results")
    for flag in ("num_samples", "batch_size"):
        if getattr(args, flag) < 1:
            name = flag.replace("_", "-")
            raise UserError(f"--{name} {getattr(args, flag)}: expected 1 or more")
    for length in args.seq_lengths:
        if length < 2:
            raise UserError(f"--seq-lengths {length}: expected 2 or more")
    for depth in args.depths:
        if not 0 <= depth <= 100:
            raise UserError(f"--depths {depth:g}: expected percent, 0 to 100")
    if len(args.depths) > args.num_samples:
        raise UserError(
            f"--depths has {len(args.depths)} values for --num-samples {args.num_samples}: samples "
            "take them in turn, so give at least as many samples"
        )
    if args.perplexity != bool(args.text):
        raise UserError("--perplexity needs --text FILE_OR_GLOB ..., and --text --perplexity")
    if args.engine == "lm-eval":
        given = {"--depths": args.depths, "--haystack": args.haystack, "--qa-file": args.qa_file}
        given |= {f"--{name.replace('_', '-')}": getattr(args, name) for name in QUESTION_SETS}
        for flag, value in given.items():
            if value:
                raise UserError(f"{flag}: lm-eval has its own texts; leave it out")


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_anchor.evaluation.checkpoints import split_label
    from megatron_anchor.evaluation.summary import read_results

    return read_results([split_label(word) for word in args.plot])


def _evaluated(args: argparse.Namespace) -> dict[str, Any]:
    # torch and transformers take seconds to import, which --help need not wait for.
    from megatron_anchor.evaluation.checkpoints import find_checkpoints
    from megatron_anchor.evaluation.evaluate import Evaluation, evaluate
    from megatron_anchor.evaluation.haystack import default_essays, read_essays
    from megatron_anchor.evaluation.perplexity import read_texts
    from megatron_anchor.evaluation.question_files import read_questions
    from megatron_anchor.evaluation.summary import summarize

    checkpoints = find_checkpoints(args.checkpoints)
    questions = read_questions(args.qa_file) if args.qa_file else ()
    asked = Evaluation(
        output=Path(args.output_dir),
        tasks=_tasks(args),
        seq_lengths=sorted(set(args.seq_lengths)),
        num_samples=args.num_samples,
        seed=args.seed,
        batch_size=args.batch_size,
        engine=args.engine,
        placement=Placement(args.device, args.dtype, args.attn_implementation).resolved(),
        depths=[depth / 100 for depth in sorted(set(args.depths))],
        essays=read_essays(args.haystack) if args.haystack else default_essays(),
        questions=questions,
        question_sets={
            name: read_questions(path) for name in QUESTION_SETS if (path := getattr(args, name))
        },
        texts=read_texts(args.text),
        tokenizer=args.tokenizer,
        first_tokens=list(dict.fromkeys(args.first_token)),
        like=args.like,
        allow_longer=args.allow_longer,
        resume=args.resume,
        progress=not args.no_progress and not args.json,
    )
    return summarize(evaluate(asked, checkpoints))


def _tasks(args: argparse.Namespace) -> list[str]:
    from megatron_anchor.evaluation.tasks import choose_tasks

    if args.tasks == ["none"]:
        if not args.perplexity:
            raise UserError("--tasks none leaves nothing to do without --perplexity")
        return []
    # The harness downloads questions of its own.
    downloads = args.engine == "lm-eval"
    return choose_tasks(
        args.tasks,
        has_questions=bool(args.qa_file) or downloads,
        sets=[name for name in QUESTION_SETS if downloads or getattr(args, name)],
    )


def _write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    from megatron_anchor.evaluation.pictures import draw_all
    from megatron_anchor.evaluation.report import as_markdown
    from megatron_anchor.evaluation.summary import RESULTS, write_results

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder / RESULTS, results)
    told = as_markdown(results)
    with atomic_write_text(folder / TABLES) as stream:
        stream.write(told)
    say_json(results) if args.json else say_block(told)
    sys.stdout.flush()
    for path in draw_all(folder, results):
        if not args.json:
            say(path)
