"""The arms of the measurement: which part of attention is rounded to what.

An attention layer rounds in three places: cos, sin and the rotated queries and keys (`rotation`),
logits and weights (`scores`), and everything else (`dtype`). The arms change one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_anchor.attention.rope import cos_and_sin, rotate

ROTATIONS = ("model", "cast", "float32")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of computing attention."""

    name: str
    says: str
    """For legends and tables."""
    dtype: torch.dtype = torch.bfloat16
    """Of weights, activations, values and what attention gives to the next layer."""
    rotation: str = "model"
    """``model``: cos, sin and products in `dtype`, as transformers and Megatron's unfused path;
    ``cast``: float32, the rotated result cast to `dtype`; ``float32``: kept in float32."""
    scores: torch.dtype = torch.float32
    """Logits and weights are rounded to it; matrix products accumulate in float32 always."""
    angle_dtype: str = "float32"
    random_weights: bool = False

    def __post_init__(self) -> None:
        assert self.rotation in ROTATIONS, self.rotation

    def rotated(
        self, x_BHSD: Tensor, positions_BS: Tensor, inv_freq_F: Tensor, *, attention_factor: float
    ) -> Tensor:
        """Rotate queries or keys as this arm does.

        Args:
            x_BHSD: in the arm's dtype; batches of 1 are repeated for every row of positions.
            positions_BS: int64 positions.
            inv_freq_F: inverse frequencies in the angle dtype.
            attention_factor: scale of cos and sin (yarn).

        Returns:
            [B, H, S, D] in the arm's dtype, or float32 where it is kept.
        """
        cos_BSF, sin_BSF = cos_and_sin(positions_BS, inv_freq_F, attention_factor=attention_factor)
        if self.rotation == "model":
            cos, sin = (torch.cat((t, t), -1).to(self.dtype)[:, None] for t in (cos_BSF, sin_BSF))
            first, second = x_BHSD.chunk(2, dim=-1)
            return x_BHSD * cos + torch.cat((-second, first), dim=-1) * sin
        x_BSHD = x_BHSD.expand(len(positions_BS), -1, -1, -1).transpose(1, 2)
        if self.rotation == "float32":
            x_BSHD = x_BSHD.float()
        return rotate(x_BSHD, cos_BSF, sin_BSF).transpose(1, 2)

    def rounded(self, scores: Tensor) -> Tensor:
        """Round logits or weights to what the arm holds them in, and give float32."""
        return scores if self.scores == torch.float32 else scores.to(self.scores).float()


ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="bf16", says="bf16, as transformers computes it", scores=torch.bfloat16),
        Arm(
            name="bf16-rotate-float32",
            says="bf16, rotation in float32, then cast",
            rotation="cast",
            scores=torch.bfloat16,
        ),
        Arm(
            name="bf16-fused",
            says="bf16, float32 rotation then cast, float32 scores (fused kernels)",
            rotation="cast",
        ),
        Arm(
            name="bf16-attend-float32",
            says="bf16, rotation and scores all float32",
            rotation="float32",
        ),
        Arm(
            name="random-bf16",
            says="random weights in bf16",
            scores=torch.bfloat16,
            random_weights=True,
        ),
        Arm(name="float32", says="float32", dtype=torch.float32),
        Arm(
            name="float32-angles64",
            says="float32 with float64 angles",
            dtype=torch.float32,
            rotation="cast",
            angle_dtype="float64",
        ),
    )
}
"""By name, in the order of legends."""
