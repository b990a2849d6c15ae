"""Transformer Engine's attention: cuDNN's or flash-attn's kernels over packed documents.

The call is ``TEDotProductAttention`` in its thd format under the mask ``padding_causal``, alone,
inside our Ulysses, or with Transformer Engine's own context parallelism (p2p, all_gather, a2a,
a2a+p2p). Padding stays *inside* each document's ``cu_seqlens``, where causality hides it from all
real tokens; no padded tensors are passed, and ``pad_between_seqs`` is False and not left to be
guessed, so that every kernel of Transformer Engine stays eligible.

Legend: T slots of the micro-batch that this rank holds, H query heads, G key/value heads, D head
dim.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_anchor.attention.backends.te_rules import unsupported_reason

if TYPE_CHECKING:
    from megatron_anchor.attention.backends import Layer
    from megatron_anchor.attention.runs import Runs

__all__ = ["bind", "unsupported_reason"]


def bind(layer: Layer) -> TransformerEngineKernel:
    """Give a layer its kernel; nothing of Transformer Engine is imported before."""
    return TransformerEngineKernel(layer)


class TransformerEngineKernel:
    """One layer's ``TEDotProductAttention``.

    It has no parameters. It is no submodule of the layer, since its FP8 bookkeeping
    (``_extra_state``) would otherwise enter checkpoints, which would then depend on the kernel.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._modules: dict[tuple[int, int], Any] = {}

    def __call__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        runs: Runs,
        scale: float,
        dropout: float,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Attend as `Attend` says, over whole documents.

        Under Transformer Engine's context parallelism the tensors are this rank's zigzag pieces,
        and `runs` has the lengths of whole documents. `dropout` is the config's in training, else
        0; there is no sink.
        """
        assert scale == self._layer.scale
        assert runs.whole_documents
        # Its window is the config's, of this layer's number.
        assert runs.window is None or not runs.window.keeps_anchor
        assert sink_H is None
        module = self._module(q_THD.shape[1], k_TGD.shape[1])
        module.train(dropout == self._layer.config.attention_dropout)
        out = module(
            q_THD.contiguous(),
            k_TGD.contiguous(),
            v_TGD.contiguous(),
            None,
            attn_mask_type=AttnMaskType.padding_causal,
            packed_seq_params=runs.cached("thd", lambda: thd_params(runs)),
        )
        return out.view(q_THD.shape)

    def _module(self, heads: int, kv_heads: int) -> Any:
        # Built at the first call: under Ulysses a rank's heads are known then.
        if (heads, kv_heads) not in self._modules:
            self._modules[heads, kv_heads] = self._build(heads, kv_heads)
        return self._modules[heads, kv_heads]

    def _build(self, heads: int, kv_heads: int) -> Any:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        layer = self._layer
        return TEDotProductAttention(
            config=local_config(
                layer.config,
                heads=heads,
                kv_heads=kv_heads,
                context_parallel=layer.cp_comm_type is not None,
            ),
            layer_number=layer.layer_number,
            attn_mask_type=AttnMaskType.padding_causal,
            attention_type="self",
            softmax_scale=layer.scale,
            cp_comm_type=layer.cp_comm_type,
            pg_collection=layer.pg_collection,
        )


def local_config(
    config: TransformerConfig, *, heads: int, kv_heads: int, context_parallel: bool
) -> TransformerConfig:
    """Describe to Transformer Engine what this rank computes.

    Args:
        config: Megatron's transformer config.
        heads: H of the call.
        kv_heads: G of the call.
        context_parallel: whether the call itself is to communicate.

    Returns:
        A shallow copy; the original is not changed.
    """
    local = copy.copy(config)
    tp = config.tensor_model_parallel_size
    local.num_attention_heads, local.num_query_groups = heads * tp, kv_heads * tp
    if not context_parallel:
        local.context_parallel_size = 1
    # Our core attention forks the random state for dropout, for every kernel alike; under sequence
    # parallelism Transformer Engine takes it that this was done.
    local.sequence_parallel = True
    return local


def thd_params(runs: Runs) -> PackedSeqParams:
    """Give the documents in the form that Transformer Engine takes.

    Returns:
        Plain ``PackedSeqParams`` in thd format, lengths global, without padded tensors.
    """
    known = inspect.signature(PackedSeqParams).parameters
    explicit = {"pad_between_seqs": False} if "pad_between_seqs" in known else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=runs.cu_q,
        cu_seqlens_kv=runs.cu_k,
        max_seqlen_q=runs.max_q,
        max_seqlen_kv=runs.max_k,
        **explicit,
    )
