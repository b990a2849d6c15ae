"""Preprocessing speed, side by side in one run on the same cores.

Three ways to tokenize the same JSON lines, each in a process of its own, in turns:

- `megatron`: the worker loop of Megatron's tools/preprocess_data.py, rebuilt from public calls: one
  `tokenizer(text).input_ids` a row through `multiprocessing.Pool.imap`, appended with
  `IndexedDatasetBuilder`;
- `ours`: `megatron_anchor.corpus.preprocess`, from the file to finished `.bin/.idx`, once for each
  engine that is installed;
- `raw`: the same engine's own batch call on the same texts held in memory, nothing read or written.

Loading of libraries and tokenizers is left out everywhere: time runs from the moment when all
workers are ready. Machines are noisy: look at the ratios of the medians.

    python benchmarks/preprocess.py --tokenizer-model my-tokenizer --input text.jsonl
    python benchmarks/preprocess.py --tokenizer-model my-tokenizer --megabytes 16
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_anchor.corpus import (  # noqa: E402
    PreprocessConfig,
    TokenizerConfig,
    load_tokenizer,
    preprocess,
)


def sample_texts(megabytes: float) -> Iterator[str]:
    """Source files of Python's library and installed packages, up to so many megabytes."""
    paths = sysconfig.get_paths()
    left = megabytes * 1e6
    for root in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            if left <= 0:
                return
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                left -= len(text)
                yield text


_TOKENIZER = None


def _start(model: str) -> None:
    global _TOKENIZER
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if Path(model).is_file():
        _TOKENIZER = PreTrainedTokenizerFast(tokenizer_file=model)
    else:
        _TOKENIZER = AutoTokenizer.from_pretrained(model)
    _TOKENIZER.model_max_length = int(1e30)


def _encode(line: str) -> tuple[list[int], list[int]]:
    ids = list(_TOKENIZER(json.loads(line)["text"]).input_ids)
    return ids, [len(ids)]


def _nothing(_: int) -> None:
    time.sleep(0.05)


def measure_megatron(source: Path, model: str, workers: int, folder: Path) -> float:
    """Seconds of Megatron's loop after its workers are ready."""
    import logging

    logging.disable(logging.WARNING)
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _start(model)
    size = len(_TOKENIZER)
    with multiprocessing.Pool(workers, initializer=_start, initargs=(model,)) as pool:
        pool.map(_nothing, range(4 * workers), chunksize=1)
        builder = IndexedDatasetBuilder(str(folder / "m.bin"), dtype=DType.optimal_dtype(size))
        began = time.perf_counter()
        with open(source, encoding="utf-8") as lines:
            for ids, lengths in pool.imap(_encode, lines, 32):
                builder.add_document(ids, lengths)
        builder.finalize(str(folder / "m.idx"))
        return time.perf_counter() - began


def measure_ours(source: Path, model: str, workers: int, folder: Path, engine: str) -> float:
    """Seconds of our run after its workers are ready, with all files in place."""
    config = PreprocessConfig(
        input=(str(source),),
        output_prefix=str(folder / "ours"),
        tokenizer=TokenizerConfig(tokenizer_model=model, engine=engine),
        workers=workers,
        progress=False,
    )
    return preprocess(config).processing_seconds


def measure_raw(source: Path, model: str, workers: int, engine: str) -> float:
    """Seconds of the engine's own batch call, all texts in one list."""
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model=model))
    recipe = tokenizer.fast if engine == "gigatoken" else tokenizer.native
    assert recipe is not None
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    library = recipe.make(threads=max(workers, 2))
    calls = {
        "tokenizers": lambda lib: lib.library.encode_batch_fast(texts, add_special_tokens=False),
        "sentencepiece": lambda lib: lib.library.encode(texts, num_threads=workers),
        "tiktoken": lambda lib: lib.library.encode_ordinary_batch(texts, num_threads=workers),
        "gigatoken": lambda lib: lib.library.encode_batch(texts, parallel=workers > 1),
    }
    began = time.perf_counter()
    calls[recipe.name](library)
    return time.perf_counter() - began


def _measure_in_new_process(what: str, args: argparse.Namespace, source: Path) -> float:
    command = [sys.executable, __file__, "--measure", what, "--input", str(source)]
    command += ["--tokenizer-model", args.tokenizer_model, "--workers", str(args.workers)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--folder", folder], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def _measure(args: argparse.Namespace) -> float:
    what, _, engine = args.measure.partition(":")
    source, folder = Path(args.input), Path(args.folder or ".")
    if what == "megatron":
        return measure_megatron(source, args.tokenizer_model, args.workers, folder)
    if what == "ours":
        return measure_ours(source, args.tokenizer_model, args.workers, folder, engine)
    return measure_raw(source, args.tokenizer_model, args.workers, engine)


def run(args: argparse.Namespace, source: Path) -> dict[str, object]:
    """All measurements in turns; medians in MB/s and the two ratios of every engine."""
    engines = ["native"]
    if importlib.util.find_spec("gigatoken"):
        engines.append("gigatoken")
    ways = ["megatron", *(f"{what}:{e}" for e in engines for what in ("raw", "ours"))]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way in ways:
            seconds[way].append(_measure_in_new_process(way, args, source))
    size = source.stat().st_size / 1e6
    speed = {way: size / statistics.median(found) for way, found in seconds.items()}
    ratios = {
        engine: {
            "ours_over_megatron": speed[f"ours:{engine}"] / speed["megatron"],
            "ours_over_raw": speed[f"ours:{engine}"] / speed[f"raw:{engine}"],
        }
        for engine in engines
    }
    return {
        "megabytes": size,
        "workers": args.workers,
        "repeats": args.repeats,
        "megabytes_a_second": speed,
        "seconds": seconds,
        "ratios": ratios,
    }


def main() -> None:
    """Parse, measure, print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--input", help="a .jsonl with a text a row (default: Python's library)")
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(_measure(args))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(args.input or f"{folder}/sample.jsonl")
        if not args.input:
            with open(source, "w", encoding="utf-8") as stream:
                for text in sample_texts(args.megabytes):
                    stream.write(json.dumps({"text": text}) + "\n")
        found = run(args, source)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['megabytes']:.1f} MB, {args.workers} cores, median of {args.repeats}")
    for way, value in found["megabytes_a_second"].items():
        print(f"  {way:<18}{value:>10.2f} MB/s")
    for engine, ratio in found["ratios"].items():
        print(
            f"  {engine}: {ratio['ours_over_megatron']:.1f} x Megatron's loop, "
            f"{ratio['ours_over_raw']:.2f} of the engine's own batch call"
        )


if __name__ == "__main__":
    main()
