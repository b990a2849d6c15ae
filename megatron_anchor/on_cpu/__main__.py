"""`python -m megatron_anchor.on_cpu`: run a program with the CPU in place of CUDA."""

import argparse
import os
import runpy
import sys

from megatron_anchor import on_cpu
from megatron_anchor.command_line import CommandParser
from megatron_anchor.terminal import escaped, say, say_block

EXAMPLE = """\
example: Megatron's own GPT program on two pretended GPUs

  torchrun --nproc-per-node 2 -m megatron_anchor.on_cpu pretrain_gpt.py \\
      --tensor-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer \\
      --vocab-size 127 --num-layers 4 --hidden-size 64 --num-attention-heads 4 \\
      --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 \\
      --global-batch-size 4 --train-iters 10 --lr 1e-3 --log-interval 1 \\
      --eval-iters 0 --eval-interval 100 \\
      --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion

The last line's options are needed wherever Transformer Engine and Apex are not installed.
A run shows that the program's logic holds; nothing about kernels, NCCL, memory or speed.
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m megatron_anchor.on_cpu",
        description="Run a Megatron program without a GPU: CUDA means the CPU, NCCL means gloo.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show what is replaced, and why")
    parser.add_argument("--force", action="store_true", help="also where CUDA works")
    parser.add_argument(
        "-m", "--module", action="store_true", help="the program is a module, not a file"
    )
    parser.add_argument("program", nargs="?", help="script to run, or module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the program's own arguments")
    return parser


def _run(program: str, *, is_module: bool, arguments: list[str]) -> None:
    """Run the program as `__main__` with its own `sys.argv` and `sys.path`."""
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def _announce() -> None:
    from megatron_anchor.on_cpu.rows import ROWS

    say(
        f"on_cpu: CUDA means the CPU and NCCL means gloo: {len(ROWS)} replacements "
        "(python -m megatron_anchor.on_cpu --list).",
        "on_cpu: this run shows nothing about kernels, NCCL, memory or speed.",
        file=sys.stderr,
    )


def main() -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args()
    if options.list:
        from megatron_anchor.on_cpu.listing import as_text

        say_block(as_text())
        return
    if options.program is None:
        parser.error("no program given")
    if not options.module and not os.path.isfile(options.program):
        parser.error(f"no such script: {options.program!r}; give a path, or -m and a module")
    try:
        on_cpu.enable(force=options.force)
    except RuntimeError as error:
        parser.error(escaped(error))
    if os.environ.get("RANK", "0") == "0":
        _announce()
    _run(options.program, is_module=options.module, arguments=options.args)


if __name__ == "__main__":
    main()
