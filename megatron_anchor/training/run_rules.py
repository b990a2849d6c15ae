"""Arguments of the run that Megatron would answer after minutes, or with a bare assertion."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_anchor import compat


def refusals(args: Namespace) -> Iterator[str]:
    """Reasons why the run could not begin, or not come to its end."""
    yield from _length(args)
    yield from _learning_rate(args)
    yield from _validation_sets(args)
    yield from _vocabulary(args)
    yield from _norms(args)
    yield from _recomputation(args)
    yield from _packages(args)
    yield from _interleaved_pipeline(args)


def _length(args: Namespace) -> Iterator[str]:
    if args.train_iters is None and args.train_samples is None:
        yield "--train-iters (or --train-samples) is missing"
    if args.phase_transition_iterations and not args.train_samples:
        yield (
            f"--phase-transition-iterations {args.phase_transition_iterations}: Megatron counts "
            "phases in samples; give --train-samples in place of --train-iters"
        )
    if args.save and not args.save_interval:
        yield f"--save {args.save} needs --save-interval; --train-iters will do"


def _learning_rate(args: Namespace) -> Iterator[str]:
    """Megatron's scheduler asserts these without a word, after the model is built."""
    if args.skip_train:
        return
    if args.lr is None:
        yield "--lr is missing"
        return
    if not args.min_lr <= args.lr:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}; lower it"
    if not args.lr_warmup_init <= args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}; lower it"
    for unit in ("iters", "samples"):
        steps = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        warmup = getattr(args, f"lr_warmup_{unit}")
        if steps and warmup and warmup >= steps:
            yield (
                f"--lr-warmup-{unit} {warmup} leaves nothing of the schedule's {steps} {unit}; "
                f"lower it (or raise --lr-decay-{unit})"
            )
        if steps and args.lr_decay_style == "WSD" and not getattr(args, f"lr_wsd_decay_{unit}"):
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"


def _validation_sets(args: Namespace) -> Iterator[str]:
    if args.full_validation and not args.multiple_validation_sets:
        yield "--full-validation: Megatron 0.19.2 needs --multiple-validation-sets with it"
    if args.multiple_validation_sets and not args.full_validation:
        yield "--multiple-validation-sets: Megatron 0.19.2 needs --full-validation with it"
    if args.validation_set_names and not args.multiple_validation_sets:
        yield (
            f"--validation-set-names {' '.join(args.validation_set_names)}: Megatron needs "
            "--multiple-validation-sets with it"
        )


def _norms(args: Namespace) -> Iterator[str]:
    if not args.layernorm_zero_centered_gamma or args.transformer_impl == "transformer_engine":
        return
    if args.normalization != "LayerNorm" or not compat.is_installed("apex"):
        yield (
            "--apply-layernorm-1p needs Transformer Engine (or Apex, for --normalization "
            "LayerNorm); leave it out, or use --transformer-impl transformer_engine"
        )


def _vocabulary(args: Namespace) -> Iterator[str]:
    if not args.pad_vocab_size and args.padded_vocab_size is None:
        yield "--no-pad-vocab-size: Megatron needs --padded-vocab-size with it"


def _recomputation(args: Namespace) -> Iterator[str]:
    if compat.have_transformer_engine():
        return
    for module in ("layernorm", "moe_act", "mla_up_proj"):
        if module in (args.recompute_modules or ()):
            yield (
                f"--recompute-modules {module}: Megatron needs Transformer Engine for it, which is "
                "not installed; leave it out"
            )


def _packages(args: Namespace) -> Iterator[str]:
    """Packages that Megatron imports late, for some of its flags."""
    resiliency = ("nvidia_resiliency_ext", "nvidia-resiliency-ext")
    by_nvrx = args.async_save and args.use_persistent_ckpt_worker and args.async_strategy == "nvrx"
    for flag, needed, (module, package) in (
        (
            f"--optimizer {args.optimizer}",
            args.optimizer not in ("adam", "sgd"),
            ("emerging_optimizers", "emerging-optimizers"),
        ),
        ("--async-save (or --async-strategy mcore)", by_nvrx, resiliency),
        ("--enable-ft-package", args.enable_ft_package, resiliency),
        ("--fault-injector-ranks", args.fault_injector_ranks is not None, resiliency),
        ("--fault-injector-num-ranks", args.fault_injector_num_ranks is not None, resiliency),
        ("--log-straggler", args.log_straggler, ("pynvml", "nvidia-ml-py")),
        ("--wandb-project", args.wandb_project, ("wandb", "wandb")),
    ):
        if needed and not compat.is_installed(module):
            yield f"{flag}: {package} is not installed; pip install {package}, or leave it out"


def _interleaved_pipeline(args: Namespace) -> Iterator[str]:
    """Megatron raises at the first step where there are too few micro-batches."""
    pp, batch = args.pipeline_model_parallel_size, args.global_batch_size
    ranks = args.tensor_model_parallel_size * pp * args.context_parallel_size
    if args.step_batch_size_schedule or not batch or not args.micro_batch_size:
        return
    if _model_chunks(args) < 2 or args.world_size % ranks:
        return
    data_parallel = args.world_size // ranks
    micro_batches = batch // (args.micro_batch_size * data_parallel)
    group = args.microbatch_group_size_per_vp_stage or pp
    rest = micro_batches % group
    if micro_batches < group or 0 < rest < pp:
        yield (
            f"--global-batch-size {batch} makes {micro_batches} micro-batches for each of "
            f"{data_parallel} data-parallel ranks; interleaved pipelines need a multiple of "
            f"{group} (--pipeline-model-parallel-size, or "
            "--microbatch-group-size-per-virtual-pipeline-stage)"
        )


def _model_chunks(args: Namespace) -> int:
    """Parts of the model on a pipeline rank; more than one where the pipeline is interleaved."""
    if compat.is_validated(args):
        return args.virtual_pipeline_model_parallel_size or 1
    layers = args.num_layers or args.encoder_num_layers or 0
    layers += args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if per_chunk := args.num_layers_per_virtual_pipeline_stage:
        return layers // args.pipeline_model_parallel_size // per_chunk
    return args.num_virtual_stages_per_pipeline_rank or 1
