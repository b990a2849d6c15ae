"""A model with RoPE from a Hugging Face folder or a Megatron checkpoint, layer by layer.

The model's own modules do everything but the rotation and the product of attention. Their rotation
is turned off by cos = 1 and sin = 0, which is exact, so that the function registered here as the
model's attention receives queries and keys before rotation (after projection, bias and norm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megatron_anchor.attention.rope import RotarySettings, inverse_frequencies
from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.fused_experts import separate_experts
from megatron_anchor.checkpoint.hugging_face_config import model_of, read_config, sliding_window
from megatron_anchor.checkpoint.hugging_face_weights import open_weights
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.pretrained import (
    load_causal_model,
    load_config,
    random_causal_model,
)
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.to_megatron import check_tensors
from megatron_anchor.compat import quiet_imports_without_gpu
from megatron_anchor.errors import UserError
from megatron_anchor.precision.arms import Arm

ATTENTION = "megatron_anchor_precision"
Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(q_BHSD, k_BGSD, v_BGSD, scale, window) -> context_BSHD; queries and keys not rotated."""

ALIBI = ("bloom", "mpt", "falcon")
LEARNED = ("gpt2", "gpt_neo", "opt", "gpt_bigcode", "biogpt", "xglm")


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face model whose attention can be measured."""

    folder: Path
    model: Model
    window: int | None

    def inverse_frequencies(self, *, angle_dtype: str = "float32") -> tuple[Tensor, float]:
        """[D / 2] inverse frequencies, and the scale of cos and sin (see `attention.rope`).

        With `dynamic` scaling they are those of the trained length, whatever the text's.
        """
        settings = RotarySettings(
            head_dim=self.model.head,
            base=self.model.rotary_base,
            scaling=self.model.scaling,
            max_position_embeddings=self.model.positions,
            angle_dtype=angle_dtype,
        )
        return inverse_frequencies(settings)


def open_folder(folder: str | Path) -> ModelFolder:
    """Read what a Hugging Face folder holds.

    Raises:
        UserError: for a model without RoPE, with what it has instead.
        UserError: for a folder that is no model, or of none of the known families.
    """
    config = read_config(folder)
    _refuse_without_rope(folder, config)
    model = model_of(config)
    if model.sinks:
        raise UserError(
            f"{folder}: {model.family} has a sink in every softmax, which this measurement does "
            f"not have; give a model of {', '.join(n for n, f in FAMILIES.items() if not f.sinks)}"
        )
    return ModelFolder(Path(folder), model, sliding_window(config))


def check_weights(source: ModelFolder) -> None:
    """Check that every weight is there, which transformers would replace by random numbers.

    Raises:
        UserError: for a config that transformers does not take, or naming the weights that
            are missing, damaged or of another shape.
    """
    load_config(source.folder)
    with Files() as files:
        weights = open_weights(source.folder, files)
        check_tensors(separate_experts(weights, source.model), source.model)


def _refuse_without_rope(folder: str | Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if any(family.model_type == kind for family in FAMILIES.values()):
        return
    other = None
    if config.get("alibi") or kind in ALIBI:
        other = "ALiBi"
    elif kind in LEARNED or config.get("position_embedding_type") == "absolute":
        other = "learned positions"
    if other:
        raise UserError(
            f"{folder}: model_type {kind!r} has {other}, not RoPE, so there is no rotation to "
            f"measure; give one of {', '.join(FAMILIES)}"
        )


def check_device(device: str) -> None:
    """Check that a device is there.

    Raises:
        UserError: if it is not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {device}: {reason}; give cpu, or cuda with a GPU") from error


@contextmanager
def hugging_face_folder(
    *,
    hugging_face: str | None,
    megatron: str | None,
    iteration: int | None = None,
    like: str | None = None,
    progress: bool = True,
) -> Iterator[Path]:
    """Give a Hugging Face folder; a Megatron checkpoint is exported to one for the time being.

    Raises:
        UserError: for a checkpoint that is missing or cannot be exported.
    """
    if hugging_face is not None:
        yield Path(hugging_face)
        return
    quiet_imports_without_gpu()
    from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face

    assert megatron is not None
    with TemporaryDirectory(prefix="rope-drift-") as temporary:
        out = Path(temporary) / "model"
        convert_to_hugging_face(
            megatron, out, iteration=iteration, like=like, keep_tokenizer=True, progress=progress
        )
        yield out


class LayeredModel:
    """The decoder layers of a transformers model, with attention of our own."""

    def __init__(self, source: ModelFolder, arm: Arm, *, seed: int, device: str) -> None:
        """Load the weights in the arm's dtype, or draw them where the arm asks for random ones."""
        self.source, self.device = source, device
        self._decoder = _load(source.folder, arm, seed).model.to(device)

    def __len__(self) -> int:
        return len(self._decoder.layers)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Embed token ids: [B, S, hidden] in the model's dtype."""
        return self._decoder.embed_tokens(tokens_BS.to(self.device))

    def layer(self, index: int, hidden_BSE: Tensor, attend: Attend) -> Tensor:
        """Run one decoder layer whose attention is `attend`."""
        length, head = hidden_BSE.shape[1], self.source.model.head
        ones = hidden_BSE.new_ones(1, length, head)
        result = self._decoder.layers[index](
            hidden_BSE,
            attention_mask=None,
            position_ids=torch.arange(length, device=hidden_BSE.device)[None],
            position_embeddings=(ones, torch.zeros_like(ones)),
            anchor_attend=attend,
        )
        return result[0] if isinstance(result, tuple) else result


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    anchor_attend: Attend,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of an attention implementation of its own."""
    return anchor_attend(query, key, value, scaling, sliding_window), None


def _load(folder: Path, arm: Arm, seed: int) -> Any:
    from transformers import AttentionInterface
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, _attention)
    options: dict[str, Any] = {"dtype": arm.dtype, "attn_implementation": ATTENTION}
    if not arm.random_weights:
        return load_causal_model(folder, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return random_causal_model(folder, **options)
