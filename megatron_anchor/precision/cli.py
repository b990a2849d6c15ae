"""The command line of `tools/measure_rope_drift.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_anchor.command_line import make_parser
from megatron_anchor.terminal import say, say_block, say_json

if TYPE_CHECKING:
    from megatron_anchor.precision.run import Results
    from megatron_anchor.precision.settings import Settings

QUICK = {
    "num_texts": 1,
    "length": 256,
    "shifts": (0, 64, 500, 2000),
    "lengths": (64, 128, 256),
}

_ARMS = (  # named here, since their table imports torch, which --help need not wait for
    "all of bf16, bf16-rotate-float32, bf16-fused, bf16-attend-float32, random-bf16, float32, "
    "float32-angles64 (docs/precision.md)"
)

_EXAMPLE = """\
  python tools/measure_rope_drift.py --hf models/Llama-2-7b --out drift/llama --device cuda
  python tools/measure_rope_drift.py --megatron run --like models/Llama-2-7b --quick \\
      --arms bf16 bf16-rotate-float32 float32 --texts books.jsonl"""


def parser() -> argparse.ArgumentParser:
    """All flags; without any, the paper's measurement."""
    parser = make_parser(
        "Measure how far attention moves when all positions are shifted: 0 in exact arithmetic "
        "(arXiv 2411.13476, equations 4 and 5; docs/precision.md).",
        _EXAMPLE,
    )
    model = parser.add_argument_group("model")
    one = model.add_mutually_exclusive_group(required=True)
    one.add_argument("--hf", metavar="DIR", help="Hugging Face model folder")
    one.add_argument("--megatron", metavar="DIR", help="torch_dist checkpoint")
    model.add_argument("--iteration", type=int, metavar="N", help="of --megatron; default: latest")
    model.add_argument("--like", metavar="DIR", help="of --megatron: folder it was made from")
    model.add_argument("--device", help="default: cpu; or cuda")
    texts = parser.add_argument_group("texts").add_argument
    texts("--texts", nargs="+", metavar="FILE", help="default: Python's reference and library")
    texts("--json-key", default="text", metavar="KEY", help="of the texts (default: %(default)s)")
    texts("--tokenizer", metavar="DIR", help="default: the model's")
    texts("--num-texts", type=int, metavar="N", help="default: 50")
    texts("--add-bos", action="store_true", help="put the tokenizer's bos first")
    what = parser.add_argument_group("measurement").add_argument
    what("--arms", nargs="+", metavar="ARM", help=f"default: {_ARMS}")
    what("--states", nargs="+", metavar="KIND", help="end-to-end (the paper's), shared, or both")
    what("--length", type=int, metavar="N", help="tokens of a text for D (default: 4096)")
    what("--shift2", type=int, metavar="N", help="reference shift (default: 16)")
    what("--shifts", type=int, nargs="+", metavar="N", help="shift1 (default: 0 ... 2000)")
    what("--lengths", type=int, nargs="+", metavar="N", help="for D_logit (default: 64 ... 8192)")
    what("--num-long-texts", type=int, metavar="N", help="for lengths above --length")
    what("--reach", type=int, metavar="N", help="for the first token (default: 131072)")
    what("--seed", type=int, metavar="N", help="of random weights and sampled rows (default: 0)")
    what("--quick", action="store_true", help="one text of 256 tokens and few shifts, as defaults")
    output = parser.add_argument_group("output").add_argument
    output("--name", help="of the model in titles; default: its folder's")
    output(
        "--out",
        metavar="PREFIX",
        help="write PREFIX.json, .csv, .md, .png, -frequencies.png and -heads.png",
    )
    output("--json", action="store_true", help="print JSON instead of the findings")
    output("--no-progress", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    return _run(parser().parse_args(argv))


def settings_of(args: argparse.Namespace) -> Settings:
    """The measurement that the flags ask for.

    Raises:
        UserError: for values out of range and unknown names.
    """
    from megatron_anchor.precision.settings import Settings

    values: dict = dict(QUICK) if args.quick else {}
    for field in fields(Settings):
        given = getattr(args, field.name)
        if given is not None and given is not False:
            values[field.name] = tuple(given) if isinstance(given, list) else given
    return Settings(**values)


def _run(args: argparse.Namespace) -> int:
    from megatron_anchor.errors import UserError
    from megatron_anchor.precision.files import as_json, check_writable
    from megatron_anchor.precision.findings import findings
    from megatron_anchor.precision.models import (
        check_device,
        check_weights,
        hugging_face_folder,
        open_folder,
    )
    from megatron_anchor.precision.pictures import require_matplotlib
    from megatron_anchor.precision.run import run
    from megatron_anchor.precision.texts import (
        choose_texts,
        default_texts,
        open_tokenizer,
        texts_of_files,
    )

    settings = settings_of(args)
    check_device(settings.device)
    if args.megatron is None and (args.like or args.iteration is not None):
        raise UserError("--like and --iteration belong to --megatron, which is not given")
    if args.out:
        check_writable(args.out)
        require_matplotlib()
    progress = not (args.no_progress or args.json)
    given = args.hf or args.megatron
    with hugging_face_folder(
        hugging_face=args.hf,
        megatron=args.megatron,
        iteration=args.iteration,
        like=args.like,
        progress=progress,
    ) as folder:
        source = open_folder(folder)
        check_weights(source)
        texts = choose_texts(
            texts_of_files(args.texts, key=args.json_key) if args.texts else default_texts(),
            open_tokenizer(args.tokenizer or folder),
            length=settings.tokens,
            count=max(settings.num_texts, settings.num_long_texts or 0),
            add_bos=settings.add_bos,
            vocabulary=source.model.vocabulary,
        )
        _note_untrained(settings, trained=source.model.positions)
        name = args.name or Path(given).resolve().name
        results = run(source, texts, settings, name=name, progress=progress)
    if args.out:
        _write(args.out, results)
    say_json(as_json(results)) if args.json else say_block(findings(results))
    return 0


def _note_untrained(settings: Settings, *, trained: int) -> None:
    last = settings.tokens + max(*settings.shifts, settings.shift2)
    if last > trained:
        say(
            f"note: positions up to {last}, but the model was trained for {trained}; differences "
            "are measured all the same",
            file=sys.stderr,
        )


def _write(prefix: str, results: Results) -> None:
    from megatron_anchor.precision import files, pictures
    from megatron_anchor.precision.findings import findings

    files.write_json(Path(f"{prefix}.json"), results)
    files.write_csv(Path(f"{prefix}.csv"), results)
    files.write_text(Path(f"{prefix}.md"), findings(results) + "\n")
    pictures.draw_drift(Path(f"{prefix}.png"), results)
    pictures.draw_frequencies(Path(f"{prefix}-frequencies.png"), results)
    pictures.draw_heads(Path(f"{prefix}-heads.png"), results)
