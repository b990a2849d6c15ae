"""Multi-latent attention (MLA): its flags, in words of rotation and widths, and what is refused.

Widths of a head come from flags of its own; --kv-channels is not read, though scripts set it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.training.context_parallel import OURS


def is_latent(args: Namespace) -> bool:
    """Whether the model has multi-latent attention."""
    return bool(getattr(args, "multi_latent_attention", False))


def yarn_of_flags(args: Namespace) -> dict[str, Any]:
    """Megatron's own flags for yarn, as Hugging Face's ``rope_parameters``; empty without scaling.

    Its --rope-type is yarn by default, with a factor of 1, which is plain RoPE. The factor of cos
    and sin is written out, since the two differ where only one mscale is given.

    Raises:
        UserError: for a factor below 1.
    """
    if not is_latent(args) or args.rope_type == "rope" or args.rotary_scaling_factor == 1:
        return {}
    factor = float(args.rotary_scaling_factor)
    if not 1 < factor < math.inf:
        raise UserError(f"--rotary-scaling-factor {factor:g}: expected 1 or more")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale_all_dim,
        "attention_factor": _mscale(factor, args.mscale) / _mscale(factor, args.mscale_all_dim),
        # Fields of MLATransformerConfig that have no flag of their own.
        "original_max_position_embeddings": getattr(args, "original_max_position_embeddings", 4096),
        "beta_fast": getattr(args, "beta_fast", 32),
        "beta_slow": getattr(args, "beta_slow", 1),
    }


def _mscale(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0


def refusals(args: Namespace) -> Iterator[str]:
    """Say which arguments do not go with multi-latent attention, or need it."""
    if not is_latent(args):
        if args.rope_type == "yarn":
            yield (
                '--rope-type yarn: pass --rope-parameters \'{"rope_type": "yarn", "factor": '
                "...}' (Megatron knows it with --multi-latent-attention only)"
            )
        return
    yield from _positions(args)
    yield from _layers(args)
    yield from _tensor_parallel(args)
    yield from _context_parallel(args)


def _positions(args: Namespace) -> Iterator[str]:
    latent = "--multi-latent-attention"
    if args.rope_type == "rope" and args.rotary_scaling_factor != 1:
        yield (
            f"--rotary-scaling-factor {args.rotary_scaling_factor:g} is yarn's, and --rope-type "
            "rope asks for none: leave out one of them"
        )
    if args.rope_parameters and (args.mscale != 1 or args.mscale_all_dim != 0):
        yield (
            f"--mscale {args.mscale:g} --mscale-all-dim {args.mscale_all_dim:g}: --rope-parameters "
            "is the place for mscale and mscale_all_dim, where it is given"
        )
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if getattr(args, name):
            yield (
                f"--{name.replace('_', '-')}: Megatron's {latent} does not read it; use "
                "--rope-parameters"
            )
    if args.rotary_percent != 1:
        yield (
            f"--rotary-percent {args.rotary_percent:g}: {latent} rotates --qk-pos-emb-head-dim "
            "dimensions, all of them; leave it out"
        )
    if args.rotary_interleaved:
        yield f"--rotary-interleaved: {latent} rotates neighbouring pairs anyway; leave it out"
    if args.no_rope_freq and any(_listed(args.no_rope_freq)):
        yield f"--no-rope-freq: {latent} has no layers without positions; leave it out"
    if args.qk_pos_emb_head_dim <= 0 or args.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim}: RoPE rotates pairs; an even number "
            "above 0 is needed"
        )


def _listed(frequency: Any) -> list[Any]:
    return frequency if isinstance(frequency, list) else [frequency]


def _layers(args: Namespace) -> Iterator[str]:
    latent = "--multi-latent-attention"
    if args.group_query_attention:
        yield f"--group-query-attention: {latent} has keys and values of its own for every head"
    if args.qk_l2_norm:
        yield f"--qk-l2-norm: {latent} normalises latents; use --qk-layernorm"
    if args.attention_output_gate:
        yield f"--attention-output-gate: Megatron has none with {latent}; leave it out"
    if not args.mla_down_proj_fusion:
        return
    if args.transformer_impl != "transformer_engine":
        yield (
            "--mla-down-proj-fusion: only --transformer-impl transformer_engine has the fused "
            "projection; Megatron would ignore the flag; leave it out"
        )
    if args.q_lora_rank is None:
        yield "--mla-down-proj-fusion fuses two projections; it needs --q-lora-rank"


def _tensor_parallel(args: Namespace) -> Iterator[str]:
    tp = args.tensor_model_parallel_size
    if tp == 1:
        return
    if not args.sequence_parallel:
        yield (
            f"--multi-latent-attention with --tensor-model-parallel-size {tp} needs "
            "--sequence-parallel: without it Megatron sums the gradient of the queries' norm over "
            "ranks that all have the whole of it"
        )
    if args.transformer_impl == "transformer_engine" and not args.mla_down_proj_fusion:
        return  # every rank has the whole projections
    keys = args.kv_lora_rank + args.qk_pos_emb_head_dim
    if keys % tp:
        yield (
            f"--kv-lora-rank {args.kv_lora_rank} + --qk-pos-emb-head-dim "
            f"{args.qk_pos_emb_head_dim} = {keys} cannot be shared by --tensor-model-parallel-size "
            f"{tp}"
        )
    if args.q_lora_rank is not None and args.q_lora_rank % tp:
        yield (
            f"--q-lora-rank {args.q_lora_rank} cannot be shared by --tensor-model-parallel-size "
            f"{tp}"
        )


def _context_parallel(args: Namespace) -> Iterator[str]:
    if args.context_parallel_size == 1:
        return
    foreign = [kind for kind in args.cp_comm_type if kind not in OURS]
    if foreign:
        yield (
            f"--cp-comm-type {foreign[0]}: Transformer Engine's own context parallelism was never "
            f"run with --multi-latent-attention; use {', '.join(OURS)}"
        )
