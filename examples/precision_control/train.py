"""Megatron's pretraining loop with our pieces, and the scores of the trained model at its end.

    python -m torch.distributed.run -m megatron_anchor.on_cpu examples/precision_control/train.py \\
        --precision-control FOLDER --score-documents 16 --score-file scores.json ...

docs/own-program.md explains the pieces. Megatron calls `non_loss_data_func` with the model when it
evaluates, here once, after the last step.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu_demo"))

from bfloat16_on_cpu import exact_products
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from scoring import score_model, scoring_model

from megatron_anchor import compat
from megatron_anchor.training import host_patches, loaded_model
from megatron_anchor.training.arguments import add_anchor_arguments
from megatron_anchor.training.forward_step import forward_step
from megatron_anchor.training.providers import anchor_token_id, datasets_provider, model_config
from megatron_anchor.training.validation import require_supported
from megatron_anchor.whole_files import atomic_write_text


def main() -> None:
    """Train, then score."""
    compat.quiet_expected_warnings()
    args = compat.parse_and_validate_args(
        add_arguments,
        check=require_supported,
        restore=loaded_model.restore_model,
        compare=loaded_model.require_same_model,
    )
    host_patches.install(args)
    container = pretrain_cfg_container_from_args(args, model_config(args))
    with exact_products():
        pretrain(
            container,
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            non_loss_data_func=score,
        )


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the package's flags and this program's."""
    add_anchor_arguments(parser)
    group = parser.add_argument_group("precision control")
    group.add_argument("--precision-control", type=Path, required=True, help="folder of the corpus")
    group.add_argument("--score-file", type=Path, required=True, help="JSON to write")
    group.add_argument("--score-documents", type=int, default=32, help="of every length and kind")
    return parser


def score(model: list[Any]) -> None:
    """Score the model and write the JSON."""
    args = get_args()
    scores = score_model(
        scoring_model(model),
        args.precision_control,
        anchor=anchor_token_id(args, get_tokenizer()),
        anchor_position=args.anchor_position,
        documents=args.score_documents,
    )
    with atomic_write_text(args.score_file) as stream:
        stream.write(json.dumps(asdict(scores)) + "\n")


if __name__ == "__main__":
    main()
