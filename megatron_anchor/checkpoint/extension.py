"""RoPE base and length of a context extension."""

from __future__ import annotations

import dataclasses
import math

from megatron_anchor.checkpoint.model import Model
from megatron_anchor.errors import UserError

BASES = {
    16384: 1_000_000.0,
    32768: 1_000_000.0,
    65536: 5_000_000.0,
    131072: 10_000_000.0,
    262144: 50_000_000.0,
}
"""RoPE base by target length, as the paper sets it (arXiv 2411.13476, appendix)."""


def extended(
    model: Model,
    *,
    extend_to: int | None = None,
    rotary_base: float | None = None,
    positions: int | None = None,
) -> Model:
    """Set what a longer context needs; an explicit value wins over the table's.

    Args:
        model: as the Hugging Face config describes it.
        extend_to: target length in tokens; takes base and positions from `BASES`.
        rotary_base: RoPE base.
        positions: ``max_position_embeddings``.

    Raises:
        UserError: for a target length that is not in the table, values below 1, or a base
            that Megatron cannot be given.
    """
    if extend_to is not None and extend_to not in BASES:
        raise UserError(
            f"--extend-to {extend_to}: the table has {', '.join(map(str, BASES))}; for another "
            "length set --max-position-embeddings and --rotary-base"
        )
    for flag, value in (("--rotary-base", rotary_base), ("--max-position-embeddings", positions)):
        if value is not None and not (1 <= value < math.inf):
            raise UserError(f"{flag} {value}: expected a number of at least 1")
    table_base = BASES[extend_to] if extend_to else None
    base = float(rotary_base or table_base or model.rotary_base)
    if not base.is_integer():
        raise UserError(
            f"RoPE base {base}: Megatron's --rotary-base is a whole number; to train with another "
            f"base set --rotary-base {base:.0f}"
        )
    return dataclasses.replace(
        model,
        rotary_base=base,
        positions=int(positions or extend_to or model.positions),
    )
