"""Rotary position embedding in float32 from explicit position ids.

The paper's finding (arXiv 2411.13476, section 2) is that rotations computed in bfloat16 lose the
relative-position property of RoPE, mostly through the first token. Here the angles, their cos and
sin and the rotation itself are float32; only the result is cast to the model's dtype. Angles follow
Hugging Face's own formula (float32 inverse frequencies times float32 positions), so an exported
model sees the rotation it was trained with. Scaled variants (linear, dynamic, yarn, llama3,
longrope) take their inverse frequencies from transformers' functions and so equal Hugging Face's by
construction.

Legend: S slots, B batch, H heads, D rotated dimensions of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ANGLE_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class RotarySettings:
    """Everything that the rotation depends on, positions aside."""

    head_dim: int
    """Dimensions of one attention head."""
    base: float = 10000.0
    """RoPE theta."""
    fraction: float = 1.0
    """Share of the head's dimensions that is rotated (Megatron's --rotary-percent)."""
    interleaved: bool = False
    """Pair neighbouring dimensions (GPT-J) instead of the two halves of the head (Llama)."""
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Hugging Face ``rope_parameters`` (``rope_type``, ``factor``, ...); empty: no scaling."""
    max_position_embeddings: int = 0
    """Positions the model is trained for; used by scaled variants only."""
    angle_dtype: str = "float32"
    """``float32`` as Hugging Face, or ``float64`` for studies of rounding at large positions."""

    def __post_init__(self) -> None:
        if self.angle_dtype not in ANGLE_DTYPES:
            raise ValueError(
                f"unknown angle dtype {self.angle_dtype!r}; choose one of {sorted(ANGLE_DTYPES)}"
            )
        if self.rotated_dim <= 0 or self.rotated_dim % 2:
            raise ValueError(
                f"RoPE rotates pairs, but {self.fraction:g} of head_dim {self.head_dim} is "
                f"{self.rotated_dim} dimensions; an even number > 0 is needed "
                "(--kv-channels, --rotary-percent)"
            )

    @property
    def rotated_dim(self) -> int:
        """Number of dimensions of a head that are rotated; the others pass unchanged."""
        return int(self.head_dim * self.fraction)


def inverse_frequencies(settings: RotarySettings, *, seq_length: int = 0) -> tuple[Tensor, float]:
    """Compute the rotation's inverse frequencies and the scale of cos and sin.

    Args:
        settings: what to compute them for.
        seq_length: current sequence length; only ``dynamic`` and ``longrope`` scaling use it.

    Returns:
        [F] CPU tensor in the angle dtype, and the attention factor (1.0 unless yarn or longrope).

    Raises:
        ValueError: for a ``rope_type`` that transformers does not know or cannot compute.
    """
    dtype = ANGLE_DTYPES[settings.angle_dtype]
    rope_type = settings.scaling.get("rope_type", settings.scaling.get("type", "default"))
    if rope_type == "default":
        exponents_F = torch.arange(0, settings.rotated_dim, 2, dtype=torch.int64).to(dtype)
        return 1.0 / (settings.base ** (exponents_F / settings.rotated_dim)), 1.0
    inv_freq_F, factor = _scaled_inverse_frequencies(settings, rope_type, seq_length)
    return inv_freq_F.to(dtype), float(factor)


def _scaled_inverse_frequencies(
    settings: RotarySettings, rope_type: str, seq_length: int
) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"unknown rope_type {rope_type!r} in the rope parameters {dict(settings.scaling)}; "
            f"choose one of {['default', *sorted(ROPE_INIT_FUNCTIONS)]}"
        )
    try:
        return ROPE_INIT_FUNCTIONS[rope_type](
            _hugging_face_config(settings, rope_type), torch.device("cpu"), seq_length or None
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"rope_type {rope_type!r} needs a parameter that {dict(settings.scaling)} lacks: "
            f"{error}"
        ) from error


def _hugging_face_config(settings: RotarySettings, rope_type: str) -> Any:
    """Dress the settings as the model config that transformers' functions read (4.57 and 5.x)."""
    parameters = {
        **settings.scaling,
        "rope_type": rope_type,
        "rope_theta": settings.base,
        "partial_rotary_factor": settings.fraction,
    }
    config = SimpleNamespace(
        rope_parameters=parameters,
        rope_scaling=parameters,
        rope_theta=settings.base,
        partial_rotary_factor=settings.fraction,
        head_dim=settings.head_dim,
        hidden_size=settings.head_dim,
        num_attention_heads=1,
        max_position_embeddings=settings.max_position_embeddings,
        original_max_position_embeddings=parameters.get("original_max_position_embeddings"),
    )
    config.standardize_rope_params = lambda: None
    return config


def logit_scale(settings: RotarySettings, *, head_dim: int) -> float:
    """Factor of the logits of a model whose RoPE settings may hold yarn's ``mscale_all_dim``.

    DeepSeek's models multiply 1 / sqrt(head_dim) by mscale squared, mscale being
    0.1 x mscale_all_dim x ln(factor) + 1 (transformers' ``yarn_apply_mscale``).

    Args:
        settings: of the rotation.
        head_dim: dimensions of a query, not rotated ones included.
    """
    scale, scaling = 1.0 / math.sqrt(head_dim), settings.scaling
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    share, factor = scaling.get("mscale_all_dim") or 0.0, scaling.get("factor", 1.0)
    if rope_type == "default" or factor <= 1:
        return scale
    return scale * (0.1 * share * math.log(factor) + 1.0) ** 2


def cos_and_sin(
    position_ids_BS: Tensor, inv_freq_F: Tensor, *, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Turn positions into the float32 cos and sin of their angles.

    Args:
        position_ids_BS: integer positions, any shape.
        inv_freq_F: [F] inverse frequencies in the angle dtype, on the positions' device.
        attention_factor: scale of both results (yarn's mscale).

    Returns:
        cos and sin, float32, the positions' shape plus [F].
    """
    angles = position_ids_BS[..., None].to(inv_freq_F.dtype) * inv_freq_F
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos.float(), sin.float()


def rotate(
    x_SBHD: Tensor, cos_SBF: Tensor, sin_SBF: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate the first 2F dimensions of every head in float32, then cast back.

    Args:
        x_SBHD: [..., H, head_dim] queries or keys in any floating dtype.
        cos_SBF: [..., F] float32, for every token of ``x``.
        sin_SBF: [..., F] float32.
        interleaved: pair dimensions (0, 1), (2, 3), ... instead of (i, i + F).

    Returns:
        Tensor of ``x``'s shape and dtype; dimensions past 2F are unchanged.
    """
    cos, sin = cos_SBF.unsqueeze(-2), sin_SBF.unsqueeze(-2)
    rotated_dim = 2 * cos.shape[-1]
    rotated, rest = x_SBHD[..., :rotated_dim].float(), x_SBHD[..., rotated_dim:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    # Hugging Face's order of operations, q * cos + rotate_half(q) * sin, element by element.
    halves = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    turned = turned.to(x_SBHD.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
