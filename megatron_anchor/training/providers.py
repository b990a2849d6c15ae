"""Datasets and model config for Megatron's `pretrain`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_anchor import patches
from megatron_anchor.attention.backends import choose_backend
from megatron_anchor.attention.layer_spec import layer_spec_provider
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.context_parallel.sizes import GATHER_LIMIT
from megatron_anchor.errors import UserError
from megatron_anchor.packing import blend
from megatron_anchor.packing.anchor_token import choose_anchor
from megatron_anchor.packing.balance import BalancedDataset, Balancing
from megatron_anchor.packing.blend import corpora_of
from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig
from megatron_anchor.packing.effective_context import weigh_by_context
from megatron_anchor.packing.length_schedule import LengthSchedule, ScheduledDataset
from megatron_anchor.terminal import say
from megatron_anchor.training import anchor_copies, bad_batch, samples_read, target_units
from megatron_anchor.training.arguments import (
    model_windows,
    packing_settings,
    rope_scaling,
    rotary_base,
    rotary_percent,
)
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.training.data_arguments import evaluates
from megatron_anchor.training.data_needs import require_enough, validation_samples
from megatron_anchor.training.fill_in_rules import fill_in_the_middle
from megatron_anchor.training.full_validation import whole_batches
from megatron_anchor.training.latent_rules import is_latent
from megatron_anchor.training.same_data import require_same_data
from megatron_anchor.training.slot_work import slot_work
from megatron_anchor.training.validation import attention_request, gather_memory, rotary_dim


def anchor_token_id(args: Namespace, tokenizer: Any) -> int:
    """Choose the anchor: what --anchor-token says, else the tokenizer's bos, else its eos.

    Raises:
        UserError: if it is not there, or the id is outside the vocabulary.
    """
    wanted = args.anchor_token
    bos = token_id(tokenizer, "bos_id", "bos")
    eos = token_id(tokenizer, "eos_id", "eod")
    value = choose_anchor(wanted, bos=bos, eos=eos)
    if value is None:
        raise UserError(
            f"the tokenizer ({args.tokenizer_type}) has no {wanted or 'bos and no eos'}; set "
            "--anchor-token to a token id" + (" or 'eos'" if wanted == "bos" else "")
        )
    if not 0 <= value < tokenizer.vocab_size:
        names = {None: "bos or eos", "bos": "bos", "eos": "eos"}
        origin = f" ({names[wanted]} of the tokenizer)" if wanted in names else ""
        raise UserError(
            f"the anchor token {value}{origin} is outside the vocabulary of "
            f"{tokenizer.vocab_size}; set --anchor-token"
        )
    return value


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
        head_dim=rotary_dim(args),
        base=rotary_base(args),
        fraction=rotary_percent(args),
        interleaved=args.rotary_interleaved or is_latent(args),
        scaling=rope_scaling(args),
        max_position_embeddings=args.max_position_embeddings,
        angle_dtype=args.rope_angle_dtype,
    )


def model_config(args: Namespace) -> Any:
    """Build Megatron's GPTModelConfig with our layer spec and no position embedding of its own.

    The command line stays at ``--position-embedding-type rope``, which is what checkpoints record.
    """
    choice = choose_backend(args.anchor_attention_backend, attention_request(args))
    rotary = rotary_settings(args)
    print_rank_0(
        f"> attention pattern {args.attention_pattern}, RoPE base {rotary.base:g}, rotation in "
        f"float32 (angles {rotary.angle_dtype})\n> {choice.explain()}"
    )
    for warning in anchor_copies.warnings(args):
        print_rank_0(f"> warning: {warning}")
    split = context_parallel(args)
    if args.context_parallel_size > 1:
        print_rank_0(f"> {split.explain()}")
    config = gpt_config_from_args(args)
    config.position_embedding_type = "none"
    config.transformer_layer_spec = layer_spec_provider(
        rotary=rotary,
        backend=choice.name,
        precision=args.attention_precision,
        context_parallel=split.kind,
        gather_memory=gather_memory_limit(args),
        anchor_in_window=args.anchor_in_window,
    )
    return config


def gather_memory_limit(args: Namespace) -> int:
    """Bytes of --kv-gather-memory-mib; by default enough for one key/value head."""
    if args.kv_gather_memory_mib is not None:
        return args.kv_gather_memory_mib << 20
    return max(GATHER_LIMIT, gather_memory(args).least())


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
        anchor_token_id=anchor_token_id(args, tokenizer),
        fill_in_the_middle=fill_in_the_middle(args, tokenizer),
        document_lists=document_lists(args.document_list, blend, blend_per_split),
        attention_windows=model_windows(args),
        context_parts=context_parallel(args).split.parts,
        pad_token_id=pad if pad is not None and pad < tokenizer.vocab_size else 0,
        vocab_size=tokenizer.vocab_size,
        **vars(packing_settings(args)),
    )


def document_lists(
    given: list[str] | None, blend: Any, blend_per_split: Any
) -> dict[str, str] | None:
    """Read --document-list: corpus prefix to list, "" for the only training corpus.

    Args:
        given: LIST.npy, or PREFIX=LIST.npy for each of several corpora.
        blend: Megatron's blend of all splits, or None.
        blend_per_split: Megatron's blends of each split, or None.

    Raises:
        UserError: a list without a known prefix among several corpora, or a doubled prefix.
    """
    if not given:
        return None
    corpora = (blend_per_split[0] if blend is None else blend)[0]
    lists: dict[str, str] = {}
    for text in given:
        # Paths may hold a "=" too, so the corpora say where the prefix ends.
        prefix = max((c for c in corpora if text.startswith(f"{c}=")), key=len, default="")
        path = text.removeprefix(f"{prefix}=") if prefix else text
        if not prefix and len(corpora) > 1:
            raise UserError(
                f"--document-list {text}: there are {len(corpora)} training corpora; give "
                f"CORPUS_PREFIX=LIST.npy with one of {', '.join(corpora)}"
            )
        if prefix in lists:
            raise UserError(f"--document-list {text}: this corpus has another list already")
        lists[prefix] = path
    return lists


def balancing(args: Namespace) -> Balancing | None:
    """Settings of --balance-attention-work, None without it."""
    if not args.balance_attention_work:
        return None
    return Balancing(
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        ranks=mpu.get_data_parallel_world_size(),
        first=_first_of_a_batch(args),
        linear=slot_work(args),
    )


def _first_of_a_batch(args: Any) -> int:
    """Number of a sample with which a global batch begins."""
    if getattr(args, "phase_transition_iterations", None):  # each phase counts its own batches
        return 0
    return args.consumed_train_samples % args.global_batch_size


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build train, validation and test datasets on every rank.

    Args:
        num_samples: samples of each split, by Megatron.
        vp_stage: chunk of an interleaved pipeline; all of them read the same samples.

    Raises:
        UserError: the data cannot be used, holds too few samples, or differs between ranks.
    """
    args = get_args()
    config = dataset_config(args, get_tokenizer())
    needed = [num_samples[0], validation_samples(args, num_samples[1]), num_samples[2]]
    patches.apply(blend.PATCH)
    print_rank_0(f"> packing documents behind anchor token {config.anchor_token_id} ...")
    train, valid, test = BlendedMegatronDatasetBuilder(
        PackedDataset,
        needed,
        lambda: True,
        config,
    ).build()
    require_same_data([train, valid, test], config)
    require_enough(train, valid, test, args=args, needed=needed)
    if not evaluates(args):
        valid = test = None  # Megatron's loaders refuse sets that are empty or were read before
    if args.full_validation:
        valid = _whole_batches(valid, args)
    if train is not None and torch.distributed.get_rank() == 0 and not vp_stage:
        for warning in samples_read.note(train, args, needed=num_samples[0]):
            say(f"> warning: {warning}")
    if train is not None and config.loss_weighting == "effective-context":
        for line in weigh_by_context(train).table():
            print_rank_0(f"> {line}")
    target_units.choose(args, train, valid, test)
    if train is not None and args.document_length_schedule:
        schedule = LengthSchedule.parse(args.document_length_schedule)
        size, first = args.global_batch_size, _first_of_a_batch(args)
        train = ScheduledDataset(train, schedule, global_batch_size=size, first=first)
    balance = balancing(args)
    if balance is not None and train is not None:
        train = BalancedDataset(train, balance)
        print_rank_0(f"> {train.report()}")
    bad_batch.register(train, valid, test)
    return train, valid, test


def _whole_batches(valid: Any, args: Namespace) -> Any:
    """The validation sets of --full-validation, cut for this layout; None stays None."""
    if isinstance(valid, list):
        return [_whole_batches(one, args) for one in valid]
    if valid is None:
        return None
    whole = whole_batches(valid, args, ranks=mpu.get_data_parallel_world_size())
    print_rank_0(
        f"> full validation: {len(valid)} samples of {', '.join(_paths(valid))} in "
        f"{len(whole)} micro-batches of {whole.micro_batch_size}"
    )
    return whole


def _paths(dataset: Any) -> list[str]:
    return [str(corpus.dataset_path) for corpus in corpora_of(dataset)]


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron
