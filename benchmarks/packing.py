"""Packing against Megatron's own GPTDataset, side by side in one run.

Four measurements, each the median of several alternating runs on the same data:

  index   our compiled packing of documents into samples, concat and best-fit, against Megatron's
          C++ build_sample_idx, which cuts
  read    our __getitem__ against GPTDataset's with inter-document masking, many documents
  read    the same with few, long documents

and, with --plan-documents, what a whole plan takes (shuffling, packing, ordering the samples): CPU
seconds and the memory beyond the corpus' own lengths, each in a process of its own. The peer has no
such step apart from the index above.

Nothing but the peer's own code is run for the peer. Both datasets read one corpus from the page
cache through memory-mapped files; their indices are built beforehand. Both run on one thread, as
in a data loader's worker, and the times are the process' CPU time: on an idle machine that is the
wall time, and a busy one does not blur the ratios.
"""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

os.environ.setdefault("RANK", "0")
warnings.filterwarnings("ignore")

from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.helpers import build_sample_idx  # noqa: E402
from megatron.core.datasets.indexed_dataset import _IndexWriter  # noqa: E402

from megatron_anchor.packing.best_fit import fit  # noqa: E402
from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig  # noqa: E402
from megatron_anchor.packing.epochs import PlanFigures, plan_samples  # noqa: E402
from megatron_anchor.packing.index import concatenate  # noqa: E402
from megatron_anchor.packing.patterns import PACKINGS  # noqa: E402

ANCHOR, VOCAB_SIZE = 1, 32000


def measure(ours: Callable[[], Any], theirs: Callable[[], Any], *, repeats: int) -> dict[str, Any]:
    """Median CPU seconds of both, called in turns after a warm-up each, and the median ratio."""
    ours(), theirs()
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        pair = []
        for function in (ours, theirs):
            begin = time.process_time()
            function()
            pair.append(time.process_time() - begin)
        times.append((pair[0], pair[1]))
    return {
        "ours_s": statistics.median(ours for ours, _ in times),
        "theirs_s": statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(theirs / ours for ours, theirs in times),
        "ratio_min": min(theirs / ours for ours, theirs in times),
        "ratio_max": max(theirs / ours for ours, theirs in times),
        "repeats": repeats,
    }


def heavy_tailed_lengths(num_documents: int, *, mean: float, seed: int = 0) -> np.ndarray:
    """int32 lengths of at least 2 tokens, log-normal (sigma 1.2) with the given mean."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(np.log(mean) - 1.2**2 / 2, 1.2, num_documents)
    return np.maximum(lengths, 2).astype(np.int32)


def benchmark_index(
    num_documents: int, sequence_length: int, repeats: int, pack: Callable[..., Any]
) -> dict[str, Any]:
    """Pack shuffled documents into samples: ours against Megatron's compiled loop."""
    lengths = heavy_tailed_lengths(num_documents, mean=1000)
    order = np.random.RandomState(0).permutation(num_documents).astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    return measure(
        lambda: pack(order, lengths, sequence_length=sequence_length, slots=tokens + num_documents),
        lambda: build_sample_idx(lengths, order, sequence_length, 1, tokens, True, True),
        repeats=repeats,
    )


def benchmark_plan(num_documents: int, sequence_length: int, packing: str) -> dict[str, Any]:
    """Plan one epoch; run in a new process, since peak memory is that of the process."""
    lengths = heavy_tailed_lengths(num_documents, mean=1000)
    settings: dict[str, Any] = dict(
        sequence_length=sequence_length, num_samples=None, random_seed=1, packing=packing
    )
    plan_samples(np.arange(1000, dtype=np.int32), lengths[:1000], **settings)  # loads the code
    # The lengths were made with larger temporary arrays, which would hide the plan's peak.
    reached = _reset_peak_memory()
    begin = time.process_time()
    plan = plan_samples(np.arange(num_documents, dtype=np.int32), lengths, **settings)
    seconds = time.process_time() - begin
    return {
        "what": f"{packing} plan of {num_documents:.0e} documents, S = {sequence_length}",
        "seconds": seconds,
        "bytes_per_document": (_peak_memory() - reached) / num_documents,
        "above_lower_bound": PlanFigures(*plan.figures.tolist()).above_lower_bound,
    }


def _reset_peak_memory() -> int:
    """Let Linux count this process' peak anew; bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def benchmark_read(
    folder: Path, sequence_length: int, documents_per_sample: int, repeats: int, dtype: type
) -> dict[str, Any]:
    """Read samples in order: ours against GPTDataset with inter-document masking."""
    mean = sequence_length / documents_per_sample - 1
    lengths = heavy_tailed_lengths(32 * documents_per_sample, mean=mean)
    prefix = str(folder / f"corpus_{documents_per_sample}_{np.dtype(dtype).name}")
    write_corpus(prefix, lengths, dtype)
    common: dict[str, Any] = dict(
        random_seed=1234,
        sequence_length=sequence_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(
            vocab_size=VOCAB_SIZE, pad=0, eod=2, unique_identifiers={"tokenizer": "none"}
        ),
    )
    ours = build(PackedDataset, PackedDatasetConfig(
        **common, anchor_token_id=ANCHOR, vocab_size=VOCAB_SIZE))  # fmt: skip
    theirs = build(GPTDataset, GPTDatasetConfig(
        **common, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, inter_document_masking=True))  # fmt: skip
    turn = iter(range(10**9))
    other = iter(range(10**9))
    row = measure(
        lambda: ours[next(turn) % len(ours)],
        lambda: theirs[next(other) % len(theirs)],
        repeats=repeats,
    )
    row["documents"] = statistics.mean(int(sample["num_documents"]) for sample in ours)
    return row


def write_corpus(prefix: str, lengths: np.ndarray, dtype: type) -> None:
    """Random tokens in Megatron's file format, one sequence a document, each ending in token 2."""
    tokens: np.ndarray = (
        np.random.default_rng(1).integers(3, VOCAB_SIZE, int(lengths.sum())).astype(dtype)
    )
    tokens[np.cumsum(lengths) - 1] = 2
    tokens.tofile(f"{prefix}.bin")
    with _IndexWriter(f"{prefix}.idx", dtype) as writer:
        writer.write(lengths, None, np.arange(len(lengths) + 1))


def build(kind: type, config: GPTDatasetConfig) -> Any:
    """One epoch of the whole corpus."""
    return BlendedMegatronDatasetBuilder(kind, [None] * 3, lambda: True, config).build()[0]


def table(rows: list[dict[str, Any]]) -> str:
    """The measurements as aligned text."""
    lines = [f"{'measurement':<52}{'ours':>12}{'Megatron':>12}{'ratio':>8}   range of ratios"]
    for row in rows:
        ours, theirs = (f"{row[key] * 1e3:.3g} ms" for key in ("ours_s", "theirs_s"))
        lines.append(
            f"{row['what']:<52}{ours:>12}{theirs:>12}{row['ratio']:>7.2f}x"
            f"   {row['ratio_min']:.2f} - {row['ratio_max']:.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/packing.py --documents 10000000 --json packing.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--documents", type=int, default=10_000_000, help="for the index")
    parser.add_argument("--seq-length", type=int, default=131072, help="slots of a sample")
    parser.add_argument("--documents-per-sample", type=int, nargs="+", default=[500, 32])
    parser.add_argument(
        "--plan-documents", type=int, nargs="*", default=[], help="e.g. 10000000 100000000 (Linux)"
    )
    parser.add_argument("--index-repeats", type=int, default=7)
    parser.add_argument("--read-repeats", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the measurements here, too")
    args = parser.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    rows = []
    for sequence_length in sorted({4096, args.seq_length}):
        for name, pack in (("concat", concatenate), ("best-fit", fit)):
            row = benchmark_index(args.documents, sequence_length, args.index_repeats, pack)
            what = f"{name} index of {args.documents:.0e} documents, S = {sequence_length}"
            rows.append({"what": what, **row})
    with tempfile.TemporaryDirectory() as folder:
        for documents in args.documents_per_sample:
            for dtype in (np.int32, np.uint16):
                row = benchmark_read(
                    Path(folder), args.seq_length, documents, args.read_repeats, dtype
                )
                what = (
                    f"read S = {args.seq_length}, {row['documents']:.0f} documents, "
                    f"{np.dtype(dtype).name}"
                )
                rows.append({"what": what, **row})
    print(table(rows))
    plans = []
    for documents in args.plan_documents:
        for packing in PACKINGS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                plans.append(pool.apply(benchmark_plan, (documents, args.seq_length, packing)))
            print(
                "{what}: {seconds:.1f} CPU s, {bytes_per_document:.1f} bytes a document, "
                "{above_lower_bound:.4%} more samples than the lower bound".format(**plans[-1])
            )
    if args.json:
        args.json.write_text(json.dumps(rows + plans, indent=4) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
