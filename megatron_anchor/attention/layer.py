"""Megatron's transformer layer, which tells its router of experts which slots count."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_anchor.attention.packed import AnchorPackedSeqParams
from megatron_anchor.attention.router_slots import RouterMask


class AnchorTransformerLayer(TransformerLayer):
    """A layer that reads the counted slots from the packed documents.

    Megatron's own way, a padding mask given to the model, is not taken: from the second pipeline
    stage on it would have to be cut for sequence parallelism by hand.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron's.

        Raises:
            ValueError: if the model was given a padding mask.
        """
        if self.is_moe_layer:
            if kwargs.get("padding_mask") is not None:
                raise ValueError(
                    "padding_mask: the router takes the slots that count from the packed "
                    "documents; pass pack_micro_batch(..., router=router_slots(...)) instead"
                )
            kwargs["padding_mask"] = self._router_mask(kwargs.get("packed_seq_params"))
        return super().forward(*args, **kwargs)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron's.

        The schedule of --overlap-moe-expert-parallel-comm calls this and the router in turn, and
        never the layer: the router is told here.
        """
        if self.is_moe_layer and "padding_mask" not in kwargs:
            mask = self._router_mask(kwargs.get("packed_seq_params"))
            router: Any = self.mlp.router
            router.count_next(None if mask is None else mask.transpose(0, 1).bool())
        return super()._forward_attention(*args, **kwargs)

    def _router_mask(self, packed: Any) -> RouterMask | None:
        if not isinstance(packed, AnchorPackedSeqParams) or packed.router is None:
            return None
        tp = self.pg_collection.tp
        rank, size = (tp.rank(), tp.size()) if self.config.sequence_parallel else (0, 1)
        router = packed.router
        key = ("router", packed.depth, rank, size)
        return packed.cached(key, lambda: router.share(rank=rank, size=size))
