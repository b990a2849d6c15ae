"""Floating-point operations of a model, by part.

A multiply-add is two operations. Backward takes twice the forward of a matrix product and 2.5
times the forward of attention, whose kernel computes the scores again (arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.planner.shapes import Shape
from megatron_anchor.planner.stages import Stage
from megatron_anchor.planner.weights import attention_matrices, embedding_weights, mlp_matrices

LINEAR_BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5

RECOMPUTE = ("none", "mlp", "full")
"""What backward computes again: nothing, every MLP (with its experts), or every layer; the cheapest
first."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations on one sample, forward and backward together."""

    linear: float = 0.0
    """Matrix products of whole samples."""
    experts: float = 0.0
    """Matrix products of routed experts, each with the tokens that chose it."""
    attention: float = 0.0
    """Scores and their products with the values."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.experts + self.attention

    def __add__(self, other: Work) -> Work:
        """Both together."""
        return Work(
            linear=self.linear + other.linear,
            experts=self.experts + other.experts,
            attention=self.attention + other.attention,
        )

    def times(self, count: float) -> Work:
        """So many of them."""
        return Work(
            linear=self.linear * count,
            experts=self.experts * count,
            attention=self.attention * count,
        )


def layer_work(
    shape: Shape,
    *,
    sequence_length: int,
    pairs: float,
    recompute: str = "none",
    experts: bool = False,
    attention_backward: float = ATTENTION_BACKWARD,
) -> Work:
    """Count one layer.

    Args:
        shape: of the model.
        sequence_length: S.
        pairs: of query and key in a sample (`samples.AttentionWork`).
        recompute: one of `RECOMPUTE`.
        experts: whether it is a layer with experts.
        attention_backward: work of attention's backward in units of its forward.
    """
    projections = attention_matrices(shape).total
    mlp = mlp_matrices(shape, experts=experts)
    chosen = mlp.routed * shape.experts.per_token / shape.experts.number if shape.experts else 0.0
    again_all, again_mlp = float(recompute == "full"), float(recompute != "none")
    passes = 1 + LINEAR_BACKWARD
    a_token = projections * (passes + again_all) + (mlp.sharded + mlp.whole) * (passes + again_mlp)
    pair = 2.0 * shape.model.heads * (shape.query_dim + shape.value_dim)
    return Work(
        linear=2.0 * sequence_length * a_token,
        experts=2.0 * sequence_length * chosen * (passes + again_mlp),
        attention=pair * pairs * (1 + attention_backward + again_all),
    )


def output_work(shape: Shape, *, sequence_length: int) -> Work:
    """Count the output layer."""
    linear = 2.0 * embedding_weights(shape) * sequence_length * (1 + LINEAR_BACKWARD)
    return Work(linear=linear)


def stage_work(
    shape: Shape,
    stage: Stage,
    *,
    sequence_length: int,
    pairs: float,
    recompute: str = "none",
    attention_backward: float = ATTENTION_BACKWARD,
) -> Work:
    """Count a pipeline stage: its layers, multi-token prediction and the output layer.

    Args:
        shape: of the model.
        stage: of `stages.stages_of`.
        sequence_length: S.
        pairs: of query and key in a sample, a mean over the layers.
        recompute: one of `RECOMPUTE`.
        attention_backward: see `layer_work`.
    """
    dense, sparse = (
        layer_work(
            shape,
            sequence_length=sequence_length,
            pairs=pairs,
            recompute=recompute,
            experts=experts,
            attention_backward=attention_backward,
        )
        for experts in (False, True)
    )
    found = dense.times(stage.dense) + sparse.times(stage.sparse)
    if not stage.last:
        return found
    output = output_work(shape, sequence_length=sequence_length)
    passes = 1 + LINEAR_BACKWARD + (recompute == "full")
    both_inputs = Work(linear=2.0 * 2 * shape.model.hidden**2 * sequence_length * passes)
    predictor = (sparse if shape.experts else dense) + both_inputs + output
    return found + output + predictor.times(stage.predictors)


def model_work(shape: Shape, *, sequence_length: int, pairs: float) -> Work:
    """Count what the model itself takes, nothing computed again: the numerator of MFU."""
    whole = Stage(
        number=0,
        first=True,
        last=True,
        dense=shape.dense_layers,
        sparse=shape.layers - shape.dense_layers,
        predictors=shape.predicted,
    )
    return stage_work(
        shape,
        whole,
        sequence_length=sequence_length,
        pairs=pairs,
        attention_backward=LINEAR_BACKWARD,
    )
