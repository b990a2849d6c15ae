"""Train a small model on real text under `anchor` and `full`, on this machine's CPU.

Every step is a command that a real run has too: documents -> tokenizer -> .bin/.idx corpora ->
training with 4 processes (tensor x pipeline parallel), stopped and resumed once at another layout
(tensor x context parallel) -> a table and a plot of loss against wall time.

    make demo        or        python examples/cpu_demo/run.py [--output demo_output]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from documents import write_documents

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARK = ".megatron_anchor_demo"
VOCAB, ITERATIONS, STOP_AT = 4096, 10, 6
TP_PP = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
TP_CP = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]

LOG_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+)"
    r".*lm loss: (?P<loss>\S+).*\| documents per sample: (?P<documents>\S+)"
    r".*attention work: (?P<work>\S+)"
)

ERROR_LINE = re.compile(r"(\[rank\d\]: )?\w*(Error|error)(: |$)")


@dataclass(frozen=True)
class Step:
    """One line of Megatron's log."""

    iteration: int
    seconds: float
    loss: float
    documents: float
    attention_work: float


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
    train_tokenizer(demo / "tokenizer", [path for path, _ in texts.values()])
    print("3/5 corpora: tools/preprocess_data.py")
    for domain, (path, _) in texts.items():
        run_tool(
            "preprocess_data.py",
            *("--input", path, "--domain", domain, "--append-eod"),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", demo / "tokenizer"),
            *("--output-prefix", demo / "corpus" / domain, "--workers", 1),
        )


def train_tokenizer(folder: Path, files: list[Path]) -> None:
    """Train on every 8th document and save in Hugging Face's form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def every_eighth() -> Iterator[str]:
        for path in files:
            with path.open(encoding="utf-8") as rows:
                yield from (json.loads(row)["text"] for n, row in enumerate(rows) if n % 8 == 0)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(every_eighth(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def run_tool(name: str, *arguments: object) -> None:
    """Run one of the project's tools and stop the demo when it fails."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    if subprocess.run(command).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def train(demo: Path, pattern: str, *flags: str) -> list[Step]:
    """Run train.sh with a progress bar; the complete log goes to a file.

    Returns:
        The iterations of this run.
    """
    print(f"{'4/5' if pattern == 'anchor' else '5/5'} train: --attention-pattern {pattern}")
    command = ["bash", str(HERE / "train.sh"), str(demo), pattern, *flags]
    log, errors, steps = demo / f"{pattern}.log", list[str](), list[Step]()
    environment = {**os.environ, "PYTHON": sys.executable}
    with (
        log.open("a") as out,
        tqdm(total=ITERATIONS, unit="step", desc="    starting 4 processes") as bar,
        subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if ERROR_LINE.match(line) and line not in errors:
                errors.append(line)
            if step := parse(line):
                steps.append(step)
                bar.update(step.iteration - bar.n)
                bar.set_description(f"    loss {step.loss:.3f}")
    if process.returncode:
        raise SystemExit(f"training failed, see {log}:\n{''.join(errors)}")
    return undo_mean(steps)


def undo_mean(steps: list[Step]) -> list[Step]:
    """Take the first line out of the second, which Megatron prints as the mean of both."""
    if len(steps) < 2:
        return steps
    first, mean = (astuple(step)[1:] for step in steps[:2])
    second = Step(steps[1].iteration, *(2 * m - f for f, m in zip(first, mean, strict=True)))
    return [steps[0], second, *steps[2:]]


def parse(line: str) -> Step | None:
    """Read one iteration from a line of Megatron's log."""
    found = LOG_LINE.search(line)
    if found is None:
        return None
    return Step(
        iteration=int(found["iteration"]),
        seconds=float(found["ms"]) / 1e3,
        loss=float(found["loss"]),
        documents=float(found["documents"]),
        attention_work=float(found["work"]),
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
