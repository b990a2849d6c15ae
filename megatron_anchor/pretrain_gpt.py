"""Pretrain or extend a GPT model with AnchorAttention: Megatron's pretrain_gpt.py plus our flags.

    torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt <every pretrain_gpt.py argument> \\
        --attention-pattern anchor
"""

from __future__ import annotations

import os
import sys
import time

PROGRAM_START = time.time()

from megatron_anchor import compat  # noqa: E402


def main() -> None:
    """Parse, refuse what cannot run, and hand over to Megatron's own training loop.

    Exits with status 2 and the reasons on rank 0 when the arguments cannot run.
    """
    compat.require_supported_megatron()
    compat.use_shipped_dataset_helpers()
    compat.quiet_expected_warnings()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_anchor.training.arguments import add_anchor_arguments
    from megatron_anchor.training.forward_step import forward_step
    from megatron_anchor.training.providers import datasets_provider, model_config
    from megatron_anchor.training.validation import require_supported

    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    try:
        args = compat.parse_and_validate_args(add_anchor_arguments, check=require_supported)
    except ValueError as error:
        # The user's arguments, not our code: the reasons without a traceback from every rank.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    container = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
