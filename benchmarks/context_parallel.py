"""How equal the work of context-parallel ranks is: contiguous pieces, zigzag, and assigned chunks.

Samples of drawn documents are split among P ranks in three ways; work is the number of pairs of
query and key. "zigzag" cuts the whole sample into 2 P pieces and gives rank r pieces r and
2 P - 1 - r, which is right for full attention. "chunks" is what --cp-comm-type gather does.

    python benchmarks/context_parallel.py --seq-length 131072 --ranks 8 16 32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from side_by_side import Figure, Findings, at_least_one

from megatron_anchor.context_parallel.split import assign_chunks, chunk_work, imbalance
from megatron_anchor.planner.lengths import TABLES, Lengths, find_lengths

Split = Callable[[np.ndarray, int, int], np.ndarray]
"""Borders, S and P to the rank of each of some equal chunks."""


def contiguous(borders: np.ndarray, S: int, P: int) -> np.ndarray:
    """One piece per rank."""
    return np.arange(P)


def zigzag(borders: np.ndarray, S: int, P: int) -> np.ndarray:
    """A piece from the front and one from the back."""
    chunk = np.arange(2 * P)
    return np.minimum(chunk, 2 * P - 1 - chunk)


def chunks(borders: np.ndarray, S: int, P: int) -> np.ndarray:
    """Ours."""
    return assign_chunks(borders, sequence_length=S, parts=P)


SPLITS: dict[str, Split] = {"contiguous": contiguous, "zigzag": zigzag, "chunks": chunks}


def draw(lengths: Lengths, *, seq_length: int, seed: int) -> np.ndarray:
    """Borders of documents drawn until they fill a sample; the last one is cut."""
    random, borders = np.random.default_rng(seed), [0]
    while borders[-1] < seq_length:
        length = int(random.choice(lengths.lengths)) + 1
        borders.append(min(borders[-1] + length, seq_length))
    return np.array(borders)


def measure(split: Split, samples: list[np.ndarray], *, ranks: int) -> str:
    """Largest rank's work over the mean: mean and worst of the samples, and the time to plan."""
    found, seconds = [], 0.0
    S = int(samples[0][-1])
    for borders in samples:
        started = time.process_time()
        rank_of_chunk = split(borders, S, ranks)
        seconds += time.process_time() - started
        work = chunk_work(borders, sequence_length=S, chunks=len(rank_of_chunk))
        found.append(imbalance(work, rank_of_chunk, parts=ranks))
    milliseconds = 1e3 * seconds / len(samples)
    return f"{np.mean(found):.3f} mean, {max(found):.3f} worst, {milliseconds:.2f} ms a sample"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=at_least_one, default=131072)
    parser.add_argument("--ranks", type=at_least_one, nargs="+", default=[8, 16, 32])
    parser.add_argument("--samples", type=at_least_one, default=64)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args()
    rows = []
    for table in TABLES:
        lengths = find_lengths(corpus=None, table=table)
        samples = [
            draw(lengths, seq_length=options.seq_length, seed=seed)
            for seed in range(options.samples)
        ]
        for ranks in options.ranks:
            for name, split in SPLITS.items():
                what = f"work of {ranks} ranks, max/mean, {table}, S = {options.seq_length}: {name}"
                rows.append(Figure(what=what, value=measure(split, samples, ranks=ranks)))
    findings = Findings(comparisons=[], figures=rows)
    print(findings.table())
    if options.json:
        findings.write(options.json)


if __name__ == "__main__":
    main()
