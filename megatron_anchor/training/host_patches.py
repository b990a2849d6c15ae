"""The names of Megatron that a training run replaces, all of them in one table.

Megatron's loop is called as it is. It has no hook for some of what a run needs: there a function
that calls the original, or does its work for our data, stands in its place.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_anchor.attention import multi_token
from megatron_anchor.errors import UserError
from megatron_anchor.packing import blend
from megatron_anchor.patches import MEGATRON, MissingTargetError, Patch, apply, instead
from megatron_anchor.terminal import logger_of
from megatron_anchor.training import (
    full_validation,
    kept_children,
    last_checkpoints,
    rejected_results,
    saved_checkpoints,
    skipped_batches,
)

_LOGGER = logger_of(__name__)


class HostPatch(NamedTuple):
    """A patch, and the runs that need it."""

    patch: Patch
    asked_for: Callable[[Namespace], bool] | None = None
    """Whether the user's arguments ask for it; None: every run has it, and can do without it."""


PATCHES = (
    HostPatch(
        Patch(
            target="megatron.core.datasets.utils:compile_helpers",
            replacement=instead(lambda: None),
            reason="the wheel has the compiled dataset helpers, and no Makefile to build them",
            lost="Megatron ends at start where its dataset helpers cannot be compiled",
            host=MEGATRON,
        ),
        lambda args: importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None,
    ),
    HostPatch(blend.PATCH),
    HostPatch(
        Patch(
            target="megatron.training.checkpointing:maybe_msc",
            replacement=saved_checkpoints.WholeTrackers,
            reason="the tracker of the last checkpoint is whole or old, never empty",
            lost="a job that is killed while it saves may leave an empty tracker file",
            host=MEGATRON,
        )
    ),
    HostPatch(
        Patch(
            target="megatron.training.training:save_checkpoint",
            replacement=saved_checkpoints.explaining_failures,
            reason="a failed save says what is left and what to do",
            lost="a failed save ends with the error of Megatron's writer alone",
            parameters=("iteration",),
            host=MEGATRON,
        )
    ),
    HostPatch(
        Patch(
            target="megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
            replacement=rejected_results.reporting,
            reason="NaN and Inf name their documents, and end the first iteration of a run too",
            lost="a loss or gradient of NaN is reported without its documents, and passes in the "
            "first iteration",
            parameters=("self", "result", "rejection_func", "message"),
            host=MEGATRON,
        )
    ),
    HostPatch(
        Patch(
            target="megatron.training.training:dummy_train_step",
            replacement=instead(skipped_batches.dummy_train_step),
            reason="Megatron's reads the fields of its own batches",
            lost="--iterations-to-skip",
            parameters=("data_iterator",),
            host=MEGATRON,
        ),
        lambda args: bool(args.iterations_to_skip),
    ),
    HostPatch(
        Patch(
            target="megatron.training.training:checkpoint_and_decide_exit",
            replacement=last_checkpoints.saving_the_last,
            reason="--save-last saves at further iterations",
            lost="--save-last",
            parameters=("model", "optimizer", "opt_param_scheduler", "iteration"),
            host=MEGATRON,
        ),
        lambda args: args.save_last is not None,
    ),
    HostPatch(
        Patch(
            target="megatron.training.training:build_train_valid_test_data_iterators",
            replacement=full_validation.counting_steps,
            reason="--full-validation counts every target once",
            lost="--full-validation",
            host=MEGATRON,
        ),
        lambda args: args.full_validation,
    ),
    *(HostPatch(patch, lambda args: args.exit_signal_handler) for patch in kept_children.PATCHES),
    HostPatch(multi_token.LOSS_PATCH, lambda args: bool(args.mtp_num_layers)),
    HostPatch(multi_token.LAYERS_PATCH, lambda args: bool(args.mtp_num_layers)),
)


def install(args: Namespace, patches: Iterable[HostPatch] = PATCHES) -> None:
    """Put the patches in place that this run needs; call it before `megatron.training.pretrain`.

    What every run can do without is only warned about where the host lacks its target.

    Args:
        args: Megatron's, validated.
        patches: for tests.

    Raises:
        UserError: this Megatron lacks what arguments of the run depend on, all of it.
    """
    missing = []
    for patch, asked_for in patches:
        if asked_for is not None and not asked_for(args):
            continue
        try:
            apply(patch)
        except MissingTargetError as error:
            if asked_for is None:
                _LOGGER.warning("%s", error)
            else:
                missing.append(str(error))
    if missing:
        raise UserError("\n".join(missing))


def as_markdown() -> str:
    """The table for the documentation."""
    lines = ["| replaced | why | without it |", "|---|---|---|"]
    lines += [f"| `{patch.target}` | {patch.reason} | {patch.lost} |" for patch, _ in PATCHES]
    return "\n".join(lines)
