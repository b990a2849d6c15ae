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
from megatron_anchor.attention.backends.te_rules import FIRST_VERSION
from megatron_anchor.attention.rope import RotarySettings, inverse_frequencies
from megatron_anchor.packing.domains import check_format
from megatron_anchor.packing.patterns import ANCHORED, check_anchor, check_attention_pattern
from megatron_anchor.training import last_checkpoints, saved_checkpoints
from megatron_anchor.training.arguments import (
    context_parallel,
    document_alignment,
    interleaving,
    rope_scaling,
    splits_documents,
)

UNSUPPORTED_FLAGS = {
    "multi_latent_attention": "--multi-latent-attention: MLA rotates only a part of each key and "
    "shares it between heads, which this attention module does not do; train such a model with "
    "Megatron's own pretrain_gpt.py",
    "mtp_num_layers": "--mtp-num-layers: multi-token prediction builds its own stock attention, "
    "which would ignore document boundaries without a word",
    "sft": "--sft: its dataset packs by itself; use a plain .bin/.idx corpus",
    "fim_data": "--fim-data: fill-in-the-middle rewrites samples after packing",
    "mock_data": "--mock-data: packing needs real documents; `make demo` builds a small corpus",
    "hybrid_context_parallel": "--hybrid-context-parallel: use --context-parallel-size with "
    "--cp-comm-type a2a",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking: "
    "--attention-pattern intra-document-reset is that mask, with right positions under context "
    "parallelism",
    "reset_position_ids": "--reset-position-ids: use --attention-pattern intra-document-reset",
    "reset_attention_mask": "--reset-attention-mask: use --attention-pattern intra-document",
    "spec": "--spec: the layer spec is ours; in your own program take "
    "megatron_anchor.attention.layer_spec.anchor_block_spec",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path: layers of different "
    "shapes have their own layer spec",
    "experimental_attention_variant": "--experimental-attention-variant: it would replace this "
    "package's attention",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm: its schedule does not "
    "pass packed documents on to the layers",
    "window_size": "--window-size: sliding-window attention is not implemented",
    "log_max_attention_logit": "--log-max-attention-logit: the kernels do not report logits",
    "qk_clip": "--qk-clip: the kernels do not report logits",
    "yaml_cfg": "--yaml-cfg: pass the arguments on the command line",
    "use_megatron_fsdp": "--use-megatron-fsdp: never run with packed documents; use "
    "--use-distributed-optimizer",
    "use_torch_fsdp2": "--use-torch-fsdp2: never run with packed documents; use "
    "--use-distributed-optimizer",
    "dataloader_fast_cache_load": "--dataloader-fast-cache-load: it opens the caches of Megatron's "
    "own dataset unseen; packed datasets check theirs",
    "dataloader_defer_npy_index_mmap": "--dataloader-defer-npy-index-mmap: packed datasets open "
    "their index at first use anyway",
    "per_dataset_sequences_path": "--per-dataset-sequences-path: it saves Megatron's own dataset "
    "from reading the .idx files; packed datasets read and check them",
    "perform_rl_step": "--perform-rl-step: reinforcement learning has its own data path",
}
"""Flag (as in Megatron's namespace) to the reason why it is refused when it is set."""


def refusals(args: Namespace) -> list[str]:
    """Collect the reasons why this run cannot start.

    Args:
        args: Megatron's namespace with our flags, before or after Megatron's own validation.

    Returns:
        Reasons, empty when all is well.
    """
    return [reason for rule in RULES for reason in rule(args)]


def require_supported(args: Namespace) -> None:
    """Refuse unsupported arguments.

    Raises:
        ValueError: with all reasons at once.
    """
    reasons = refusals(args)
    if reasons:
        raise ValueError(
            "megatron_anchor cannot run with these arguments:\n  - " + "\n  - ".join(reasons)
        )


