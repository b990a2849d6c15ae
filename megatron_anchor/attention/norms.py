"""Norms for the layer spec without Transformer Engine or Apex.

Megatron's `WrappedTorchNorm` refuses sequence parallelism although torch's norms do it: each rank
normalises its own tokens, and the weight's gradient is summed over the tensor-parallel group when
the weight carries ``sequence_parallel = True`` (Megatron's finalize_model_grads looks for it).
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class TorchNorm:
    """Build the torch norm that the config names; takes `WrappedTorchNorm`'s place in layer specs.

    A class and not a function because Megatron's ``build_module`` hands functions back uncalled.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        """Build a norm whose weights are marked for sequence parallelism where it is on.

        Args:
            config: ``normalization`` and ``sequence_parallel`` are read.
            hidden_size: normalised dimension.
            eps: added to the variance.

        Raises:
            ValueError: for zero-centred weights and for norms that torch does not have.
        """
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "--apply-layernorm-1p needs Transformer Engine or Apex; drop it or use "
                "--transformer-impl transformer_engine"
            )
        if config.normalization not in NORMS:
            raise ValueError(
                f"unsupported --normalization {config.normalization!r}; "
                f"choose one of {sorted(NORMS)}"
            )
        norm = NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
