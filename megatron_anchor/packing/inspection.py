"""What a corpus becomes under given settings of packing: the figures of a whole epoch.

Reads the index only, no tokens, but for one sample that is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_anchor.packing.dataset import PackedDataset
from megatron_anchor.packing.index import Slices
from megatron_anchor.packing.statistics import attention_work_share
from megatron_anchor.terminal import escaped


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Figures of one epoch; shares are 0 to 1."""

    corpus: str
    packing: str
    attention_pattern: str
    sequence_length: int
    document_alignment: int
    documents: int
    """documents with at least one token behind the anchor"""
    samples: int
    fewest_samples: int
    """lower bound for any packing of this kind"""
    above_lower_bound: float
    slices: int
    documents_per_sample: float
    cut_documents: int
    padding_share: float
    attention_work_share: float
    """of full causal attention, in pairs of query and key"""
    samples_read: int
    """samples that the attention work and the lists below come from, evenly spread"""
    document_lengths: tuple[int, ...]
    """documents by length: under 2, 4, 8, ... tokens"""
    documents_of_samples: tuple[int, ...]
    """document slices of each sample read"""
    work_shares: tuple[float, ...]
    """attention work of each sample read"""


def inspect_packing(dataset: PackedDataset, *, most_samples: int = 10000) -> PackingReport:
    """Measure a dataset that holds one epoch.

    Args:
        dataset: the dataset.
        most_samples: samples whose slices are looked at; of more, evenly spread ones are.
    """
    config, figures = dataset.config, dataset.figures
    length = config.sequence_length
    numbers = np.unique(np.linspace(0, len(dataset) - 1, min(most_samples, len(dataset))).round())
    slice_counts, work = [], []
    for number in tqdm(numbers.astype(int), desc="samples", delay=5, disable=None):
        slices = dataset.slices(int(number))
        segments = config.pattern.segment_lengths(slices.slots, sequence_length=length)
        slice_counts.append(len(slices.length))
        windows = config.attention_windows
        work.append(attention_work_share(segments, sequence_length=length, windows=windows))
    content = dataset.content_lengths()
    content = content[content > 0]
    classes = np.bincount(np.floor(np.log2(content)).astype(int))
    return PackingReport(
        corpus=str(dataset.dataset_path),
        packing=config.packing,
        attention_pattern=config.attention_pattern,
        sequence_length=length,
        document_alignment=config.alignment,
        documents=len(content),
        samples=figures.samples,
        fewest_samples=figures.fewest_samples,
        above_lower_bound=figures.above_lower_bound,
        slices=figures.slices,
        documents_per_sample=figures.slices / figures.samples,
        cut_documents=figures.cut_documents,
        padding_share=1 - figures.occupied / (figures.samples * length),
        attention_work_share=float(np.mean(work)),
        samples_read=len(numbers),
        document_lengths=tuple(classes.tolist()),
        documents_of_samples=tuple(slice_counts),
        work_shares=tuple(work),
    )


def table(report: PackingReport) -> str:
    """The figures for people."""
    rows = {
        "documents": f"{report.documents:,}",
        "samples": f"{report.samples:,} of {report.sequence_length:,} slots",
        "lower bound": f"{report.fewest_samples:,} samples ({report.above_lower_bound:.3%} above)",
        "documents per sample": f"{report.documents_per_sample:.2f}",
        "cut documents": f"{report.cut_documents:,} "
        f"({report.cut_documents / report.documents:.2%})",
        "padding": f"{report.padding_share:.3%} of the slots",
        "attention work": f"{report.attention_work_share:.2%} of full attention",
    }
    head = (
        f"{escaped(report.corpus)}: {report.packing}, {report.attention_pattern}, "
        f"alignment {report.document_alignment}"
    )
    return "\n".join([head, *(f"  {name:<22}{value}" for name, value in rows.items())])


def document_segments(dataset: PackedDataset, number: int) -> int:
    """Segments of a sample that hold documents, all but the padding behind the last one."""
    pattern = dataset.config.pattern
    if not pattern.masks_documents:
        return 1
    return len(pattern.segments(document_borders(dataset.slices(number)))) - 1


def document_borders(slices: Slices) -> np.ndarray:
    """int64 [P + 1], slots where the document slices of a sample begin, and the end of the last."""
    return np.cumsum([0, *slices.slots])


def describe_sample(
    dataset: PackedDataset, number: int, *, decode: Callable[[list[int]], str] | None
) -> list[dict[str, Any]]:
    """The document slices of a sample: place, positions, tokens, targets and text.

    Args:
        dataset: the dataset.
        number: of the sample.
        decode: turns token ids into text; None = leave the text out.

    Raises:
        IndexError: there is no such sample.
    """
    slices = dataset.slices(number)
    sample = {name: tensor.numpy() for name, tensor in dataset[number].items()}
    if dataset.config.pattern.masks_documents:
        spans = document_borders(slices)
    else:
        spans = np.concatenate(([0], np.cumsum(slices.prefix + slices.length)))
        if dataset.config.interleave_chunks:
            spans = spans[[0, -1]]  # the documents are mixed
    rows = []
    for row in range(len(spans) - 1):
        begin, end = int(spans[row]), int(spans[row + 1])
        tokens, labels, positions, counts = (
            sample[name][begin:end].tolist()
            for name in ("tokens", "labels", "position_ids", "loss_mask")
        )
        entry: dict[str, Any] = {
            "slots": [begin, end],
            "document": int(slices.document[row]) if len(spans) == len(slices.length) + 1 else None,
            "tokens": tokens,
            "targets": [label if c else None for label, c in zip(labels, counts, strict=True)],
            "positions": positions,
        }
        if decode is not None:
            entry["text"] = decode(tokens)
        rows.append(entry)
    return rows


def format_sample(rows: list[dict[str, Any]], *, most: int = 12) -> str:
    """A sample for people: the first and last slots of every slice, and its text."""
    lines = []
    for row in rows:
        begin, end = row["slots"]
        document = row["document"]
        holds = "interleaved documents" if document is None else f"document {document}"
        lines.append(f"slots {begin} to {end - 1}: {holds}")
        for name in ("positions", "tokens", "targets"):
            cells = ["." if value is None else str(value) for value in row[name]]
            if len(cells) > most:
                cells = [*cells[: most - 4], "...", *cells[-3:]]
            lines.append(f"  {name:<10}" + " ".join(f"{cell:>6}" for cell in cells))
        if "text" in row:
            text = row["text"] if len(row["text"]) < 400 else row["text"][:396] + " ..."
            lines.append(f"  text      {text!r}")
    return "\n".join(lines)
