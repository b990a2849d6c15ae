"""The rows of Megatron's model config, tried: each field is changed, and the logits are compared.

A stock Megatron model with experts is built once for every value of every field, with the same
weights. What cannot be built here (for it needs a GPU, Transformer Engine or other fields) tells
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile

import pytest
import torch

from megatron_anchor.checkpoint.argument_check import HARMLESS
from megatron_anchor.checkpoint.model_arguments import CARRIED, REQUIRED
from tests.distributed.ranks import run_ranks

S, V = 16, 128
BASE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "transformer_impl": "local",
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
}
VALUES = {
    "window_size": [(4, 0)],
    "normalization": ["LayerNorm"],
    "moe_router_score_function": ["sigmoid", "sqrtsoftplus"],
    "softmax_type": ["off-by-one", "learnable"],
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss", "none", "sinkhorn"],
    "moe_router_dtype": ["fp32", "fp64"],
    "recompute_granularity": ["selective"],
    "recompute_modules": [["core_attn"]],
    "no_rope_freq": [2, [1, 0]],
    "moe_layer_freq": [[0, 1]],
    "init_method": [torch.nn.init.zeros_],
    "output_layer_init_method": [torch.nn.init.zeros_],
    "embedding_init_method": [torch.nn.init.zeros_],
    "moe_token_dispatcher_type": ["allgather"],
    "moe_token_drop_policy": ["position"],
    "cross_entropy_fusion_impl": ["te"],
    "activation_func": [],  # follows from swiglu
    "params_dtype": [],  # of the tensors
}
"""Values to try, where the kind of the field does not say enough."""
NOISE = {"moe_input_jitter_eps"}
"""Random by intent, also where Megatron evaluates; it belongs to training."""

NOT_ALONE = {
    "is_hybrid_model": "with a pattern of layers",
    "moe_mlp_glu_interleave_size": "with Transformer Engine's layers",
    "moe_router_num_groups": "with moe_router_group_topk",
    "moe_router_topk_limited_devices": "with several ranks",
}
"""Required fields that change something only together with others."""


def values_of(field):
    """Give values that a field may have beside the model's."""
    if field.name in VALUES:
        return VALUES[field.name]
    now, kind = BASE.get(field.name, field.default), str(field.type)
    if isinstance(now, bool) or "bool" in kind:
        return [not now]
    if isinstance(now, int | float):
        return [now + 1, 2.5] if isinstance(now, float) else [now + 1, now + 2]
    if "float" in kind:
        return [0.5, 2.5]
    if "int" in kind.lower():
        return [1, 2]
    return ["x"]


def built(**changes):
    """Build Megatron's own model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(**BASE | changes)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    sizes = {"vocab_size": V, "max_sequence_length": 4 * S}
    return GPTModel(config, spec, position_embedding_type="rope", **sizes).eval()


def logits(model):
    tokens = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(S)[None], hidden)


def differences():
    """Change every field; give {name: [largest difference, "tensors" or "not built"]}."""
    import logging

    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    os.chdir(tempfile.mkdtemp())  # one field is a folder that Megatron writes to
    logging.disable(logging.WARNING)
    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = built()
    for number, (name, weight) in enumerate(model.named_parameters()):
        if "norm" not in name:
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    weights, expected = model.state_dict(), logits(model)
    found = {}
    for field in dataclasses.fields(TransformerConfig):
        found[field.name] = []
        for value in values_of(field):
            try:
                changed = built(**{field.name: value})
                keys = changed.load_state_dict(weights, strict=False)
                others = [key for key in (*keys[0], *keys[1]) if "_extra_state" not in key]
                result = "tensors" if others else float((logits(changed) - expected).abs().max())
            except Exception:  # of any kind, from what lacks a GPU or other fields
                result = "not built"
            found[field.name].append(result)
    return found, float(expected.std())


@pytest.fixture(scope="module")
def tried():
    [(found, spread)] = run_ranks(differences, 1)
    assert spread > 1
    return found


def test_no_field_that_is_called_harmless_changes_the_logits(tried):
    ran = {
        name: [value for value in tried[name] if isinstance(value, float)]
        for name in sorted(set(tried) & set(HARMLESS))
        if name not in NOISE
    }
    assert {
        name: max(values) for name, values in ran.items() if values and max(values) > 1e-4
    } == {}
    assert sum(map(bool, ran.values())) > 170


def test_no_field_is_required_in_vain(tried):
    """Each shows itself in tensors or logits, or cannot be tried here."""
    needless = {
        name: tried[name]
        for name in set(tried) & set(REQUIRED) - set(NOT_ALONE)
        if all(isinstance(value, float) and value < 1e-2 for value in tried[name])
    }
    assert needless == {}


def test_what_is_carried_shows_itself_too(tried):
    elsewhere = {"moe_aux_loss_coeff", "ffn_hidden_size"}  # of training; of dense layers
    carried = set(tried) & CARRIED - elsewhere
    assert {name for name in carried if tried[name] and 0.0 in tried[name]} == set()
