"""What was in the batch when a loss or a gradient is not a number: in words, and on disk.

Every sample carries its origin, two integers, from the dataset to the rank that reads it
(tensor-parallel rank 0 of every pipeline stage). When Megatron's rerun machine rejects a result,
that rank looks the samples up in the datasets' index, says which documents they hold, and writes
them with --dump-bad-batch. Nothing else is kept of a batch, and no rank waits for another.

Legend: B micro-batch, S slots of a sample, P context-parallel size, s = S / P.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from torch import Tensor

from megatron_anchor.errors import UserError
from megatron_anchor.packing.blend import corpora_of
from megatron_anchor.packing.dataset import PackedDataset
from megatron_anchor.terminal import say
from megatron_anchor.training.bad_batch_files import SampleRecord, write_bad_batch
from megatron_anchor.training.context_parallel import context_parallel

SECONDS_FOR_THE_REPORT = 30
"""How long a rank that holds no samples stays alive for the one that reports: torchrun kills all
ranks when the first one ends."""

MOST_DOCUMENTS, MOST_SAMPLES = 8, 16
"""Named in a message; the files of --dump-bad-batch name all."""


class _Judged(NamedTuple):
    """The micro-batch whose loss is looked at."""

    losses_Bs: Tensor
    origin_B2: Tensor | None


class _Watch:
    """What this process knows of its datasets and of the iteration at hand."""

    def __init__(self) -> None:
        self.datasets: dict[int, PackedDataset] = {}
        self.step: Any = None
        self.origins: list[Tensor | None] = []
        self.judged: _Judged | None = None


_watch = _Watch()


def make_folder(args: Namespace) -> None:
    """Make the folder of --dump-bad-batch, if there is one.

    Raises:
        UserError: the folder cannot be written.
    """
    if not args.dump_bad_batch:
        return
    folder = Path(args.dump_bad_batch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dump-bad-batch {folder}: {error.strerror}; name another") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"--dump-bad-batch {folder} cannot be written; name another folder")


def register(*datasets: Any) -> None:
    """Make known where samples come from: packed datasets, blends and lists of them, or None."""
    for packed in corpora_of(datasets):
        _watch.datasets[packed.number] = packed


def remember(origin_B2: Tensor | None, *, training: bool) -> None:
    """Note a micro-batch that this rank has read.

    Args:
        origin_B2: [B, 2] int64 on the CPU, or None on ranks that read no samples.
        training: evaluation goes through one micro-batch after another.
    """
    machine = get_rerun_state_machine()
    step = (machine.current_iteration, machine.state)
    if step != _watch.step or not training:
        _watch.step, _watch.origins = step, []
    _watch.origins.append(origin_B2)


@contextmanager
def judging(losses_Bs: Tensor, origin_B2: Tensor | None) -> Iterator[None]:
    """Let what is rejected meanwhile be a loss of this micro-batch, and not a gradient.

    Args:
        losses_Bs: [B, s] cross entropy of this rank's slots.
        origin_B2: see `remember`.
    """
    _watch.judged = _Judged(losses_Bs, origin_B2)
    try:
        yield
    finally:
        _watch.judged = None


def report(message: str, *, fatal: bool, raises: bool) -> None:
    """Say what the rejected result was computed from, and write it if that was asked for."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        if raises:
            time.sleep(SECONDS_FOR_THE_REPORT)
        return
    args, judged = get_args(), _watch.judged
    iteration, rank = getattr(args, "curr_iteration", 0) + 1, torch.distributed.get_rank()
    if judged is None:
        origins = [origin for origin in _watch.origins if origin is not None]
        records = _records(torch.cat(origins)) if origins else []
    else:
        records = _records_of_losses(judged.losses_Bs.detach().float(), judged.origin_B2)
    kind = "error" if fatal else "warning"
    _say(f"{kind}: rank {rank}, iteration {iteration}: {message}", *_in_words(records))
    if fatal and records:
        _dump(records, args, iteration=iteration, rank=rank, message=message)


def _in_words(records: list[SampleRecord]) -> list[str]:
    """One line a sample, and what else there is to know."""
    if not records:
        return ["  the samples are not known: their dataset is none of megatron_anchor's"]
    lines = [f"  {record.in_words(MOST_DOCUMENTS)}" for record in records[:MOST_SAMPLES]]
    if len(records) > MOST_SAMPLES:
        lines.append(f"  and {len(records) - MOST_SAMPLES} more samples of this rank")
    if _watch.judged is None:
        lines.append("  (a gradient is the sum over all of these: one of them may be the cause)")
    return lines


def _dump(
    records: list[SampleRecord], args: Namespace, *, iteration: int, rank: int, message: str
) -> None:
    """Write the samples to --dump-bad-batch, or say that there is such a flag."""
    if args.dump_bad_batch is None:
        _say("  --dump-bad-batch DIR writes tokens, labels, positions and text of such a batch")
        return
    described = {
        "iteration": iteration,
        "rank": rank,
        "result": message,
        "seed": args.seed,
        "seq_length": args.seq_length,
        "attention_pattern": args.attention_pattern,
        "packing": args.packing,
    }
    name = f"iteration-{iteration:07d}-rank-{rank:05d}"
    try:
        path = write_bad_batch(Path(args.dump_bad_batch), name, records, described=described)
        _say(f"  written to {path} and {path.with_suffix('.npz').name}")
    except OSError as error:  # what has been said above matters more
        _say(f"  cannot write it to --dump-bad-batch {args.dump_bad_batch}: {error}")


def _records(origin_N2: Tensor) -> list[SampleRecord]:
    """The samples of known datasets, one record each.

    Every chunk of a model that a rank holds under interleaved pipelines reads the batch anew.
    """
    once = dict.fromkeys((number, idx) for number, idx in origin_N2.tolist())
    known = [(number, idx) for number, idx in once if number in _watch.datasets]
    return [SampleRecord(_watch.datasets[number], idx) for number, idx in known]


def _records_of_losses(losses_Bs: Tensor, origin_B2: Tensor | None) -> list[SampleRecord]:
    """The samples with a loss that is not finite, and the first slot where that is so."""
    if origin_B2 is None:
        return []
    rank = mpu.get_context_parallel_rank()
    bad_Bs = ~torch.isfinite(losses_Bs).cpu()
    records = []
    for origin_2, losses_s, bad_s in zip(origin_B2, losses_Bs.cpu(), bad_Bs, strict=True):
        if bad_Bs.any() and not bad_s.any():
            continue  # where all are finite, it is their sum that is not
        for record in _records(origin_2[None]):
            sample, split = record.sample, context_parallel(get_args()).split
            chunks = sample["part_of_chunk"].numpy() if split.gathers else None
            slots_s = split.slots(sample["cu_seqlens"].numpy(), chunks, rank=rank)
            record.bad_slots = np.sort(slots_s[bad_s.numpy()])
            record.losses = losses_s.numpy()
            records.append(record)
    return records


def _say(*lines: str) -> None:
    say(*lines, file=sys.stderr)
