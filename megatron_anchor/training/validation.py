"""What is refused before training starts, each with its reason and the remedy.

Every rule is a pure function of the parsed arguments, so the reasons are tested without a model.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from megatron_anchor import compat
from megatron_anchor.attention import ulysses
from megatron_anchor.attention.backends import AttentionRequest, choose_backend, this_hardware
from megatron_anchor.attention.backends.request import TRANSFORMER_ENGINE
from megatron_anchor.attention.gather import Memory
from megatron_anchor.attention.rope import RotarySettings, inverse_frequencies
from megatron_anchor.attention.router import unsupported_reasons
from megatron_anchor.errors import UserError
from megatron_anchor.packing import length_schedule
from megatron_anchor.packing.anchor_token import check_anchor
from megatron_anchor.packing.patterns import attention_patterns
from megatron_anchor.terminal import say
from megatron_anchor.training import (
    data_arguments,
    fill_in_rules,
    host_flags,
    last_checkpoints,
    latent_rules,
    logit_rules,
    multi_token_rules,
    number_rules,
    object_storage_rules,
    run_rules,
    saved_checkpoints,
    sharding_rules,
)
from megatron_anchor.training.arguments import (
    document_alignment,
    model_windows,
    packing_settings,
    rope_scaling,
    rotary_base,
    rotary_percent,
    settle,
)
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.training.context_parallel import refusals as context_refusals
from megatron_anchor.training.latent_rules import is_latent
from megatron_anchor.windows import FULL


def refusals(args: Namespace) -> list[str]:
    """Collect the reasons why this run cannot start.

    Args:
        args: Megatron's namespace with our flags, before or after Megatron's own validation.

    Returns:
        Reasons, empty when all is well.
    """
    if without_meaning := list(number_rules.refusals(args)):
        return without_meaning
    return [reason for rule in RULES for reason in rule(args)]


def require_supported(args: Namespace) -> None:
    """Refuse unsupported arguments; say on rank 0 which of Megatron's change nothing here.

    What was said in two ways has one afterwards: the RoPE base stands in ``args.rotary_base``
    alone, and the length in ``args.seq_length``, as checkpoints will record them.

    Args:
        args: Megatron's namespace with our flags, before or after Megatron's own validation.

    Raises:
        UserError: with all reasons at once.
    """
    reasons = refusals(args)
    if reasons:
        raise UserError(
            "megatron_anchor cannot run with these arguments:\n  - " + "\n  - ".join(reasons)
        )
    if not compat.is_validated(args):
        settle(args)
        _say_what_has_no_effect(args)


def _say_what_has_no_effect(args: Namespace) -> None:
    found = host_flags.without_effect(args)
    if found and args.rank == 0:
        say("> these arguments have no effect here:", *(f">   {reason}" for reason in found))


def attention_request(args: Namespace) -> AttentionRequest:
    """Say what the arguments ask of an attention kernel."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    if args.attention_precision == "fp32":
        dtype = torch.float32
    split = context_parallel(args)
    kinds = split.comm_types if args.context_parallel_size > 1 else ()
    tp, sizes = args.tensor_model_parallel_size, args.hierarchical_context_parallel_sizes
    return AttentionRequest(
        head_dim=head_dim(args),
        value_dim=value_dim(args),
        dtype=dtype,
        window=_has_windows(args),
        anchor_in_window=args.anchor_in_window and _has_windows(args),
        sink=args.softmax_type != "vanilla",
        query_heads=max(1, args.num_attention_heads // tp),
        kv_heads=max(1, _query_groups(args) // tp),
        document_alignment=document_alignment(args),
        context_parallel_size=args.context_parallel_size,
        context_parallel_kinds=kinds,
        context_parallel=split.kind,
        a2a_size=sizes[0] if sizes else None,
        preferred=getattr(args.attention_backend, "name", args.attention_backend),
        dropout=args.attention_dropout,
        deterministic=args.deterministic_mode,
        hardware=this_hardware(),
    )


def _has_windows(args: Namespace) -> bool:
    return bool(args.window_size) and model_windows(args) != FULL


def head_dim(args: Namespace) -> int:
    """Dimensions of a head's query and key: --kv-channels, else hidden size / heads.

    With multi-latent attention those with and those without positions.
    """
    if is_latent(args):
        return args.qk_head_dim + args.qk_pos_emb_head_dim
    return args.kv_channels or args.hidden_size // args.num_attention_heads


def value_dim(args: Namespace) -> int:
    """Dimensions of a head's value."""
    return args.v_head_dim if is_latent(args) else head_dim(args)


def rotary_dim(args: Namespace) -> int:
    """Dimensions of a head in which its rotation lies, all of them or a part."""
    return args.qk_pos_emb_head_dim if is_latent(args) else head_dim(args)


def _host_flags(args: Namespace) -> Iterator[str]:
    if not compat.is_validated(args):
        yield from host_flags.refusals(args)


def _positions(args: Namespace) -> Iterator[str]:
    # The old switch wins over the type, as in Megatron's validation.
    kind = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    if kind == "yarn":
        yield (
            "--position-embedding-type yarn: pass --position-embedding-type rope and "
            '--rope-parameters \'{"rope_type": "yarn", "factor": ...}\' (Hugging Face\'s formula)'
        )
    elif kind != "rope":
        yield (
            f"--position-embedding-type {kind}: AnchorAttention is about rotary positions; pass "
            "--position-embedding-type rope (learned_absolute is Megatron's default)"
        )
    try:
        scaling, base, fraction = rope_scaling(args), rotary_base(args), rotary_percent(args)
        if next(_shape(args), None) is None:
            settings = RotarySettings(
                head_dim=rotary_dim(args),
                base=base,
                fraction=fraction,
                scaling=scaling,
                max_position_embeddings=args.max_position_embeddings or 0,
            )
            if scaling:
                inverse_frequencies(settings, seq_length=_length(args))
    except ValueError as error:
        yield str(error)


def _shape(args: Namespace) -> Iterator[str]:
    for name, other in (
        ("num_layers", "encoder_num_layers"),
        ("hidden_size", None),
        ("num_attention_heads", None),
        ("seq_length", "encoder_seq_length"),
        ("micro_batch_size", None),
    ):
        if getattr(args, name) is None and getattr(args, other or name) is None:
            yield f"--{name.replace('_', '-')} is missing"


def _length(args: Namespace) -> int:
    """Slots of a sample; Megatron knows them by two names."""
    return args.seq_length or args.encoder_seq_length


def _divisibility(args: Namespace) -> Iterator[str]:
    if next(_shape(args), None):
        return
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    heads, groups = args.num_attention_heads, _query_groups(args)
    pieces = cp * (tp if args.sequence_parallel else 1)
    unit = 2 * pieces if cp > 1 else pieces  # Megatron itself insists on the factor 2
    if _length(args) % unit:
        yield (
            f"--seq-length {_length(args)} is not a multiple of {unit} (context parallel {cp}"
            + (" x 2" if cp > 1 else "")
            + (f" x tensor parallel {tp}" if args.sequence_parallel else "")
            + f"); the next lower multiple is {_length(args) // unit * unit}"
        )
    if args.kv_channels is None and args.hidden_size % heads:
        yield (
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {heads}; "
            "change one of them or set --kv-channels"
        )
    if heads % tp:
        yield (
            f"--num-attention-heads {heads} cannot be shared by --tensor-model-parallel-size {tp}"
        )
    elif heads % groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}"
    elif groups % tp and tp % groups:
        yield (
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must be a "
            "multiple of the other"
        )
    elif cp > 1 and next(context_refusals(args), None) is None:
        split = context_parallel(args)
        if split.kind != TRANSFORMER_ENGINE and (
            reason := ulysses.unsupported_reason(
                query_heads=heads // tp, kv_heads=max(1, groups // tp), cp_size=split.heads_ranks
            )
        ):
            yield reason


def _query_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _windows(args: Namespace) -> Iterator[str]:
    size, frequency = args.window_size, args.window_attn_skip_freq
    if not size:
        if frequency is not None:
            yield "--window-attn-skip-freq has no effect without --window-size"
        if args.anchor_in_window:
            yield "--anchor-in-window has no effect without --window-size"
        return
    if len(size) != 2 or size[0] < -1 or size[1] not in (0, -1):
        yield (
            f"--window-size {','.join(map(str, size))}: expected W-1,0 for a causal window of W "
            "keys, the query's own included"
        )
    if isinstance(frequency, list) and args.num_layers and len(frequency) != args.num_layers:
        yield (
            f"--window-attn-skip-freq {frequency}: {len(frequency)} entries for --num-layers "
            f"{args.num_layers}; give one per layer"
        )
    seen = [p.name for p in attention_patterns() if p.one_anchor and p.has_whole_documents]
    if args.anchor_in_window and args.attention_pattern not in seen:
        yield (
            f"--anchor-in-window is for --attention-pattern {' and '.join(seen)}, got "
            f"{args.attention_pattern}"
        )


def _gather_memory(args: Namespace) -> Iterator[str]:
    limit = args.kv_gather_memory_mib
    if limit is None or next(_shape(args), None) or next(context_refusals(args), None):
        return
    if context_parallel(args).keys_ranks == 1:
        yield (
            f"--kv-gather-memory-mib {limit} has no effect here: keys and values are gathered "
            "under --cp-comm-type gather and a2a+gather"
        )
    elif limit << 20 < (least := gather_memory(args).least()):
        yield (
            f"--kv-gather-memory-mib {limit}: a single key/value head needs "
            f"{-(-least >> 20)} MiB at --seq-length {args.seq_length}; give at least that, or "
            "leave the flag out"
        )


def gather_memory(args: Namespace) -> Memory:
    """What gathered keys and values take."""
    slots = args.seq_length * args.micro_batch_size
    itemsize = attention_request(args).dtype.itemsize
    width = head_dim(args) + value_dim(args)
    return Memory(slots=slots, longest=args.seq_length, width=width, itemsize=itemsize)


def _backend(args: Namespace) -> Iterator[str]:
    rules = (_shape, context_refusals, _windows)
    if any(next(rule(args), None) for rule in rules):
        return
    try:
        choose_backend(args.anchor_attention_backend, attention_request(args))
    except ValueError as error:
        yield str(error)


def _host_features(args: Namespace) -> Iterator[str]:
    """What the host would answer with a bare assertion or traceback, or not at all."""
    if args.full_validation and (
        args.num_layers_per_virtual_pipeline_stage
        or args.num_virtual_stages_per_pipeline_rank
        or getattr(args, "virtual_pipeline_model_parallel_size", None)
    ):
        yield (
            "--full-validation: Megatron 0.19.2 mixes up validation sets and the chunks of "
            "interleaved pipelines; leave out --num-layers-per-virtual-pipeline-stage (or "
            "--num-virtual-stages-per-pipeline-rank), or evaluate over --eval-iters"
        )
    if args.transformer_impl == "transformer_engine" and not compat.have_transformer_engine():
        yield (
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            "pip install 'megatron-anchor[te]', or use --transformer-impl local"
        )


def _experts(args: Namespace) -> Iterator[str]:
    if args.num_experts:
        yield from unsupported_reasons(args)


def _packing(args: Namespace) -> Iterator[str]:
    yield from packing_settings(args).refusals(sequence_length=_length(args))
    try:
        check_anchor(args.anchor_token)
    except ValueError as error:
        yield str(error)


def _batches(args: Namespace) -> Iterator[str]:
    """Rules of what looks at whole global batches."""
    text = args.document_length_schedule
    yield from length_schedule.refusals(text, sequence_length=_length(args) or 0)
    for flag, why in (
        ("--balance-attention-work" * args.balance_attention_work, "orders the samples of batches"),
        ("--document-length-schedule" * bool(text), "bounds the samples of batches alike"),
    ):
        if not flag:
            continue
        if args.step_batch_size_schedule is not None:
            yield f"{flag} {why} of one size; leave out --step-batch-size-schedule"
        if args.decrease_batch_size_if_needed:
            yield f"{flag} {why} of one size; leave out --decrease-batch-size-if-needed"
        if args.dataloader_type not in (None, "single"):
            yield (
                f"{flag} needs --dataloader-type single, got {args.dataloader_type}: others choose "
                "the samples of a batch by themselves"
            )


def _bad_batch(args: Namespace) -> Iterator[str]:
    if args.dump_bad_batch is None:
        return
    if args.fp16 and not args.loss_scale:
        yield (
            "--dump-bad-batch: with --fp16 and a dynamic loss scale, Inf and NaN are the signals "
            "that lower it, and stop nothing; set --loss-scale, or train with --bf16"
        )
    elif not args.check_for_nan_in_loss_and_grad:
        yield "--dump-bad-batch: --no-check-for-nan-in-loss-and-grad looks at no loss"


RULES: tuple[Callable[[Namespace], Iterator[str]], ...] = (
    _host_flags,
    _packing,
    _positions,
    _shape,
    _divisibility,
    context_refusals,
    _windows,
    _gather_memory,
    _backend,
    _host_features,
    latent_rules.refusals,
    logit_rules.refusals,
    multi_token_rules.refusals,
    _experts,
    data_arguments.refusals,
    fill_in_rules.refusals,
    object_storage_rules.refusals,
    run_rules.refusals,
    sharding_rules.refusals,
    _batches,
    _bad_batch,
    saved_checkpoints.refusals,
    last_checkpoints.refusals,
)
