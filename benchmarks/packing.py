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
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
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
from side_by_side import Comparison, Figure, Findings, at_least_one, compare  # noqa: E402

from megatron_anchor.packing.balance import BalancedDataset, Balancing  # noqa: E402
from megatron_anchor.packing.best_fit import fit  # noqa: E402
from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig  # noqa: E402
from megatron_anchor.packing.epochs import PlanFigures, plan_epochs  # noqa: E402
from megatron_anchor.packing.index import concatenate  # noqa: E402
from megatron_anchor.packing.patterns import PACKINGS  # noqa: E402

ANCHOR, VOCAB_SIZE = 1, 32000


def heavy_tailed_lengths(num_documents: int, *, mean: float, seed: int = 0) -> np.ndarray:
    """int32 lengths of at least 2 tokens, log-normal (sigma 1.2) with the given mean."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(np.log(mean) - 1.2**2 / 2, 1.2, num_documents)
    return np.maximum(lengths, 2).astype(np.int32)


def benchmark_index(
    num_documents: int, sequence_length: int, repeats: int, name: str
) -> Comparison:
    """Pack shuffled documents into samples: ours against Megatron's compiled loop."""
    pack = {"concat": concatenate, "best-fit": fit}[name]
    lengths = heavy_tailed_lengths(num_documents, mean=1000)
    order = np.random.RandomState(0).permutation(num_documents).astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    return compare(
        f"{name} index of {num_documents:.0e} documents, S = {sequence_length}",
        lambda: pack(order, lengths, sequence_length=sequence_length, slots=tokens + num_documents),
        lambda: build_sample_idx(lengths, order, sequence_length, 1, tokens, True, True),
        peer="Megatron's build_sample_idx",
        repeats=repeats,
        note="" if name == "concat" else "Megatron's cuts documents",
    )


def benchmark_plan(num_documents: int, sequence_length: int, packing: str) -> Figure:
    """Plan one epoch; run in a new process, since peak memory is that of the process."""
    lengths = heavy_tailed_lengths(num_documents, mean=1000)
    settings: dict[str, Any] = dict(
        sequence_length=sequence_length, epochs=range(1), random_seed=1, packing=packing
    )
    plan_epochs(np.arange(1000, dtype=np.int32), lengths[:1000], **settings)  # loads the code
    # The lengths were made with larger temporary arrays, which would hide the plan's peak.
    reached = _reset_peak_memory()
    begin = time.process_time()
    plan = plan_epochs(np.arange(num_documents, dtype=np.int32), lengths, **settings)
    seconds = time.process_time() - begin
    bytes_per_document = (_peak_memory() - reached) / num_documents
    above = PlanFigures(*plan.figures[0].tolist()).above_lower_bound
    return Figure(
        what=f"{packing} plan of {num_documents:.0e} documents, S = {sequence_length}",
        value=f"{seconds:.1f} CPU s, {bytes_per_document:.1f} bytes a document, "
        f"{above:.4%} more samples than the lower bound",
    )


def _reset_peak_memory() -> int:
    """Let Linux count this process' peak anew; bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def benchmark_read(
    folder: Path, sequence_length: int, documents_per_sample: int, repeats: int, dtype: type
) -> Comparison:
    """Read samples in order: ours against GPTDataset with inter-document masking."""
    common = make_corpus(folder, sequence_length, documents_per_sample, 32, dtype)
    ours = build_ours(common)
    theirs = build(GPTDataset, GPTDatasetConfig(
        **common, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, inter_document_masking=True))  # fmt: skip
    turn = iter(range(10**9))
    other = iter(range(10**9))
    documents = statistics.mean(int(sample["num_documents"]) for sample in ours)
    return compare(
        f"read a sample, S = {sequence_length}, {documents:.0f} documents, {np.dtype(dtype).name}",
        lambda: ours[next(turn) % len(ours)],
        lambda: theirs[next(other) % len(theirs)],
        peer="Megatron's GPTDataset, inter-document masking",
        repeats=repeats,
    )


def benchmark_balance(folder: Path, *, samples: int = 72, sequence_length: int = 16384) -> Figure:
    """Attention work of 8 ranks, one global batch of 64 samples."""
    dataset = build_ours(make_corpus(folder, sequence_length, 8, samples, np.uint16))
    batch = Balancing(global_batch_size=64, micro_batch_size=1, ranks=8)
    before, after = BalancedDataset(dataset, batch).imbalances(1)[0]
    return Figure(
        what="attention work of 8 ranks, largest over mean, batch of 64 samples, "
        f"S = {sequence_length}",
        value=f"{before:.3f} in order, {after:.3f} with --balance-attention-work",
    )


def make_corpus(
    folder: Path, sequence_length: int, documents_per_sample: int, samples: int, dtype: type
) -> dict[str, Any]:
    """Write about so many samples of random tokens; what both datasets' configs share."""
    mean = sequence_length / documents_per_sample - 1
    lengths = heavy_tailed_lengths(samples * documents_per_sample, mean=mean)
    prefix = str(folder / f"corpus_{documents_per_sample}_{np.dtype(dtype).name}")
    write_corpus(prefix, lengths, dtype)
    return dict(
        random_seed=1234,
        sequence_length=sequence_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(
            vocab_size=VOCAB_SIZE, pad=0, eod=2, unique_identifiers={"tokenizer": "none"}
        ),
    )


def build_ours(common: dict[str, Any]) -> PackedDataset:
    """Our dataset over a corpus of `make_corpus`."""
    return build(
        PackedDataset, PackedDatasetConfig(**common, anchor_token_id=ANCHOR, vocab_size=VOCAB_SIZE)
    )


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


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/packing.py --documents 10000000 --json packing.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--documents", type=at_least_one, default=10_000_000, help="for the index")
    parser.add_argument("--seq-length", type=at_least_one, default=131072, help="slots of a sample")
    parser.add_argument("--documents-per-sample", type=int, nargs="+", default=[500, 32])
    parser.add_argument(
        "--plan-documents", type=int, nargs="*", default=[], help="e.g. 10000000 100000000 (Linux)"
    )
    parser.add_argument("--index-repeats", type=at_least_one, default=7)
    parser.add_argument("--read-repeats", type=at_least_one, default=100)
    parser.add_argument("--json", type=Path, help="write the measurements here, too")
    args = parser.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    comparisons, figures = list[Comparison](), list[Figure]()
    for sequence_length in sorted({4096, args.seq_length}):
        for name in PACKINGS:
            comparisons.append(
                benchmark_index(args.documents, sequence_length, args.index_repeats, name)
            )
    with tempfile.TemporaryDirectory() as folder:
        for documents in args.documents_per_sample:
            for dtype in (np.int32, np.uint16):
                comparisons.append(
                    benchmark_read(
                        Path(folder), args.seq_length, documents, args.read_repeats, dtype
                    )
                )
        figures.append(benchmark_balance(Path(folder)))
    for documents in args.plan_documents:
        for packing in PACKINGS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures.append(pool.apply(benchmark_plan, (documents, args.seq_length, packing)))
    findings = Findings(comparisons=comparisons, figures=figures)
    print(findings.table())
    if args.json:
        findings.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
