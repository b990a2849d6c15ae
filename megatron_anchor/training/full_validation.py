"""--full-validation: every target of a validation set once, at any layout.

Megatron gives rank r of R the samples r, r + R, ..., one at a time whatever the micro-batch, begins
the set anew on ranks that run out, and reads it once for every micro-batch of a step. Here the
items of a set are whole micro-batches, as many as fill all ranks and steps. The last ones hold
samples without targets, which add nothing to the loss or to the count.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from megatron.training import get_args

from megatron_anchor.packing.blend import corpora_of


class WholeBatches(torch.utils.data.Dataset):
    """The micro-batches of a validation set; `item[name]` is [micro_batch_size, ...].

    Args:
        dataset: a packed dataset or a blend of such, with at least one sample.
        micro_batch_size: samples of a micro-batch.
        at_once: micro-batches of all ranks in one step of the evaluation.
    """

    index_split = Split.valid  # read by Megatron

    def __init__(self, dataset: Any, *, micro_batch_size: int, at_once: int) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.at_once = at_once

    def __len__(self) -> int:
        """Micro-batches, a multiple of `at_once`."""
        return -(-len(self.dataset) // (self.micro_batch_size * self.at_once)) * self.at_once

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """One micro-batch; behind the last sample it holds samples without targets."""
        first, last = idx * self.micro_batch_size, (idx + 1) * self.micro_batch_size
        samples = [self.dataset[n] for n in range(first, min(last, len(self.dataset)))]
        if len(samples) < self.micro_batch_size:
            nothing = next(iter(corpora_of(self.dataset)))[None]
            samples += [nothing] * (self.micro_batch_size - len(samples))
        # Without the number of its corpus, no tensor, which a blend adds to a sample.
        names = [name for name, value in samples[0].items() if isinstance(value, torch.Tensor)]
        return {name: torch.stack([sample[name] for sample in samples]) for name in names}


def micro_batches_of_a_step(args: Namespace) -> int:
    """Micro-batches that every rank runs in one step of the evaluation, as Megatron counts them."""
    ranks = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
    return args.eval_global_batch_size // (args.eval_micro_batch_size * ranks)


def whole_batches(dataset: Any, args: Namespace, *, ranks: int) -> WholeBatches:
    """A validation set cut for this layout.

    Args:
        dataset: a packed dataset or a blend of such.
        args: Megatron's.
        ranks: data-parallel size.
    """
    return WholeBatches(
        dataset,
        micro_batch_size=args.eval_micro_batch_size,
        at_once=ranks * micro_batches_of_a_step(args),
    )


def counting_steps(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's `build_train_valid_test_data_iterators`: a whole set is read once.

    It takes the number of a rank's micro-batches for the number of steps, so that a step of n
    micro-batches makes n passes: the same mean at n times the cost.
    """

    @functools.wraps(build)
    def build_and_count(provider: Any) -> Any:
        iterators = build(provider)
        args, each = get_args(), micro_batches_of_a_step(get_args())
        if isinstance(args.eval_iters, list):  # on ranks that read no samples it holds None
            args.eval_iters = [count and count // each for count in args.eval_iters]
        return iterators

    return build_and_count