def attention_request(args: Namespace) -> AttentionRequest:
    """Say what the arguments ask of an attention kernel."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    if args.attention_precision == "fp32":
        dtype = torch.float32
    kinds = tuple(args.cp_comm_type) if args.context_parallel_size > 1 else ()
    tp, sizes = args.tensor_model_parallel_size, args.hierarchical_context_parallel_sizes
    return AttentionRequest(
        head_dim=head_dim(args),
        dtype=dtype,
        query_heads=max(1, args.num_attention_heads // tp),
        kv_heads=max(1, _query_groups(args) // tp),
        document_alignment=document_alignment(args),
        context_parallel_size=args.context_parallel_size,
        context_parallel_kinds=kinds,
        context_parallel=context_parallel(args),
        a2a_size=sizes[0] if sizes else None,
        preferred=getattr(args.attention_backend, "name", args.attention_backend),
        dropout=args.attention_dropout,
        deterministic=args.deterministic_mode,
        hardware=this_hardware(),
    )


def head_dim(args: Namespace) -> int:
    """Dimensions of an attention head: --kv-channels, else hidden size / heads."""
    return args.kv_channels or args.hidden_size // args.num_attention_heads


def _unsupported_flags(args: Namespace) -> Iterator[str]:
    for name, reason in UNSUPPORTED_FLAGS.items():
        if getattr(args, name, None) not in (None, False):
            yield reason


def _pattern(args: Namespace) -> Iterator[str]:
    try:
        check_attention_pattern(args.attention_pattern)
    except ValueError as error:
        yield str(error)


def _positions(args: Namespace) -> Iterator[str]:
    kind = args.position_embedding_type
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
        scaling = rope_scaling(args)
        if next(_shape(args), None) is None:
            settings = RotarySettings(
                head_dim=head_dim(args),
                fraction=args.rotary_percent,
                scaling=scaling,
                max_position_embeddings=args.max_position_embeddings or 0,
            )
            if scaling:
                inverse_frequencies(settings, seq_length=args.seq_length)
    except ValueError as error:
        yield str(error)


def _shape(args: Namespace) -> Iterator[str]:
    for name in ("hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(args, name) is None:
            yield f"--{name.replace('_', '-')} is missing"


def _divisibility(args: Namespace) -> Iterator[str]:
    if next(_shape(args), None):
        return
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    heads, groups = args.num_attention_heads, _query_groups(args)
    pieces = cp * (tp if args.sequence_parallel else 1)
    unit = 2 * pieces if cp > 1 else pieces  # Megatron itself insists on the factor 2
    if args.seq_length % unit:
        yield (
            f"--seq-length {args.seq_length} is not a multiple of {unit} (context parallel {cp}"
            + (" x 2" if cp > 1 else "")
            + (f" x tensor parallel {tp}" if args.sequence_parallel else "")
            + f"); the next lower multiple is {args.seq_length // unit * unit}"
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
    elif (cp > 1 and not splits_documents(args)) and (
        reason := ulysses.why_not(
            query_heads=heads // tp, kv_heads=max(1, groups // tp), cp_size=cp
        )
    ):
        yield reason


def _query_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _context_parallel_kinds(args: Namespace) -> Iterator[str]:
    kinds, layers = args.cp_comm_type, args.num_layers
    if layers is not None and len(kinds) not in (1, layers):
        yield (
            f"--cp-comm-type {' '.join(kinds)}: {len(kinds)} kinds for {layers} layers; give one "
            "for all of them, or one a layer (--num-layers)"
        )
    for kind in dict.fromkeys(kinds):
        if kind not in FIRST_VERSION:
            yield (
                f"unknown --cp-comm-type {kind!r}: expected one of {', '.join(FIRST_VERSION)}"
                + ("; write it all_gather" if kind == "allgather" else "")
            )


def _backend(args: Namespace) -> Iterator[str]:
    if next(_shape(args), None) or next(_context_parallel_kinds(args), None):
        return
    try:
        choose_backend(args.anchor_attention_backend, attention_request(args))
    except ValueError as error:
        yield str(error)


def _host_features(args: Namespace) -> Iterator[str]:
    """What the host would answer with a bare assertion or traceback, or not at all."""
    if args.eval_interval is None:
        yield (
            "--eval-interval is missing: Megatron needs it even with --eval-iters 0; any number "
            "larger than --train-iters will do"
        )
    if args.full_validation and not args.multiple_validation_sets:
        yield "--full-validation: Megatron 0.19.2 needs --multiple-validation-sets with it"
    if args.multiple_validation_sets and not args.full_validation:
        yield "--multiple-validation-sets: Megatron 0.19.2 needs --full-validation with it"
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
    if args.fp8 and args.transformer_impl != "transformer_engine":
        yield f"--fp8-format {args.fp8}: only --transformer-impl transformer_engine has FP8 layers"
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        yield f"--softmax-type {args.softmax_type}: the kernels have no sink logit"
    if getattr(args, "cuda_graph_impl", "none") != "none":
        yield (
            f"--cuda-graph-impl {args.cuda_graph_impl}: the number of documents changes with every "
            "sample, a captured graph cannot follow"
        )
    if args.transformer_impl == "inference_optimized":
        yield "--transformer-impl inference_optimized is for inference"


def _packing(args: Namespace) -> Iterator[str]:
    """What PackedDatasetConfig would refuse too, before anything is set up."""
    alignment = document_alignment(args)
    if alignment < 1 or (args.seq_length and args.seq_length % alignment):
        yield (
            f"--document-alignment {alignment}: --seq-length {args.seq_length} must be a multiple "
            "of it"
        )
    if args.anchor_position < 0:
        yield f"--anchor-position {args.anchor_position}: expected 0 or more"
    if args.anchor_position and args.attention_pattern not in ANCHORED:
        yield (
            f"--anchor-position {args.anchor_position} has a meaning under --attention-pattern "
            f"{' and '.join(ANCHORED)} only, got {args.attention_pattern}"
        )
    if alignment > 1 and args.attention_pattern == "anchor-masked":
        yield (
            "--attention-pattern anchor-masked makes anchors segments of one slot, which no "
            f"--document-alignment {alignment} (nor Transformer Engine's context parallelism) can "
            "keep; leave it out, and use --cp-comm-type a2a"
        )
    for check in (
        lambda: check_anchor(args.anchor_token),
        lambda: interleaving(args),
        lambda: check_format(args.domain_tag_format),
    ):
        try:
            check()
        except ValueError as error:
            yield str(error)
    if args.interleave_chunks and args.attention_pattern == "intra-document-reset":
        yield (
            "--interleave-chunks has no effect under --attention-pattern intra-document-reset, "
            "where every document counts its positions alone"
        )


def _blend(args: Namespace) -> Iterator[str]:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for entry in getattr(args, name, None) or ():
            try:
                weight = float(entry)
            except ValueError:
                continue
            if weight <= 0:
                flag = f"--{name.replace('_', '-')}"
                yield f"{flag} gives the weight {entry}: expected above 0; leave that corpus out"


def _balance(args: Namespace) -> Iterator[str]:
    if not args.balance_attention_work:
        return
    if args.rampup_batch_size is not None:
        yield (
            "--balance-attention-work orders the samples of batches of one size; leave out "
            "--rampup-batch-size"
        )
    if args.dataloader_type not in (None, "single"):
        yield (
            f"--balance-attention-work needs --dataloader-type single, got {args.dataloader_type}: "
            "others choose the samples of a batch by themselves"
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
    _unsupported_flags,
    _pattern,
    _positions,
    _shape,
    _divisibility,
    _context_parallel_kinds,
    _backend,
    _host_features,
    _packing,
    _blend,
    _balance,
    _bad_batch,
    saved_checkpoints.refusals,
    last_checkpoints.refusals,
)
