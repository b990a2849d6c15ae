"""Preprocessing speed, side by side in one run on the same cores.

Three ways to tokenize the same JSON lines, each in a process of its own, in turns:

- `megatron`: the worker loop of Megatron's tools/preprocess_data.py, rebuilt from public calls: one
  `tokenizer(text).input_ids` a row through `multiprocessing.Pool.imap`, appended with
  `IndexedDatasetBuilder`;
- `ours`: `megatron_anchor.corpus.preprocess`, from the file to finished `.bin/.idx`, once for each
  engine that is installed;
- `raw`: the same engine's own batch call on the same texts held in memory, nothing read or written.

Loading of libraries and tokenizers is left out everywhere: time runs from the moment when all
workers are ready. Machines are noisy: look at the ratios of the medians. Where other programs share
the cores, the processor time of all processes together (`core seconds`) tells more.

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
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from side_by_side import Comparison, Figure, Findings, at_least_one, duration  # noqa: E402

from megatron_anchor.corpus import (  # noqa: E402
    PreprocessConfig,
    TokenizerConfig,
    load_tokenizer,
    preprocess,
)

Times = tuple[float, float]
"""Seconds by the clock, and core seconds of all processes."""

PEERS = {
    "megatron": "Megatron's worker loop",
    "raw": "the engine's own batch call in memory",
    "ours": "ours",
}


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
        _TOKENIZER = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    _TOKENIZER.model_max_length = int(1e30)


def _encode(line: str) -> tuple[list[int], list[int]]:
    ids = list(_TOKENIZER(json.loads(line)["text"]).input_ids)
    return ids, [len(ids)]


def _worker_times(_: int) -> tuple[int, float]:
    time.sleep(0.05)  # so that every worker gets one of these calls
    return os.getpid(), time.process_time()


def _core_seconds() -> float:
    """Processor time of this process and of all its children, ended or not."""
    running = (child.cpu_times() for child in psutil.Process().children())
    return sum(os.times()[:4]) + sum(times.user + times.system for times in running)


def measure_megatron(source: Path, model: str, workers: int, folder: Path) -> tuple[float, float]:
    """Seconds and core seconds of Megatron's loop after its workers are ready."""
    import logging

    logging.disable(logging.WARNING)
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _start(model)
    size = len(_TOKENIZER)
    with multiprocessing.Pool(workers, initializer=_start, initargs=(model,)) as pool:
        started = dict(pool.map(_worker_times, range(4 * workers), chunksize=1))
        builder = IndexedDatasetBuilder(str(folder / "m.bin"), dtype=DType.optimal_dtype(size))
        began, own = time.perf_counter(), time.process_time()
        with open(source, encoding="utf-8") as lines:
            for ids, lengths in pool.imap(_encode, lines, 32):
                builder.add_document(ids, lengths)
        builder.finalize(str(folder / "m.idx"))
        seconds, cores = time.perf_counter() - began, time.process_time() - own
        ended = dict(pool.map(_worker_times, range(4 * workers), chunksize=1))
        return seconds, cores + sum(ended[pid] - started.get(pid, 0) for pid in ended)


def measure_ours(
    source: Path, model: str, workers: int, folder: Path, engine: str
) -> tuple[float, float]:
    """Seconds and core seconds of our run after its workers are ready, all files in place.

    Counters are read when the pool of workers is ready and when all of it has ended; they only
    grow, so however short the input is, neither difference is negative.
    """
    started: list[float] = []
    module = sys.modules[preprocess.__module__]
    make_pool = module.make_pool

    def marked(*args: Any, **settings: Any) -> Any:
        pool = make_pool(*args, **settings)
        started.append(_core_seconds())
        return pool

    module.make_pool = marked
    config = PreprocessConfig(
        input=(str(source),),
        output_prefix=str(folder / "ours"),
        tokenizer=TokenizerConfig(tokenizer_model=model, engine=engine),
        workers=workers,
        progress=False,
    )
    seconds = preprocess(config).processing_seconds
    return seconds, _core_seconds() - started[0]


def measure_raw(source: Path, model: str, workers: int, engine: str) -> tuple[float, float]:
    """Seconds and core seconds of the engine's own batch call, all texts in one list."""
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
    began, own = time.perf_counter(), time.process_time()
    calls[recipe.name](library)
    return time.perf_counter() - began, time.process_time() - own


def _measure_in_new_process(
    what: str, args: argparse.Namespace, source: Path
) -> tuple[float, float]:
    command = [sys.executable, __file__, "--measure", what, "--input", str(source)]
    command += ["--tokenizer-model", args.tokenizer_model, "--workers", str(args.workers)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--folder", folder], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr}")
    seconds, cores = json.loads(done.stdout.splitlines()[-1])
    return seconds, cores


def _measure(args: argparse.Namespace) -> tuple[float, float]:
    what, _, engine = args.measure.partition(":")
    source, folder = Path(args.input), Path(args.folder or ".")
    if what == "megatron":
        return measure_megatron(source, args.tokenizer_model, args.workers, folder)
    if what == "ours":
        return measure_ours(source, args.tokenizer_model, args.workers, folder, engine)
    return measure_raw(source, args.tokenizer_model, args.workers, engine)


def run(args: argparse.Namespace, source: Path) -> Findings:
    """All measurements in turns; each engine against Megatron's loop and its own batch call."""
    engines = ["native"]
    if importlib.util.find_spec("gigatoken"):
        engines.append("gigatoken")
    ways = ["megatron", *(f"{what}:{e}" for e in engines for what in ("raw", "ours"))]
    found: dict[str, list[Times]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way in ways:
            found[way].append(_measure_in_new_process(way, args, source))
    size = source.stat().st_size / 1e6
    return Findings(
        comparisons=[
            comparison(engine, peer, found, size)
            for engine in engines
            for peer in ("megatron", f"raw:{engine}")
        ],
        figures=[
            Figure(
                what=f"{PEERS.get(way.partition(':')[0], 'ours')} ({way}), MB/s",
                value=f"{size / seconds:.2f}; {size / cores:.2f} a core second",
            )
            for way, (seconds, cores) in medians(found).items()
        ],
    )


def medians(found: dict[str, list[Times]]) -> dict[str, Times]:
    """Seconds and core seconds of each way."""
    return {
        way: (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
        for way, times in found.items()
    }


def comparison(engine: str, peer: str, found: dict[str, list[Times]], size: float) -> Comparison:
    """Make a row of core seconds; the clock's ratio is its note."""
    ours, theirs = found[f"ours:{engine}"], found[peer]
    ratios = [t[1] / o[1] for o, t in zip(ours, theirs, strict=True)]
    by_way = medians(found)
    clock = by_way[peer][0] / by_way[f"ours:{engine}"][0]
    return Comparison(
        what=f"tokenize {size:.1f} MB to .bin/.idx, {engine} engine, core seconds",
        peer=PEERS[peer.partition(":")[0]],
        ours=duration(by_way[f"ours:{engine}"][1]),
        theirs=duration(by_way[peer][1]),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        repeats=len(ratios),
        note=f"by the clock {clock:.2f} x",
    )


def main() -> None:
    """Parse, measure, print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--input", help="a .jsonl with a text a row (default: Python's library)")
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--workers", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(args.input or f"{folder}/sample.jsonl")
        if not args.input:
            with open(source, "w", encoding="utf-8") as stream:
                for text in sample_texts(args.megabytes):
                    stream.write(json.dumps({"text": text}) + "\n")
        found = run(args, source)
    print(found.table())
    if args.json:
        found.write(args.json)


if __name__ == "__main__":
    main()
