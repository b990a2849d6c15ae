"""The Megatron model of a checkpoint, built from the arguments that its run recorded.

Nothing of our own reading of these arguments comes in between: they go through Megatron's
translation into its model config, unknown ones too. Only what says how the model is executed is
replaced, so that one that was trained on many GPUs runs here. A run of megatron_anchor gets its
layers, one of stock Megatron stock layers. Loading goes through ``dist_checkpointing``, so it
checks what was written.

Legend: S tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_anchor import compat
from megatron_anchor.checkpoint.argument_check import is_ours
from megatron_anchor.checkpoint.families import LOCAL
from megatron_anchor.checkpoint.model_arguments import EXECUTION, INFERENCE, LAYOUT, PRECISION
from megatron_anchor.errors import UserError

NEVER_OPENED = ("spec", "yaml_cfg", "heterogeneous_layers_config_path")
"""Arguments that would have Megatron import or read what they name."""

NO_KERNELS = {
    "no_persist_layer_norm": True,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "cp_comm_type": ["a2a"],
    "perform_initialization": False,
}
"""What differs from Megatron's defaults where there is neither a GPU nor its kernels."""


def gpt_model(
    stored: Namespace,
    *,
    rows: int,
    dtype: torch.dtype,
    target: str = LOCAL,
    vp_stage: int | None = None,
) -> Any:
    """Build this rank's part of a run's model; Megatron's groups must be initialized.

    Args:
        stored: arguments of the run.
        rows: of the stored embedding.
        dtype: of the weights.
        target: --transformer-impl.
        vp_stage: virtual pipeline stage.

    Raises:
        UserError: if Megatron does not build a model from these arguments.
    """
    args = _runnable(stored, rows=rows, dtype=dtype, target=target)
    try:
        config = compat.gpt_model_config(args)
        if is_ours(vars(stored)):
            _take_our_layers(config, args)
        return compat.build_gpt_model(config, vp_stage=vp_stage)
    except (AssertionError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise UserError(
            f"Megatron builds no model from the run's arguments: {type(error).__name__}: {error}"
        ) from error


def _take_our_layers(config: Any, args: Namespace) -> None:
    from megatron_anchor.attention.layer_spec import layer_spec_provider
    from megatron_anchor.training.providers import rotary_settings

    config.position_embedding_type = "none"
    config.transformer_layer_spec = layer_spec_provider(
        rotary=rotary_settings(args), backend="sdpa"
    )


def _runnable(stored: Namespace, *, rows: int, dtype: torch.dtype, target: str) -> Namespace:
    """Complete a run's arguments, and replace those that say how its model is executed."""
    from megatron_anchor.training.arguments import AnchorArguments

    defaults = compat.argument_defaults() | {f.name: f.default for f in fields(AnchorArguments)}
    replaced = LAYOUT | EXECUTION | PRECISION | INFERENCE
    kept = {name: value for name, value in vars(stored).items() if name not in replaced}
    values = defaults | kept | NO_KERNELS | dict.fromkeys(NEVER_OPENED)
    values |= _layout(has_experts=bool(values["num_experts"])) | {
        "padded_vocab_size": rows,
        "transformer_impl": target,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    for name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        if isinstance(values[name], list) and len(values[name]) == 1:
            values[name] = values[name][0]  # as Megatron's validation leaves it
    return Namespace(**values)


def _layout(*, has_experts: bool) -> dict[str, Any]:
    """Give the sizes of the groups that are initialized, as arguments."""
    from megatron.core import mpu

    stages = mpu.get_virtual_pipeline_model_parallel_world_size()
    experts = {
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
    }
    return (experts if has_experts else {}) | {
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": stages,
        "overlap_p2p_comm": stages is not None,
    }


def load_weights(
    model: Any, folder: str | Path, *, stored_names: Mapping[str, str] | None = None
) -> None:
    """Fill a model, or a list of its virtual stages, from the folder of an iteration.

    Args:
        model: as `gpt_model` builds it.
        folder: of the iteration.
        stored_names: what tensors are called there, where the model calls them otherwise.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    chunks = model if isinstance(model, list) else [model]
    names = [f"model{i}" for i in range(len(chunks))]
    sharded = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensor):
            value.key = (stored_names or {}).get(value.key, value.key)
    loaded = dist_checkpointing.load(sharded, str(folder))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name])


def logits(
    stored: Namespace,
    folder: str | Path,
    tokens_S: Tensor,
    *,
    rows: int,
    dtype: torch.dtype,
    stored_names: Mapping[str, str] | None = None,
) -> Tensor:
    """Compute a checkpoint's logits of one document in this process, without a GPU.

    Args:
        stored: arguments of the run.
        folder: of the iteration.
        tokens_S: token ids.
        rows: of the stored embedding.
        dtype: of weights and arithmetic.
        stored_names: see `load_weights`.

    Returns:
        [S, V] float32, V = ``rows``.

    Raises:
        UserError: see `gpt_model`.
    """
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        gpt = gpt_model(stored, rows=rows, dtype=dtype).eval()
        load_weights(gpt, folder, stored_names=stored_names)
        return logits_of(gpt, tokens_S, stored=stored)
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def logits_of(gpt: Any, tokens_S: Tensor, *, stored: Namespace) -> Tensor:
    """Run a whole model on one document: [S, V] float32 logits.

    Args:
        gpt: as `gpt_model` builds it.
        tokens_S: token ids.
        stored: arguments it was built from.
    """
    from megatron_anchor.attention.packed import pack_micro_batch

    length = len(tokens_S)
    positions_BS = torch.arange(length)[None]
    with torch.no_grad():
        if is_ours(vars(stored)):
            documents = torch.tensor([[0, length]], dtype=torch.int32)
            packed = pack_micro_batch(positions_BS, documents, seq_length=length)
            return gpt(tokens_S[None], positions_BS, None, packed_seq_params=packed)[0].float()
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return gpt(tokens_S[None], positions_BS, hidden)[0].float()
