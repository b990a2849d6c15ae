"""Whether a run can go on from its checkpoint, optimizer states and all, and what to do if not.

Megatron finds out while it loads, and ends with tracebacks that name none of this.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron_anchor.checkpoint.unpickling import load_metadata
from megatron_anchor.training.stored_run import StoredRun, is_torch_format

RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"

WITHOUT_OPTIMIZER = (
    "--no-load-optim keeps weights, iteration and samples, and begins optimizer and learning-rate "
    "schedule anew; --finetune keeps the weights alone"
)

LAYOUT = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "virtual pipeline stages",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "transformer_impl": "--transformer-impl",
    "moe_grouped_gemm": "--moe-grouped-gemm",
}
"""What decides which parameters share a buffer of the distributed optimizer, and in which order."""

LEARNING_RATES = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")
"""Megatron finds a group of parameters in the checkpoint by these."""

SCHEDULE = {
    "lr_warmup_steps": "--lr-warmup-iters, -samples or -fraction",
    "lr_decay_steps": "--train-iters or -samples, --lr-decay-iters or -samples",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay, --start-weight-decay",
    "end_wd": "--weight-decay, --end-weight-decay",
    "wd_incr_steps": "--train-iters, --train-samples",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""Part of the stored schedule to the flags that it comes from."""


def refusals(args: Namespace, stored: StoredRun) -> Iterator[str]:
    """Say why the checkpoint cannot be gone on with, each reason with its remedy.

    Args:
        args: validated.
        stored: records its run's arguments.
    """
    yield from _torch_format(args, stored)
    if stored.weights_only:
        return
    yield from _host_comparison(args, stored)
    if args.no_load_optim or getattr(stored.args, "no_save_optim", False):
        return
    kinds = list(_kinds_of_optimizer(args, stored))
    yield from kinds
    if not kinds:
        yield from _buffers(args, stored)
    yield from _learning_rates(args, stored)
    yield from _schedule(args, stored)


def _changes(args: Namespace, stored: StoredRun, names: Any) -> dict[str, tuple[Any, Any]]:
    """Name to (the checkpoint's value, this run's), where they differ and both are known."""
    found = {
        n: (getattr(stored.args, n), getattr(args, n, None))
        for n in names
        if hasattr(stored.args, n)
    }
    return {n: (a, b) for n, (a, b) in found.items() if (a or None) != (b or None)}


def _torch_format(args: Namespace, stored: StoredRun) -> Iterator[str]:
    if not is_torch_format(stored.folder):
        return
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    for name, (theirs, ours) in _changes(args, stored, sizes).items():
        yield (
            f"{LAYOUT[name]} {ours}: --ckpt-format torch loads at its own layout only, which has "
            f"{theirs}. At that layout, --ckpt-convert-format torch_dist --ckpt-convert-save DIR "
            "writes one that loads at any"
        )


def _host_comparison(args: Namespace, stored: StoredRun) -> Iterator[str]:
    """What megatron.training.checkpointing.check_checkpoint_args asserts besides the model."""
    names: list[str] = []
    if args.vocab_file:
        names += ["max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type"]
    if args.data_parallel_random_init:
        names.append("data_parallel_random_init")
    if args.phase_transition_iterations:
        names.append("global_batch_size")
    for name, (theirs, ours) in _changes(args, stored, names).items():
        flag = f"--{name.replace('_', '-')}"
        yield f"{flag} {ours}: Megatron goes on with the checkpoint's {flag} {theirs} only"


def _kinds_of_optimizer(args: Namespace, stored: StoredRun) -> Iterator[str]:
    names = ["use_distributed_optimizer", "optimizer"]
    if not args.use_distributed_optimizer:  # whose states hold float32 weights at any precision
        names.append("params_dtype")
    for name, (theirs, ours) in _changes(args, stored, names).items():
        flag = {"params_dtype": "precision"}.get(name, f"--{name.replace('_', '-')}")
        yield (
            f"the checkpoint's optimizer states were saved with {flag} {theirs}, which cannot be "
            f"loaded with {flag} {ours}: go on as it was saved; or {WITHOUT_OPTIMIZER}"
        )
    name = "expert_model_parallel_size"
    theirs, ours = _changes(args, stored, [name]).get(name, (1, 1))
    if args.num_experts and (theirs > 1) != (ours > 1):
        yield (
            f"{LAYOUT[name]} {theirs} -> {ours}: from 2 on Megatron has an optimizer more, for "
            "the experts, and its states do not pass from two to one or back: stay at "
            f"{'2 or more' if theirs > 1 else '1'}; or {WITHOUT_OPTIMIZER}"
        )


