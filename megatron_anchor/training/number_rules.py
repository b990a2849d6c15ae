"""Numbers of the run that mean nothing: counts below 1, and factors that are no numbers.

Other rules divide by them, so they come first and alone.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "seq_length", "encoder_seq_length", "max_position_embeddings"),
    *("micro_batch_size", "global_batch_size", "train_iters", "train_samples"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "vocab_size"),
    *("make_vocab_size_divisible_by", "log_interval", "save_interval", "eval_interval"),
    *("pad_documents_to", "kv_gather_memory_mib", "save_last", "save_last_every"),
)
"""Arguments that are 1 or more where they are given."""

POSITIVE = ("rotary_base", "norm_epsilon", "init_method_std", "rotary_percent")
"""Arguments that are finite and above 0."""

FINITE = ("lr", "min_lr", "weight_decay", "clip_grad", "lr_warmup_init")
"""Arguments that are finite, and not negative."""


def refusals(args: Namespace) -> Iterator[str]:
    """Say which numbers mean nothing."""
    for name in COUNTS:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            yield f"{_flag(name)} {value}: expected 1 or more"
    for name in POSITIVE:
        value = getattr(args, name, None)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield f"{_flag(name)} {value}: expected a number above 0"
    if (args.rotary_percent or 0) > 1:
        yield f"--rotary-percent {args.rotary_percent}: expected at most 1, the whole head"
    for name in FINITE:
        value = getattr(args, name, None)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{_flag(name)} {value}: expected a number of 0 or more"
    sizes = args.hierarchical_context_parallel_sizes or ()
    if any(size < 1 for size in sizes):
        shown = " ".join(map(str, sizes))
        yield f"--hierarchical-context-parallel-sizes {shown}: expected numbers of 1 or more"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
