"""Sinks: one more logit per head in every softmax, without a key and without a value.

Megatron's ``--softmax-type``: ``off-by-one`` fixes it at 0, ``learnable`` makes it a parameter
(gpt-oss). How kernels take it: `megatron_anchor.attention.backends.merged`.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter


def make_sink(config: TransformerConfig) -> Tensor | None:
    """Make the sinks of one layer's heads on this tensor-parallel rank, on the current device.

    Returns:
        [H / TP] in the dtype of the parameters: a parameter, zeros, or None for the plain softmax.
    """
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    sink_H = torch.zeros(heads, device=device, dtype=config.params_dtype)
    if config.softmax_type == "off-by-one":
        return sink_H
    assert config.softmax_type == "learnable", config.softmax_type
    parameter = Parameter(sink_H)
    # Megatron leaves this out, and its gradient norm then counts the first rank's heads alone.
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    if config.perform_initialization:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            config.init_method(parameter)
    return parameter
