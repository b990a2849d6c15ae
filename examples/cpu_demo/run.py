"""Train a small model on real text under `anchor` and `full`, on this machine's CPU.

Every step is a command that a real run has too: documents -> tokenizer -> .bin/.idx corpora ->
training with 4 processes (tensor x pipeline parallel), stopped and resumed once at another layout
(tensor x context parallel) -> a table and a plot of loss against wall time.

    make demo        or        python examples/cpu_demo/run.py [--output demo_output]
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from byte_pairs import train_tokenizer
from documents import write_documents
from training_log import Step, follow

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARK = ".megatron_anchor_demo"
VOCAB, ITERATIONS, STOP_AT = 4096, 10, 6
TP_PP = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
TP_CP = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]


def main() -> None:
    """Run the demo from documents to picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "demo_output")
    demo = parser.parse_args().output.resolve()
    started = time.time()
    make_empty(demo)
    make_corpora(demo)
    keep = ["--save", str(demo / "checkpoints"), "--save-interval", str(ITERATIONS)]
    anchor = train(demo, "anchor", *TP_PP, *keep, "--exit-interval", str(STOP_AT))
    print(f"    resume from iteration {STOP_AT}, now tensor 2 x context 2 parallel")
    resumed = train(demo, "anchor", *TP_CP, *keep, "--load", str(demo / "checkpoints"))
    full = train(demo, "full", *TP_PP)
    if [step.iteration for step in anchor + resumed] != list(range(1, ITERATIONS + 1)):
        raise SystemExit("the resumed run did not go on where the first one stopped")
    report(demo, {"anchor": anchor + resumed, "full": full})
    print(f"\nThe demo took {time.time() - started:.0f} s. All it wrote is in {demo}")


def make_empty(demo: Path) -> None:
    """Begin with an empty folder; remove an earlier demo's, and nothing else."""
    if demo.exists() and any(demo.iterdir()) and not (demo / MARK).exists():
        raise SystemExit(f"{demo} holds something else than an earlier demo; name another --output")
    shutil.rmtree(demo, ignore_errors=True)
    demo.mkdir(parents=True)
    (demo / MARK).touch()


def make_corpora(demo: Path) -> None:
    """Collect documents, train a byte-level BPE tokenizer on them, write .bin/.idx corpora."""
    print("1/5 documents: sources, docstrings and language reference of what is installed here")
    texts = write_documents(demo / "text")
    for domain, (path, count) in texts.items():
        print(f"    {domain}: {count:,} documents, {path.stat().st_size / 1e6:.1f} MB")
    print(f"2/5 tokenizer: byte-level BPE, {VOCAB} tokens")
    files = [path for path, _ in texts.values()]
    train_tokenizer(demo / "tokenizer", files, vocab_size=VOCAB)
    print("3/5 corpora: tools/preprocess_data.py")
    for domain, (path, _) in texts.items():
        run_tool(
            "preprocess_data.py",
            *("--input", path, "--domain", domain, "--append-eod"),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", demo / "tokenizer"),
            *("--output-prefix", demo / "corpus" / domain, "--workers", 1),
        )


def run_tool(name: str, *arguments: object) -> None:
    """Run one of the project's tools and stop the demo when it fails."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    if subprocess.run(command).returncode:
        raise SystemExit(f"failed: {shlex.join(command)}")


def train(demo: Path, pattern: str, *flags: str) -> list[Step]:
    """Run train.sh with a progress bar; the complete log goes to a file.

    Returns:
        The iterations of this run.
    """
    print(f"{'4/5' if pattern == 'anchor' else '5/5'} train: --attention-pattern {pattern}")
    return follow(
        ["bash", str(HERE / "train.sh"), str(demo), pattern, *flags],
        log=demo / f"{pattern}.log",
        iterations=ITERATIONS,
        starting="starting 4 processes",
    )


def report(demo: Path, runs: dict[str, list[Step]]) -> None:
    """Print the table, write it as JSON, and draw loss against wall time."""
    header = ("pattern", "loss", "last loss", "s/step", "docs/sample", "attention work")
    print("\n" + " | ".join(f"{cell:>14}" for cell in header))
    rows = {}
    for pattern, steps in runs.items():
        alike = [s for s in steps if 1 < s.iteration <= STOP_AT]  # same layout, warmed up
        rows[pattern] = {
            "first_loss": steps[0].loss,
            "last_loss": steps[-1].loss,
            "seconds_per_step": statistics.median(s.seconds for s in alike),
            "documents_per_sample": statistics.mean(s.documents for s in steps),
            "attention_work": statistics.mean(s.attention_work for s in steps),
        }
        first, last, seconds, documents, work = rows[pattern].values()
        cells = (f"{first:.3f}", f"{last:.3f}", f"{seconds:.2f}", f"{documents:.1f}", f"{work:.1%}")
        print(" | ".join(f"{cell:>14}" for cell in (pattern, *cells)))
    ratio = rows["full"]["seconds_per_step"] / rows["anchor"]["seconds_per_step"]
    print(f"\nA step of full attention takes {ratio:.2f} times a step of anchor attention.")
    (demo / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(demo / "loss.png", runs)
    print(f"Loss against wall time: {demo / 'loss.png'}")


def draw(path: Path, runs: dict[str, list[Step]]) -> None:
    """Plot the loss curves against the time spent in training steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=125)
    for pattern, steps in runs.items():
        elapsed = [sum(s.seconds for s in steps[: n + 1]) for n in range(len(steps))]
        label = f"{pattern} ({elapsed[-1]:.0f} s for {len(steps)} steps)"
        axes.plot(elapsed, [s.loss for s in steps], marker=".", label=label)
    axes.set_xlabel("time in training steps (s)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("The same samples, the same number of steps, 4 processes on a CPU")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
