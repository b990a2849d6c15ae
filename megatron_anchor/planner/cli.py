"""The command line of `tools/plan_training.py`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from megatron_anchor.command_line import CommandParser
from megatron_anchor.errors import UserError
from megatron_anchor.packing.patterns import attention_pattern, planned_patterns
from megatron_anchor.planner.gpus import GPUS, Gpu, find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import TABLES, find_lengths
from megatron_anchor.planner.models import MODELS, find_model
from megatron_anchor.planner.pictures import draw_plan
from megatron_anchor.planner.plan import Question, automatic, make_plan
from megatron_anchor.planner.report import as_json, as_text
from megatron_anchor.planner.step_time import Efficiency
from megatron_anchor.terminal import say_block, say_json

_EPILOG = f"""\
models: {", ".join(MODELS)}
GPUs: {", ".join(gpu.name for gpu in GPUS.values())}

example, the paper's setting (Llama-2-7B at 64K on 8 A100-80GB):
  python tools/plan_training.py --model llama-2-7b --gpu A100-80GB --gpus 8 \\
      --seq-length 64K --global-batch-size 8 --png plan.png
with your own model and corpus, and the layout that you have in mind:
  python tools/plan_training.py --model models/Llama-3-8b --corpus corpus/mine_text_document \\
      --gpu H100 --gpus 64 --seq-length 128K --global-batch-size 32 --tp 2 --cp 8"""


def parser() -> argparse.ArgumentParser:
    """All flags; those of training have the same names and meanings."""
    parser = CommandParser(
        description="Plan a run: work, memory, communication, layouts, days, launch command.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a name of the table below, or a folder with config.json")
    add("--seq-length", type=length, required=True, help="slots of a sample: 65536, 64K, 1M")
    add("--gpus", type=int, default=8, help="all GPUs (default 8)")
    add("--gpu", default="A100-80GB", help="kind (default A100-80GB)")
    add(
        "--global-batch-size",
        type=int,
        help="samples of a step (default: the paper's 8; with more than 64 GPUs one per server of "
        "8, so that data-parallel ranks have samples)",
    )
    add("--attention-pattern", choices=planned_patterns(), default="anchor")
    add("--train-tokens", type=float, default=1e9, help="for --train-iters (default 1e9)")
    lengths = parser.add_argument_group("documents").add_argument
    lengths("--corpus", metavar="PREFIX", help="take the lengths of this .bin/.idx corpus")
    lengths("--length-table", default=TABLES[0], help=f"else: {' or '.join(TABLES)}")
    sizes = parser.add_argument_group("one layout instead of all").add_argument
    sizes("--tp", "--tensor-model-parallel-size", type=int)
    sizes("--pp", "--pipeline-model-parallel-size", type=int)
    sizes("--cp", "--context-parallel-size", type=int)
    sizes("--ep", "--expert-model-parallel-size", type=int)
    sizes(
        "--cp-comm-type",
        choices=("auto", "a2a", "gather", "a2a+gather", "p2p"),
        default="auto",
        help="a2a: Ulysses; gather: keys and values; a2a+gather: both; p2p: Transformer Engine; "
        "auto (the default): Ulysses as far as heads and servers allow, else a2a+gather or gather",
    )
    sizes(
        "--hierarchical-context-parallel-sizes",
        type=int,
        nargs=2,
        metavar=("A", "B"),
        help="sizes of a2a+gather: Ulysses among A ranks, gathered across B groups",
    )
    machine = parser.add_argument_group("instead of what is known or assumed").add_argument
    machine("--peak-tflops", type=float, help="dense bfloat16")
    machine("--memory-gib", type=float)
    machine("--nvlink-gbs", type=float, help="GB/s of a GPU inside a server, one direction")
    machine("--network-gbs", type=float, help="GB/s of a GPU between servers, one direction")
    machine("--gpus-per-node", type=int)
    machine("--linear-efficiency", type=float, help="share of the peak in matrix products")
    machine("--experts-efficiency", type=float, help="the same in routed experts")
    machine("--attention-efficiency", type=float, help="share of the peak in attention")
    machine("--link-efficiency", type=float, help="share of the bandwidths")
    output = parser.add_argument_group("output").add_argument
    output("--top", type=int, default=8, help="layouts and refusals shown (default 8)")
    output("--json", action="store_true", help="print JSON, with every layout and refusal")
    output("--png", metavar="FILE", help="draw days against sequence length, full and the pattern")
    return parser


LENGTH_UNITS = {"K": 1 << 10, "M": 1 << 20}


def length(text: str) -> int:
    """Read a number of slots, in powers of two where it has a unit: 64K is 65536.

    Raises:
        ArgumentTypeError: for anything else.
    """
    unit = LENGTH_UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        return int(digits) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length; give slots such as 65536, 64K or 1M"
        ) from None


def default_batch(gpus: int, per_node: int) -> int:
    """Samples of a step: 8 as in the paper, at least one per server, shared by all ranks evenly.

    A power of two times the odd part of the number of GPUs, so that every data-parallel size that
    is left by powers of two divides it up to its size.
    """
    odd = gpus // (gpus & -gpus)
    batch, least = odd, max(8, gpus // per_node)
    while batch < least:
        batch *= 2
    return batch


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, print; it is an error if nothing fits."""
    args = parser().parse_args(argv)
    question = question_of(args)
    plan = make_plan(question, only=_layout(args, question))
    if args.json:
        say_json(as_json(plan, tokens=args.train_tokens))
        if not plan.choices:
            raise UserError(plan.why_nothing())
    else:
        say_block(as_text(plan, tokens=args.train_tokens, most=args.top))
    if args.png:
        draw_plan(args.png, plan.question)
    return 0


