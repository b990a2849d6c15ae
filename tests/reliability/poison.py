"""Ways to get NaN out of one token, as a broken corpus or kernel might."""

from __future__ import annotations

from typing import Any

import torch

TOKEN = 125
"""Occurs in one document of tests.reliability.poisoned."""


def poison_the_embedding() -> None:
    """Make the token's row of the embedding NaN, on the rank that holds it."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    initialize = VocabParallelEmbedding.__init__

    def initialized(self: Any, *args: Any, **settings: Any) -> None:
        initialize(self, *args, **settings)
        row = TOKEN - self.vocab_start_index
        if 0 <= row < len(self.weight):
            with torch.no_grad():
                self.weight[row] = torch.nan

    VocabParallelEmbedding.__init__ = initialized


def poison_the_gradient() -> None:
    """Make the gradient NaN, and not the loss, where the token is."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    embed = VocabParallelEmbedding.forward

    def embedded(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        output = embed(self, tokens)
        if (tokens == TOKEN).any():
            output.register_hook(lambda gradient: gradient * torch.nan)
        return output

    VocabParallelEmbedding.forward = embedded


if __name__ == "__main__":
    poison_the_embedding()
    from megatron_anchor.pretrain_gpt import main

    main()
