"""Pretrain or extend a GPT model with AnchorAttention: Megatron's pretrain_gpt.py plus our flags.

    torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt <every pretrain_gpt.py argument> \\
        --attention-pattern anchor
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

PROGRAM_START = time.time()
SECONDS_FOR_THE_REASON = 60

from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402

from megatron_anchor import compat  # noqa: E402
from megatron_anchor.errors import UserError  # noqa: E402
from megatron_anchor.terminal import say_block  # noqa: E402


@record
def main() -> None:
    """Parse, refuse what cannot run, and hand over to Megatron's own training loop.

    Exits with status 2 and the reasons on rank 0 when the arguments or the data cannot be used.
    An exception of a rank is recorded for torchrun, which then says which rank it was, and why.
    """
    if not compat.have_cuda():
        _end_with(
            "error: no CUDA device was found. To run on the CPU put megatron_anchor.on_cpu in "
            "front: torchrun ... -m megatron_anchor.on_cpu -m megatron_anchor.pretrain_gpt ..."
        )
    compat.quiet_expected_warnings()
    try:
        with compat.imports_of_the_host():
            compat.require_supported_megatron()
            from megatron.core.enums import ModelType
            from megatron.training import pretrain, set_startup_timestamps
            from megatron.training.argument_utils import pretrain_cfg_container_from_args

            from megatron_anchor.training import bad_batch, host_patches, loaded_model
            from megatron_anchor.training.arguments import add_anchor_arguments
            from megatron_anchor.training.data_arguments import require_corpora
            from megatron_anchor.training.forward_step import forward_step
            from megatron_anchor.training.providers import datasets_provider, model_config
            from megatron_anchor.training.validation import require_supported
    except UserError as error:
        _end_with(f"error: {error}")

    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    try:
        args = compat.parse_and_validate_args(
            add_anchor_arguments,
            check=require_supported,
            restore=loaded_model.restore_model,
            compare=loaded_model.require_same_model,
        )
        require_corpora(args)
        bad_batch.make_folder(args)
        host_patches.install(args)
        with compat.refusals_of_the_host():
            container = pretrain_cfg_container_from_args(args, model_config(args))
    except ValueError as error:
        _end_with(f"error: {error}")
    datasets = _ending_for_users(datasets_provider)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


def _ending_for_users(provider: Callable[..., Any]) -> Callable[..., Any]:
    """Let what this package finds wrong with the data end the launch; other errors are bugs."""

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        try:
            return provider(*args, **kwargs)
        except (ValueError, OSError) as error:
            *_, raised_by = traceback.walk_tb(error.__traceback__)
            if raised_by[0].f_globals["__name__"].startswith("megatron_anchor."):
                _end_with(f"error: {error}")
            raise

    return provide


def _end_with(message: str) -> NoReturn:
    """End a launch for the user's arguments or data: the reasons once a node, no tracebacks.

    torchrun kills all ranks when the first one ends, so the others wait for the one that speaks,
    and speak themselves if it does not.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        time.sleep(SECONDS_FOR_THE_REASON)
    say_block(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
