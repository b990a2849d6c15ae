"""What bfloat16, masks and the anchor's place each do: one small model, trained in eight ways.

A Llama-shaped model learns packed real text and a retrieval task (task.py) through Megatron's own
loop on this machine's CPU, in arms that differ in one thing, with the same documents and seeds:

    python examples/precision_control/run.py [--output precision_control_output]

Finished runs are kept and not run again, so it may be stopped and started at any time. At the end
there are results.md (a table), results.json and results.png.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu_demo"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import Run, write_report
from training_log import follow

from megatron_anchor.whole_files import atomic_write_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

ANCHOR_POSITION = 8192
PATTERN = "--attention-pattern"
ARMS: dict[str, list[str]] = {
    "full, bf16": [PATTERN, "full", "--bf16"],
    "full, float32": [PATTERN, "full"],
    "full, bf16, attention float32": [PATTERN, "full", "--bf16", "--attention-precision", "fp32"],
    "intra-document": [PATTERN, "intra-document", "--bf16"],
    "intra-document-reset": [PATTERN, "intra-document-reset", "--bf16"],
    "anchor": [PATTERN, "anchor", "--bf16"],
    f"anchor at {ANCHOR_POSITION}": [
        *(PATTERN, "anchor", "--bf16"),
        *("--anchor-position", str(ANCHOR_POSITION)),
    ],
    "anchor-masked": [PATTERN, "anchor-masked", "--bf16"],
}
"""Arm to the flags in which it differs from the others."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the experiment."""

    iterations: int = 400
    documents: int = 12000
    """Of the training corpus."""
    score_documents: int = 32
    """Held-out documents of every length and kind."""


QUICK = Settings(iterations=8, documents=400, score_documents=2)


def main() -> None:
    """Make the corpus, train what is missing, and report."""
    args = parser().parse_args()
    output, settings = args.output.resolve(), QUICK if args.quick else Settings()
    arms = {name: ARMS[name] for name in args.arms or ARMS}
    runs = [(name, seed) for seed in range(1, args.seeds + 1) for name in arms]
    started = time.time()
    keep_settings(output, settings)
    if not (output / "held_out.npz").exists():
        print("corpus: real text with facts and questions, and a tokenizer for it")
        from corpus import make_corpus

        make_corpus(output, documents=settings.documents)
    for number, (name, seed) in enumerate(runs, 1):
        if result_file(output, name, seed).exists():
            print(f"{number}/{len(runs)} {name}, seed {seed}: done before")
            continue
        print(f"{number}/{len(runs)} {name}, seed {seed}")
        train(output, name, seed, settings)
    found = [read_run(output, name, seed) for name, seed in runs]
    print("\n" + write_report(output, found))
    print(f"\nThis took {time.time() - started:.0f} s. All of it is in {output}")


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "precision_control_output")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds 1 to N; default: 3")
    add("--arms", nargs="+", choices=list(ARMS), metavar="ARM", help=f"of: {'; '.join(ARMS)}")
    add("--quick", action="store_true", help="a few steps, to try the program; learns nothing")
    return parser


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 1 or more")
    return int(text)


def keep_settings(output: Path, settings: Settings) -> None:
    """Write the settings into a new folder; refuse one that holds something else."""
    path, text = output / "settings.json", json.dumps(asdict(settings)) + "\n"
    if path.exists() and path.read_text() != text:
        raise SystemExit(
            f"{output} holds results of other settings, {path.read_text().strip()}; name another "
            "--output"
        )
    if output.exists() and not path.exists() and any(output.iterdir()):
        raise SystemExit(f"{output} holds something else; name another --output")
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def result_file(output: Path, name: str, seed: int) -> Path:
    """Where a finished run's scores are."""
    return output / "runs" / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}.json"


def train(output: Path, name: str, seed: int, settings: Settings) -> None:
    """Train one arm from one seed in one process; its scores appear when it is done."""
    result = result_file(output, name, seed)
    result.parent.mkdir(parents=True, exist_ok=True)
    log, scores = result.with_suffix(".log"), result.with_suffix(".scores.json")
    log.unlink(missing_ok=True)
    command = [*("env", *one_process()), sys.executable, "-m", "megatron_anchor.on_cpu"]
    command += [str(HERE / "train.py"), *flags(output, settings), *ARMS[name], "--seed", str(seed)]
    command += ["--score-file", str(scores)]
    steps = follow(command, log=log, iterations=settings.iterations, starting="starting")
    last = steps[-1]
    figures = {"steps": [[step.iteration, step.loss] for step in steps]}
    figures |= {"attention_work": last.attention_work, "seconds": last.seconds}
    with atomic_write_text(result) as stream:
        stream.write(json.dumps(figures | json.loads(scores.read_text())) + "\n")
    scores.unlink()


def one_process() -> list[str]:
    """The environment of a single rank, as torchrun would set it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    values |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return [f"{name}={value}" for name, value in values.items()] + [
        "MASTER_ADDR=127.0.0.1",
        f"PYTHONPATH={path}",
    ]


def flags(output: Path, settings: Settings) -> list[str]:
    """What all arms share."""
    text = f"""
        --num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 2
        --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --init-method-std 0.05
        --position-embedding-type rope --rotary-base 10000
        --seq-length 192 --max-position-embeddings 192 --packing best-fit
        --micro-batch-size 6 --global-batch-size 6 --train-iters {settings.iterations}
        --lr 8e-3 --min-lr 8e-4 --lr-decay-style cosine --lr-warmup-iters 5
        --adam-beta2 0.98 --weight-decay 0.01 --clip-grad 1.0
        --attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss
        --tokenizer-type HuggingFaceTokenizer --split 97,3,0 --num-workers 0
        --log-interval {max(1, settings.iterations // 30)}
        --eval-interval 1000000 --eval-iters 1 --no-one-logger
        --transformer-impl local --distributed-backend gloo
        --score-documents {settings.score_documents}
    """
    folders = ["--tokenizer-model", output / "tokenizer", "--data-path", output / "corpus"]
    folders += ["--data-cache-path", output / "cache", "--precision-control", output]
    return text.split() + [str(word) for word in folders]


def read_run(output: Path, name: str, seed: int) -> Run:
    """A finished run."""
    return Run(arm=name, seed=seed, scores=json.loads(result_file(output, name, seed).read_text()))


if __name__ == "__main__":
    main()
