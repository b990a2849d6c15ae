"""Parameters of a model, by the ranks that share them.

Matrices are counted by hand here, from the model's widths: D hidden, H query heads, G key/value
heads. A layer is either dense or has experts; layers of multi-token prediction are like the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.planner.shapes import Latent, Shape


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of parameters."""

    sharded: float = 0
    """Shared out by tensor parallelism."""
    whole: float = 0
    """On every tensor-parallel rank."""
    routed: float = 0
    """In routed experts, shared out by expert parallelism."""

    def __add__(self, other: Weights) -> Weights:
        """Both together."""
        return Weights(
            sharded=self.sharded + other.sharded,
            whole=self.whole + other.whole,
            routed=self.routed + other.routed,
        )

    def times(self, count: float) -> Weights:
        """So many of them."""
        return Weights(
            sharded=self.sharded * count, whole=self.whole * count, routed=self.routed * count
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.sharded + self.whole + self.routed


def attention_matrices(shape: Shape) -> Weights:
    """Projections of one layer: query, key, value, output."""
    model = shape.model
    if shape.latent is None:
        return Weights(
            sharded=model.hidden * model.head * (2 * model.heads + 2 * model.groups),
        )
    latent, heads = shape.latent, model.heads
    query, value = shape.query_dim, shape.value_dim
    down = latent.kv_lora_rank + latent.qk_rope_head_dim
    up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + value)
    if latent.q_lora_rank is None:
        up += model.hidden * heads * query
    else:
        down += latent.q_lora_rank
        up += latent.q_lora_rank * heads * query
    # Transformer Engine's layers keep the projections to the latents whole on every rank.
    return Weights(sharded=up + heads * value * model.hidden, whole=model.hidden * down)


def attention_vectors(shape: Shape) -> Weights:
    """Biases, norms of queries and keys, and sinks of one layer."""
    model = shape.model
    sinks = model.heads if shape.sinks else 0
    if shape.latent is not None:
        return Weights(whole=_norms_of(shape.latent) if model.qk_norm else 0, sharded=sinks)
    bias = (model.heads + 2 * model.groups) * model.head if model.megatron_qkv_bias else 0
    whole = model.hidden if model.linear_bias else 0
    return Weights(sharded=bias + sinks, whole=whole + (2 * model.head if model.qk_norm else 0))


def _norms_of(latent: Latent) -> int:
    return (latent.q_lora_rank or 0) + latent.kv_lora_rank


def mlp_matrices(shape: Shape, *, experts: bool) -> Weights:
    """Gate, up and down of one layer, or its router and all its experts."""
    hidden = shape.model.hidden
    if not experts or shape.experts is None:
        return Weights(sharded=3 * hidden * shape.ffn)
    found = shape.experts
    return Weights(
        sharded=3 * hidden * found.shared_ffn,
        whole=hidden * found.number,
        routed=3 * hidden * found.ffn * found.number,
    )


def mlp_vectors(shape: Shape, *, experts: bool) -> Weights:
    """Biases behind the attention of one layer."""
    hidden = shape.model.hidden
    if not shape.model.linear_bias:
        return Weights()
    if not experts or shape.experts is None:
        return Weights(sharded=2 * shape.ffn, whole=hidden)
    found = shape.experts
    return Weights(whole=found.number, routed=found.number * (2 * found.ffn + hidden))


def layer_weights(shape: Shape, *, experts: bool) -> Weights:
    """Everything in one layer, with the norms before attention and MLP."""
    return (
        attention_matrices(shape)
        + attention_vectors(shape)
        + mlp_matrices(shape, experts=experts)
        + mlp_vectors(shape, experts=experts)
        + Weights(whole=2 * shape.model.hidden)
    )


def predictor_weights(shape: Shape) -> Weights:
    """One depth of multi-token prediction: a layer, the projection of its two inputs, three norms.

    Embedding and output layer are the model's own.
    """
    hidden = shape.model.hidden
    ends = Weights(sharded=2 * hidden * hidden, whole=3 * hidden)
    return layer_weights(shape, experts=shape.experts is not None) + ends


def embedding_weights(shape: Shape) -> int:
    """Entries of the embedding, rows of padding included."""
    return shape.model.hidden * shape.model.padded_rows


def idle_weights(shape: Shape) -> float:
    """Parameters in the experts of a layer that a token does not pass."""
    if shape.experts is None:
        return 0
    found, hidden = shape.experts, shape.model.hidden
    bias = 2 * found.ffn + hidden if shape.model.linear_bias else 0
    return (found.number - found.per_token) * (3 * hidden * found.ffn + bias)


def parameters(shape: Shape, *, predictors: bool = False) -> int:
    """All parameters, as models are named by them.

    Args:
        shape: of the model.
        predictors: count multi-token prediction too; published numbers rarely do.
    """
    dense, sparse = shape.dense_layers, shape.layers - shape.dense_layers
    layers = layer_weights(shape, experts=False).total * dense
    if sparse:
        layers += layer_weights(shape, experts=True).total * sparse
    embeddings = (1 if shape.model.tied else 2) * shape.model.hidden * shape.model.vocabulary
    more = predictor_weights(shape).total * shape.predicted if predictors else 0
    return int(layers + embeddings + shape.model.hidden + more)


def active_parameters(shape: Shape) -> int:
    """Parameters that one token passes, both embeddings included."""
    sparse = shape.layers - shape.dense_layers
    return int(parameters(shape) - sparse * idle_weights(shape))
