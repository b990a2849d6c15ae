"""What is said and refused about the checkpoint that a start loads, before anything is built."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron.training import get_tokenizer

from megatron_anchor import compat
from megatron_anchor.errors import UserError
from megatron_anchor.terminal import say
from megatron_anchor.training import resumed_run, saved_checkpoints
from megatron_anchor.training.command_line import CommandLine
from megatron_anchor.training.model_fields import may_change, model_fields
from megatron_anchor.training.providers import anchor_token_id
from megatron_anchor.training.same_model import (
    Difference,
    differences,
    lost_query_norm,
    lost_vocabulary,
    meant_values,
    restore,
)
from megatron_anchor.training.stored_run import StoredRun, stored_run


def restore_model(args: Namespace, parser: ArgumentParser) -> None:
    """Follow --use-checkpoint-args, in place; without the flag do nothing.

    Args:
        args: parsed, not validated.
        parser: that parsed them.

    Raises:
        UserError: if there is no checkpoint to take arguments from.
    """
    if not args.use_checkpoint_args:
        return
    if reasons := list(saved_checkpoints.refusals(args)):
        raise UserError("\n".join(reasons))
    if not (args.load or args.pretrained_checkpoint):
        raise UserError("--use-checkpoint-args needs --load or --pretrained-checkpoint")
    stored = stored_run(args)
    if stored is None:
        _say(args, f"--use-checkpoint-args: no checkpoint in {args.load} that can be read")
        return
    if stored.args is None:
        raise UserError(
            f"--use-checkpoint-args: {stored.folder} does not record the arguments of its run; "
            "give the model's flags"
        )
    command_line = CommandLine(parser, sys.argv[1:])
    meant = meant_values(args, command_line)
    compat.restore_host_arguments(args, flag=stored.flag)
    vars(args).update(meant)
    taken = restore(args, stored.args, command_line)
    _say(
        args, f"from {stored.folder}, by --use-checkpoint-args: {' '.join(taken) or 'nothing new'}"
    )


def require_same_model(args: Namespace, parser: ArgumentParser) -> None:
    """Refuse to load a checkpoint into another model, and say what is meant to be another.

    Args:
        args: validated; the tokenizer is built.
        parser: that parsed them.

    Raises:
        UserError: with all reasons at once.
    """
    stored = stored_run(args)
    if stored is None:
        return
    if stored.args is None:
        _say(args, f"{stored.folder} does not record its model, which cannot be compared")
        return
    command_line = CommandLine(parser, sys.argv[1:])
    allowed = _allowed(args, command_line)
    meant: list[Difference] = []
    wrong: list[Difference] = []
    for found in differences(args, stored.args, command_line):
        if _is_the_same_anchor(args, found):
            continue
        (meant if may_change(found.name) or found.name in allowed else wrong).append(found)
    if meant:
        _say(
            args,
            f"{stored.folder} is changed: {'; '.join(_change(d, command_line) for d in meant)}",
        )
    if not stored.weights_only and not hasattr(stored.args, "attention_pattern"):
        pattern = args.attention_pattern
        _say(args, f"{stored.folder} records no --attention-pattern: from here on {pattern}")
    reasons = [_contradiction(d, command_line) for d in wrong]
    lost = lost_vocabulary(args, stored.args), lost_query_norm(stored.args)
    reasons += filter(None, lost)
    if reasons:
        raise UserError(_two_models(stored, reasons, wrong, command_line))
    if reasons := list(resumed_run.refusals(args, stored)):
        head = f"this run cannot go on from {stored.folder}:"
        raise UserError("\n  - ".join([head, *reasons]))


def _two_models(
    stored: StoredRun, reasons: Sequence[str], wrong: Sequence[Difference], line: CommandLine
) -> str:
    text = f"this run and its checkpoint {stored.folder} are two models:\n  - "
    text += "\n  - ".join(reasons)
    if wrong:
        flags = " ".join(line.flag(d.name).lstrip("-") for d in wrong)
        text += (
            "\nGive the checkpoint's values, or --use-checkpoint-args to take them from it. If "
            f"another model is meant, allow it by name: --allow-model-change {flags}"
        )
    return text


def _contradiction(difference: Difference, line: CommandLine) -> str:
    ours = line.write(difference.name, difference.ours)
    theirs = line.write(difference.name, difference.theirs)
    return f"{ours} here, {theirs} there" + (
        "" if difference.recorded else " (Megatron's default; the checkpoint does not record it)"
    )


def _change(difference: Difference, line: CommandLine) -> str:
    ours = line.write(difference.name, difference.ours)
    return f"{line.write(difference.name, difference.theirs)} -> {ours}"


def _allowed(args: Namespace, command_line: CommandLine) -> frozenset[str]:
    """Names that --allow-model-change names.

    Raises:
        UserError: for one that does not describe the model.
    """
    given = args.allow_model_change or []
    names = command_line.named(given)
    wrong = [flag for flag in given if names.get(flag) not in model_fields()]
    if wrong:
        raise UserError(
            f"--allow-model-change {' '.join(wrong)}: expected flags that describe the model, such "
            "as norm-epsilon"
        )
    return frozenset(names.values())


def _is_the_same_anchor(args: Namespace, difference: Difference) -> bool:
    """Whether 'bos' here is the token id that is recorded there, or the other way round."""
    if difference.name != "anchor_token":
        return False
    values = difference.ours, difference.theirs
    wanted = (Namespace(**{**vars(args), "anchor_token": value}) for value in values)
    try:
        ours, theirs = (anchor_token_id(namespace, get_tokenizer()) for namespace in wanted)
    except ValueError:  # there is no such token; the run itself is refused for that
        return False
    return ours == theirs


def _say(args: Namespace, message: str) -> None:
    """Print on one rank; torch.distributed is not there yet."""
    if args.rank == 0:
        say(f"> {message}")
