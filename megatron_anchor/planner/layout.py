"""One way to share a model and its batches out over GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel groups; micro-batches hold one sample."""

    tp: int = 1
    """--tensor-model-parallel-size; sequence parallelism comes with it."""
    pp: int = 1
    """--pipeline-model-parallel-size"""
    cp: int = 1
    """--context-parallel-size"""
    dp: int = 1
    """Data-parallel size."""
    cp_comm: str = "a2a"
    """--cp-comm-type: a2a is this project's Ulysses, p2p Transformer Engine's ring."""
    recompute: str = "none"
    """One of `work.RECOMPUTE`."""

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def rings(self) -> bool:
        """Whether ranks hold zigzag pieces of every document."""
        return self.cp > 1 and self.cp_comm == "p2p"

    @property
    def document_alignment(self) -> int:
        """Slots that every document is filled up to a multiple of."""
        return 2 * self.cp if self.rings else 1

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer's states of one parameter."""
        return self.dp * self.cp

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return global_batch // self.dp

    def __str__(self) -> str:
        """As in tables: TP2 PP1 CP4 DP1."""
        sizes = f"TP{self.tp} PP{self.pp} CP{self.cp} DP{self.dp}"
        return sizes + (f" {self.cp_comm}" if self.cp > 1 else "")
