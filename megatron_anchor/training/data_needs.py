"""How many samples a run reads, and whether its datasets hold them: known before it trains."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.training.data_arguments import evaluates


def validation_samples(args: Namespace, asked: int | None) -> int | None:
    """Validation samples that the run will have read at its end; None = a whole set each time.

    Megatron goes on behind the samples that earlier launches have read, but asks only for those
    that the whole run needs under today's --eval-iters and --eval-interval.

    Args:
        args: Megatron's, with the state of the checkpoint if one was loaded.
        asked: what Megatron asks for.
    """
    if asked is None or args.skip_train or not evaluates(args):
        return asked
    left = args.train_iters // args.eval_interval - args.iteration // args.eval_interval + 1
    read = getattr(args, "consumed_valid_samples", 0)
    return max(asked, read + left * args.eval_iters * args.eval_global_batch_size)


def require_enough(
    train: Any, valid: Any, test: Any, *, args: Namespace, needed: list[int | None]
) -> None:
    """Refuse datasets that Megatron would find too small in the middle of the run.

    Args:
        train: dataset, blend or None.
        valid: dataset, blend, list of these, or None.
        test: dataset, blend or None.
        args: Megatron's.
        needed: samples of each split; None = those that there are.

    Raises:
        UserError: a split that will be read is not there, or holds too few samples.
    """
    if not args.skip_train:
        _require(train, "training", needed[0], args)
    if not evaluates(args):
        return
    _require(valid, "validation", needed[1], args)
    if args.full_validation:
        _require_no_test_set(test)
        _require_names(valid, args)
    elif test is not None:
        _require(test, "test", needed[2], args)


def _require(dataset: Any, name: str, needed: int | None, args: Namespace) -> None:
    if dataset is None and needed != 0:
        remedy = "" if name == "training" else ", or --eval-iters 0 to train without evaluation"
        option = {"training": "--train-data-path", "validation": "--valid-data-path"}[name]
        reason = (
            f"--split {args.split} gives it nothing; give it a share, or name"
            if args.split
            else f"no {option} is given; name"
        )
        raise UserError(
            f"no document is left for {name}: {reason} corpora for it with {option}{remedy}"
        )
    if needed is not None and dataset is not None and len(dataset) < needed:
        raise UserError(
            f"the run needs {needed} {name} samples, and the blend holds {len(dataset)}: without "
            "weights it is one epoch of its corpora; give them weights (WEIGHT PREFIX WEIGHT "
            "PREFIX ...; each sample is drawn from a corpus by its weight, and the corpora repeat "
            "as needed), or "
            + (
                "lower --train-iters (--train-samples)"
                if name == "training"
                else "lower --eval-iters or raise --eval-interval"
            )
        )


def _require_no_test_set(test: Any) -> None:
    if test is not None:
        raise UserError(
            "--full-validation: Megatron 0.19.2 ends with an error when it comes to a test set; "
            "leave out --test-data-path, or make the third number of --split 0"
        )


def _require_names(valid: Any, args: Namespace) -> None:
    names, sets = args.validation_set_names, len(valid) if isinstance(valid, list) else 1
    if names and len(names) != sets:
        raise UserError(
            f"--validation-set-names {' '.join(names)}: {len(names)} names for {sets} validation "
            "sets; give one for each"
        )
