"""The model around the attention must add no positions of its own."""

from __future__ import annotations

import sys
from types import FrameType

from megatron.core.models.gpt import GPTModel


def refuse_own_positions() -> None:
    """Refuse to be built inside a GPTModel that has a position embedding.

    The core attention rotates queries and keys by the packed documents' positions. A GPTModel that
    embeds positions as well, which is its default, would train without complaint on both. Its
    layers cannot see that: learned positions are in the hidden states before the first layer. So
    the model that is being built is looked for among the callers.

    Raises:
        ValueError: naming the model's argument and its value.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname == f"{GPTModel.__qualname__}.__init__":
            _check(frame.f_locals["self"], frame.f_locals["position_embedding_type"])
        frame = frame.f_back


def _check(model: GPTModel, argument: str) -> None:
    # The embedding follows the constructor's argument, the rotation a config's field of that name.
    for kind in dict.fromkeys((argument, model.position_embedding_type)):
        rotates_in_the_layer = kind == "rope" and model.config.multi_latent_attention
        if kind != "none" and not rotates_in_the_layer:
            raise ValueError(
                f"{type(model).__name__}(position_embedding_type={kind!r}) would add positions to "
                "those of the packed documents, which the attention of megatron_anchor applies "
                "itself: pass position_embedding_type='none' (the default is 'learned_absolute')"
            )
