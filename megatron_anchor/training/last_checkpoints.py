"""--save-last: the checkpoints of a run's end, some steps apart, besides those of --save-interval.

The paper advises to evaluate several of the last checkpoints, a few steps apart, and to average:
scores of long-context tasks differ from step to step more than methods do (arXiv 2411.13476).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.training import get_args, print_rank_0

from megatron_anchor.terminal import escaped

DEFAULT_EVERY = 10


def steps_to_keep(train_iters: int, *, count: int, every: int) -> tuple[int, ...]:
    """Iterations whose checkpoints are to be there at the end, in order.

    Args:
        train_iters: T, the run's last iteration.
        count: checkpoints.
        every: iterations from one to the next.

    Returns:
        T - (count - 1) x every, ..., T - every, T; only those above 0.
    """
    steps = range(train_iters - (count - 1) * every, train_iters + 1, every)
    return tuple(step for step in steps if step > 0)


def refusals(args: Namespace) -> Iterator[str]:
    """Reasons why --save-last cannot be done, each with the remedy."""
    count, every = args.save_last, args.save_last_every
    if count is None:
        if every is not None:
            yield f"--save-last-every {every} has no effect without --save-last"
        return
    if count < 1:
        yield f"--save-last {count}: expected 1 or more checkpoints"
    if every is not None and every < 1:
        yield f"--save-last-every {every}: expected 1 or more iterations"
    if not args.save:
        yield f"--save-last {count} needs a folder: give --save (and --save-interval)"
    elif not args.save_interval:
        yield "--save-last: Megatron needs --save-interval with --save; --train-iters will do"
    train_iters = _train_iters(args)
    if train_iters is None or count < 1 or (every is not None and every < 1):
        return
    every = every or DEFAULT_EVERY
    first = train_iters - (count - 1) * every
    if first < 1:
        yield (
            f"--save-last {count} --save-last-every {every} begins {(count - 1) * every} "
            f"iterations before the end, but there are {train_iters}: lower one of them"
        )
    retain, steps = args.save_retain_interval, steps_to_keep(train_iters, count=count, every=every)
    if retain and any(step % retain for step in steps[:-1]):
        yield (
            f"--save-retain-interval {retain} would delete checkpoints that --save-last keeps "
            f"({' '.join(map(str, steps))}): leave it out, or let it divide all of these"
        )


def saving_the_last(decide: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap Megatron's `checkpoint_and_decide_exit`: the checkpoints of --save-last are saved too.

    Its training loop calls it after every step; it saves by --save-interval and wherever the run
    ends. Where another save is due, the host's own `save_checkpoint_and_time` comes first, and then
    the function without --save, so that nothing is saved twice.
    """
    from megatron.training import training as host

    is_due: list[_IsDue] = []

    @functools.wraps(decide)
    def save_and_decide(
        model, optimizer, scheduler, iteration, operations, context, train_data_iterator
    ):
        args = get_args()
        if not is_due:
            is_due.append(_IsDue(count=args.save_last, every=args.save_last_every or DEFAULT_EVERY))
        state = (model, optimizer, scheduler)
        rest = (operations, context, train_data_iterator)
        if not is_due[0](args, iteration):
            return decide(*state, iteration, *rest)
        host.save_checkpoint_and_time(
            iteration, *state, operations, context, train_data_iterator=train_data_iterator
        )
        folder, args.save = args.save, None
        try:
            return decide(*state, iteration, *rest)
        finally:
            args.save = folder

    return save_and_decide


class _IsDue:
    """Whether an iteration is one to save; at the first one asked it says which are."""

    def __init__(self, *, count: int, every: int) -> None:
        self.count, self.every = count, every
        self.announced = False

    def __call__(self, args: Namespace, iteration: int) -> bool:
        # Only now is the number of iterations known where --train-samples was given.
        steps = steps_to_keep(args.train_iters, count=self.count, every=self.every)
        if not self.announced:
            self.announced = True
            _announce(steps, args.save, begun_at=iteration)
        return iteration in steps[:-1] and iteration % args.save_interval != 0


def _announce(steps: tuple[int, ...], folder: str, *, begun_at: int) -> None:
    shown = escaped(folder)
    print_rank_0(f"> --save-last keeps the checkpoints {' '.join(map(str, steps))} in {shown}")
    gone = [s for s in steps if s < begun_at and not Path(folder, f"iter_{s:07d}").is_dir()]
    if gone:
        print_rank_0(
            f"> warning: the run goes on at iteration {begun_at}, and {shown} has no checkpoint "
            f"{' '.join(map(str, gone))}: there will be {len(steps) - len(gone)} of {len(steps)}"
        )


def _train_iters(args: Namespace) -> int | None:
    """T as far as the arguments tell; a growing batch size leaves it to Megatron."""
    if args.train_iters:
        return args.train_iters
    if args.train_samples and args.step_batch_size_schedule is None and args.global_batch_size:
        return args.train_samples // args.global_batch_size
    return None
