"""Pretrain or extend a GPT model with AnchorAttention: Megatron's pretrain_gpt.py plus our flags.

    torchrun --nproc-per-node 8 -m megatron_anchor.pretrain_gpt <every pretrain_gpt.py argument> \\
        --attention-pattern anchor
"""

from __future__ import annotations

import time

PROGRAM_START = time.time()

from megatron_anchor import compat  # noqa: E402


def main() -> None:
    """Parse, refuse what cannot run, and hand over to Megatron's own training loop.

    Raises:
        ValueError: for arguments that are not supported, before anything is built.
    """
    compat.require_supported_megatron()
    compat.use_shipped_dataset_helpers()
    compat.quiet_expected_warnings()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_anchor.training.arguments import add_anchor_arguments
    from megatron_anchor.training.forward_step import forward_step
    from megatron_anchor.training.providers import datasets_provider, model_config
    from megatron_anchor.training.validation import require_supported

    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    early = parse_args(add_anchor_arguments)
    if not early.use_checkpoint_args:
        # Before Megatron's validation, whose assertions name neither the value nor the remedy.
        require_supported(early)
    args = parse_and_validate_args(
        add_anchor_arguments, args_defaults={"tokenizer_type": "HuggingFaceTokenizer"}
    )
    require_supported(args)
    container = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
