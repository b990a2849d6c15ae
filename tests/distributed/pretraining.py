"""A tiny pretraining run through the project's real entry point, on forked ranks.

The curve is read back from TensorBoard, where Megatron writes loss and gradient norm in float32.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tests.distributed.ranks import run_ranks

VOCAB, EOD, S = 128, 0, 64

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --init-method-std 0.1 "
    f"--seq-length {S} --max-position-embeddings {S} "
    # The padded vocabulary must not depend on the tensor-parallel size, or the loss would.
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 16 "
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 2e-3 --lr-decay-style constant "
    "--weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --seed 5 "
    "--log-interval 1 --tensorboard-log-interval 1 --eval-interval 1000 --eval-iters 0 "
    "--distributed-backend gloo --distributed-timeout-minutes 3 --num-workers 0 "
    "--ckpt-format torch_dist --split 100,0,0 --no-one-logger "
)


def write_corpus(prefix: Path, lengths: list[int], *, seed: int = 0) -> Path:
    """Write an ordinary .bin/.idx corpus of random documents that end with EOD."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = torch.Generator().manual_seed(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        tokens = torch.randint(2, VOCAB - 1, (length,), generator=generator)
        # Tokens that follow from the one before, so that there is something to learn.
        tokens[1::2] = (tokens[0 : len(tokens) - 1 : 2] * 3) % (VOCAB - 3) + 2
        builder.add_document(torch.cat((tokens, torch.tensor([EOD]))), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix


def pretrain(
    ranks: int, arguments: str, *, tensorboard: Path, timeout: float = 300.0, without: str = ""
) -> dict[str, dict[int, float]]:
    """Train on ``ranks`` processes; give {scalar: {iteration: value}}.

    Args:
        ranks: number of processes.
        arguments: added to MODEL and TRAINING.
        tensorboard: folder.
        timeout: seconds until the ranks are killed.
        without: a part of MODEL and TRAINING to leave out.
    """
    arguments = f"{arguments} --tensorboard-dir {tensorboard}"
    run_ranks(run_program, ranks, arguments, without, timeout=timeout)
    return read_scalars(tensorboard)


def run_program(arguments: str, without: str = "") -> None:
    """Call the program's main() with a command line, as torchrun would."""
    from megatron_anchor import pretrain_gpt

    sys.argv = ["pretrain_gpt", *(_base(without) + arguments).split()]
    pretrain_gpt.main()


def _base(without: str) -> str:
    base = MODEL + TRAINING
    assert without in base, without
    return base.replace(without, "") if without else base


class Ending(NamedTuple):
    """How a program ended."""

    status: int
    said: str
    """Standard error."""
    told: str
    """Standard output."""


def ending(arguments: str, *, without: str = "") -> Ending:
    """Run the program on one rank; give its status and what it printed, as a user would see it.

    Args:
        arguments: added to MODEL and TRAINING.
        without: a part of these to leave out.
    """
    return run_ranks(_ending, 1, arguments, without)[0]


def _ending(arguments: str, without: str) -> Ending:
    from huggingface_hub import constants

    from megatron_anchor import pretrain_gpt

    constants.HF_HUB_OFFLINE = True
    sys.argv = ["pretrain_gpt", *shlex.split(_base(without) + arguments)]
    status = 0
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()) as told:
        try:
            pretrain_gpt.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return Ending(status, said.getvalue(), told.getvalue())


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read every scalar of a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