def _buffers(args: Namespace, stored: StoredRun) -> Iterator[str]:
    metadata = stored.state.get("content_metadata") or {}
    if metadata.get("distrib_optim_sharding_type") != "dp_reshardable":
        return
    changed = [
        f"{LAYOUT[name]} {theirs} -> {ours}"
        for name, (theirs, ours) in _changes(args, stored, LAYOUT).items()
        if args.num_experts or not name.startswith("expert_")
    ]
    if not changed:
        changed = list(_buckets(args, stored))
    if not changed:
        return
    yield (
        f"the checkpoint was saved without {RESHARDABLE}, so its optimizer states fit its own "
        f"layout only ({', '.join(changed)}). Rewrite it once: start the command of the old layout "
        f"with {RESHARDABLE} --ckpt-convert-format torch_dist --ckpt-convert-save DIR, then --load "
        f"DIR/torch_dist at any layout. Or do without them: {WITHOUT_OPTIMIZER}"
    )


def _buckets(args: Namespace, stored: StoredRun) -> Iterator[str]:
    """Say where buffers are cut into buckets at other places."""
    theirs, ours = _bucket_size(stored.args), _bucket_size(args)
    if theirs != ours and _largest_buffer(stored) > min(theirs, ours):
        yield (
            f"buckets of at most {theirs:g} parameters -> {ours:g}, from --overlap-grad-reduce, "
            "--ddp-bucket-size, --ddp-num-buckets and the data-parallel size"
        )


def _bucket_size(args: Any) -> float:
    """As megatron.training.training.resolve_ddp_bucket_size; a number of buckets is below 1."""
    if not getattr(args, "overlap_grad_reduce", False):
        return math.inf
    if count := getattr(args, "ddp_num_buckets", None):
        return 1 / count
    ranks = getattr(args, "data_parallel_size", 1) * getattr(args, "context_parallel_size", 1)
    return getattr(args, "ddp_bucket_size", None) or max(40_000_000, 1_000_000 * ranks)


def _largest_buffer(stored: StoredRun) -> int:
    """Parameters of the largest buffer, all its buckets together."""
    sizes: Counter[str] = Counter()
    for name, entry in load_metadata(stored.folder / ".metadata").state_dict_metadata.items():
        if found := re.fullmatch(r"(.*gbuf_idx_\d+\..*)\.bucket_idx_\d+\.param", name):
            sizes[found[1]] += math.prod(entry.size)
    return max(sizes.values(), default=0)


def _learning_rates(args: Namespace, stored: StoredRun) -> Iterator[str]:
    for name, (theirs, ours) in _changes(args, stored, LEARNING_RATES).items():
        flag = f"--{name.replace('_', '-')}"
        yield (
            f"{flag} {ours}: the checkpoint has {theirs}, by which Megatron finds its optimizer "
            "states again, with --override-opt-param-scheduler too: give "
            f"{flag} {theirs} again; or {WITHOUT_OPTIMIZER}"
        )


def _schedule(args: Namespace, stored: StoredRun) -> Iterator[str]:
    """What the host's scheduler would assert, unless told which values count."""
    from megatron.training.training import get_optimizer_param_scheduler

    theirs = stored.state.get("opt_param_scheduler")
    if (
        theirs is None
        or args.override_opt_param_scheduler
        or args.use_checkpoint_opt_param_scheduler
    ):
        return
    ours = get_optimizer_param_scheduler(SimpleNamespace(param_groups=[])).state_dict()
    for name, flags in SCHEDULE.items():
        if name in theirs and theirs[name] != ours[name]:
            yield (
                f"{name} {ours[name]} (in samples; from {flags}): the checkpoint's schedule has "
                f"{theirs[name]}: --override-opt-param-scheduler goes on with this run's schedule, "
                "--use-checkpoint-opt-param-scheduler with the checkpoint's"
            )
