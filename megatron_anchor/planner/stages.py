"""The layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.planner.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage holds."""

    number: int
    """0 is the first."""
    first: bool
    last: bool
    dense: int
    """Layers without experts."""
    sparse: int
    """Layers with experts."""
    predictors: int
    """Layers of multi-token prediction; the last stage has them."""

    @property
    def layers(self) -> int:
        """Layers of the model itself."""
        return self.dense + self.sparse


def stage_sizes(layers: int, pp: int) -> list[int] | None:
    """Layers of each stage: as many everywhere, or fewer on the last; None where that leaves none.

    Megatron's --decoder-last-pipeline-num-layers says the last stage's number.
    """
    size = -(-layers // pp)
    rest = layers - (pp - 1) * size
    return [size] * (pp - 1) + [rest] if rest > 0 else None


def stages_of(shape: Shape, pp: int) -> list[Stage]:
    """All stages.

    Args:
        shape: of the model; its layers without experts are the first.
        pp: pipeline-parallel size that `stage_sizes` can serve.
    """
    sizes = stage_sizes(shape.layers, pp)
    assert sizes is not None, f"{shape.layers} layers on {pp} stages"
    found, before = [], 0
    for number, size in enumerate(sizes):
        dense = min(max(shape.dense_layers - before, 0), size)
        last = number == pp - 1
        found.append(
            Stage(
                number=number,
                first=number == 0,
                last=last,
                dense=dense,
                sparse=size - dense,
                predictors=shape.predicted if last else 0,
            )
        )
        before += size
    return found
