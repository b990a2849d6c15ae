"""Datasets and model config for Megatron's `pretrain`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_anchor.attention.backends import choose_backend
from megatron_anchor.attention.layer_spec import layer_spec_provider
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig
from megatron_anchor.training.arguments import rope_scaling
from megatron_anchor.training.validation import attention_request, head_dim


def anchor_token_id(args: Namespace, tokenizer: Any) -> int:
    """Choose the anchor: --anchor-token-id, else the tokenizer's bos, else its eos.

    Raises:
        ValueError: if none of them is there, or the id is outside the vocabulary.
    """
    candidates = {
        "--anchor-token-id": args.anchor_token_id,
        "the tokenizer's bos": token_id(tokenizer, "bos_id", "bos"),
        "the tokenizer's eos": token_id(tokenizer, "eos_id", "eod"),
    }
    for source, value in candidates.items():
        if value is None:
            continue
        if not 0 <= value < tokenizer.vocab_size:
            raise ValueError(
                f"anchor token {value} (from {source}) is outside the vocabulary of "
                f"{tokenizer.vocab_size}; set --anchor-token-id"
            )
        return value
    raise ValueError(
        f"the tokenizer ({args.tokenizer_type}) has neither bos nor eos; set --anchor-token-id"
    )


def token_id(tokenizer: Any, *names: str) -> int | None:
    """Read the first of a tokenizer's special ids that is set; Megatron's tokenizers differ."""
    for name in names:
        try:
            value = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError):
            continue
        if value is not None and value >= 0:
            return int(value)
    return None


def rotary_settings(args: Namespace) -> RotarySettings:
    """Read the rotation's settings from Megatron's arguments."""
    return RotarySettings(
        head_dim=head_dim(args),
        base=float(args.rotary_base),
        fraction=args.rotary_percent,
        interleaved=args.rotary_interleaved,
        scaling=rope_scaling(args),
        max_position_embeddings=args.max_position_embeddings,
        angle_dtype=args.rope_angle_dtype,
    )


def model_config(args: Namespace) -> Any:
    """Build Megatron's GPTModelConfig with our layer spec and no position embedding of its own.

    The command line stays at ``--position-embedding-type rope``, which is what checkpoints record.
    """
    backend = choose_backend(args.anchor_attention_backend, attention_request(args))
    rotary = rotary_settings(args)
    print_rank_0(
        f"> attention pattern {args.attention_pattern}, kernel {backend}, "
        f"RoPE base {rotary.base:g}, rotation in float32 (angles {rotary.angle_dtype})"
    )
    config = gpt_config_from_args(args)
    config.position_embedding_type = "none"
    config.transformer_layer_spec = layer_spec_provider(rotary=rotary, backend=backend)
    return config


def dataset_config(args: Namespace, tokenizer: Any) -> PackedDatasetConfig:
    """Build the dataset's config from Megatron's data arguments and ours."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    pad = token_id(tokenizer, "pad_id", "pad", "eod")
    return PackedDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        attention_pattern=args.attention_pattern,
        anchor_token_id=anchor_token_id(args, tokenizer),
        pad_token_id=pad if pad is not None and pad < tokenizer.vocab_size else 0,
        vocab_size=tokenizer.vocab_size,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build train, validation and test datasets on tensor-parallel rank 0 of every stage.

    Args:
        num_samples: samples of each split, by Megatron.
        vp_stage: unused; every stage reads the same samples.
    """
    args = get_args()
    config = dataset_config(args, get_tokenizer())
    print_rank_0(f"> packing documents behind anchor token {config.anchor_token_id} ...")
    return BlendedMegatronDatasetBuilder(
        PackedDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0,
        config,
    ).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron
