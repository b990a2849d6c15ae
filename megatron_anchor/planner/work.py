"""Parameters and floating-point operations of a model, by part.

A multiply-add is two operations. Backward takes twice the forward of a matrix product and 2.5
times the forward of attention, whose kernel computes the scores again (arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.checkpoint.model import Model

LINEAR_BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5

RECOMPUTE = ("none", "mlp", "full")
"""What backward computes again: nothing, every MLP, or every layer; the cheapest first."""


def attention_weights(model: Model) -> int:
    """Entries of the projections of one layer: query, key, value, output."""
    return model.hidden * model.head * (2 * model.heads + 2 * model.groups)


def mlp_weights(model: Model) -> int:
    """Entries of gate, up and down of one layer."""
    return 3 * model.hidden * model.ffn


def linear_weights(model: Model) -> int:
    """Entries of all matrices of one layer; tensor parallelism shares them out."""
    return attention_weights(model) + mlp_weights(model)


def sharded_vectors(model: Model) -> int:
    """Biases of one layer that are shared out as their matrices are."""
    bias = (model.heads + 2 * model.groups) * model.head if model.megatron_qkv_bias else 0
    return bias + (2 * model.ffn if model.linear_bias else 0)


def replicated_vectors(model: Model) -> int:
    """Norms and the biases of one layer that every tensor-parallel rank holds whole."""
    bias = 2 * model.hidden if model.linear_bias else 0
    return 2 * model.hidden + bias + (2 * model.head if model.qk_norm else 0)


def embedding_weights(model: Model) -> int:
    """Entries of the embedding, rows of padding included."""
    return model.hidden * model.padded_rows


def parameters(model: Model, *, padded: bool = False) -> int:
    """All parameters; `padded` counts the embedding's rows of padding, too."""
    layer = linear_weights(model) + sharded_vectors(model) + replicated_vectors(model)
    embedding = embedding_weights(model) if padded else model.hidden * model.vocabulary
    return model.layers * layer + (1 if model.tied else 2) * embedding + model.hidden


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Operations of one layer on one sample, forward and backward together."""

    linear: float
    attention: float

    @property
    def total(self) -> float:
        """Both."""
        return self.linear + self.attention


def layer_work(
    model: Model, *, sequence_length: int, pairs: float, recompute: str = "none"
) -> LayerWork:
    """Count one layer.

    Args:
        model: its shape.
        sequence_length: S.
        pairs: of query and key in a sample (`samples.AttentionWork`).
        recompute: one of `RECOMPUTE`.
    """
    linear = 2.0 * linear_weights(model) * sequence_length
    again = {"none": 0.0, "mlp": mlp_weights(model) / linear_weights(model), "full": 1.0}[recompute]
    attention = 4.0 * model.heads * model.head * pairs
    return LayerWork(
        linear=linear * (1 + LINEAR_BACKWARD + again),
        attention=attention * (1 + ATTENTION_BACKWARD + (recompute == "full")),
    )


def output_work(model: Model, *, sequence_length: int) -> float:
    """Operations of the output layer on one sample, forward and backward."""
    return 2.0 * embedding_weights(model) * sequence_length * (1 + LINEAR_BACKWARD)