def question_of(args: argparse.Namespace) -> Question:
    """What the flags ask.

    Raises:
        UserError: for values that nothing is known about, or out of range.
    """
    for flag in ("train_tokens", "top"):
        _check_positive(f"--{flag.replace('_', '-')}", getattr(args, flag))
    gpu = _gpu(args)
    name, shape = find_model(args.model)
    if shape.predicted and not attention_pattern(args.attention_pattern).has_whole_documents:
        raise UserError(
            f"--attention-pattern {args.attention_pattern}: {name} has multi-token prediction, "
            "which needs documents that are kept apart and whole; use anchor or intra-document"
        )
    batch = args.global_batch_size
    if batch is None:
        batch = default_batch(max(1, args.gpus), gpu.per_node)
    return Question(
        name=name,
        shape=shape,
        lengths=find_lengths(corpus=args.corpus, table=args.length_table),
        gpu=gpu,
        gpus=args.gpus,
        sequence_length=args.seq_length,
        global_batch=batch,
        pattern=args.attention_pattern,
        efficiency=_efficiency(args, gpu),
    )


def _check_positive(flag: str, value: float) -> None:
    if not 0 < value < math.inf:  # nan is neither
        more = "more than 0" if value <= 0 else "a finite number"
        raise UserError(f"{flag} {value:g}: expected {more}")


def _gpu(args: argparse.Namespace) -> Gpu:
    given = {
        "tflops": ("--peak-tflops", args.peak_tflops),
        "memory_gib": ("--memory-gib", args.memory_gib),
        "nvlink": ("--nvlink-gbs", args.nvlink_gbs),
        "network": ("--network-gbs", args.network_gbs),
        "per_node": ("--gpus-per-node", args.gpus_per_node),
    }
    for flag, value in given.values():
        if value is not None:
            _check_positive(flag, value)
    changed = {field: value for field, (_, value) in given.items() if value is not None}
    return dataclasses.replace(find_gpu(args.gpu), **changed)


def _efficiency(args: argparse.Namespace, gpu: Gpu) -> Efficiency:
    given = {
        field: getattr(args, f"{field}_efficiency")
        for field in ("linear", "experts", "attention", "link")
    }
    for field, value in given.items():
        if value is not None and not 0 < value <= 1:
            raise UserError(
                f"--{field}-efficiency {value:g}: expected a share, above 0 and up to 1"
            )
    changed = {field: value for field, value in given.items() if value is not None}
    return dataclasses.replace(Efficiency.of(gpu), **changed)


def _layout(args: argparse.Namespace, question: Question) -> Layout | None:
    """The layout asked for; what is not given is 1."""
    sizes = args.hierarchical_context_parallel_sizes
    given = (args.tp, args.pp, args.cp, args.ep, sizes)
    if not any(value is not None for value in given) and args.cp_comm_type == "auto":
        return None
    for name in ("tp", "pp", "cp", "ep"):
        if (size := getattr(args, name)) is not None and size < 1:
            raise UserError(f"--{name} {size}: expected 1 or more")
    tp, pp, cp = args.tp or 1, args.pp or 1, args.cp or 1
    if args.gpus < 1 or args.gpus % (tp * pp * cp):
        raise UserError(
            f"--gpus {args.gpus} is no multiple of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}; "
            "change one of them"
        )
    kind = args.cp_comm_type
    dp = args.gpus // (tp * pp * cp)
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=args.ep or 1, cp_comm=kind)
    if sizes is not None:
        if kind not in ("auto", "a2a+gather") or sizes[0] * sizes[1] != cp or min(sizes) < 1:
            raise UserError(
                f"--hierarchical-context-parallel-sizes {sizes[0]} {sizes[1]}: expected A x B = "
                f"--context-parallel-size {cp}, with --cp-comm-type a2a+gather"
            )
        return dataclasses.replace(layout, cp_comm="a2a+gather", cp_heads=sizes[0])
    if kind in ("auto", "a2a+gather"):
        return automatic(layout, question.shape, question.gpu)
    return layout
