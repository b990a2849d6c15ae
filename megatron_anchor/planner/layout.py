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
    """--cp-comm-type: a2a (Ulysses), gather (keys and values), a2a+gather (both), or p2p,
    Transformer Engine's ring."""
    cp_heads: int = 0
    """Under a2a+gather, ranks of an all-to-all."""
    ep: int = 1
    """--expert-model-parallel-size, among the ranks of one pipeline stage; experts themselves are
    never split (--expert-tensor-parallel-size 1)."""
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
    def heads_ranks(self) -> int:
        """A: ranks that exchange heads for slots."""
        return {"a2a": self.cp, "a2a+gather": self.cp_heads}.get(self.cp_comm, 1)

    @property
    def keys_ranks(self) -> int:
        """B: groups across which keys and values are gathered."""
        return 1 if self.rings else self.cp // self.heads_ranks

    @property
    def document_alignment(self) -> int:
        """Slots that every document is filled up to a multiple of."""
        return 2 * self.cp if self.rings else 1

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer's states of one parameter."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage, which share the routed experts out."""
        return self.tp * self.cp * self.dp

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer's states of one routed expert."""
        return self.expert_ranks // self.ep

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step on one data-parallel rank."""
        return global_batch // self.dp

    def __str__(self) -> str:
        """As in tables: TP2 PP1 CP4 DP1."""
        sizes = f"TP{self.tp} PP{self.pp} CP{self.cp} DP{self.dp}"
        if self.ep > 1:
            sizes += f" EP{self.ep}"
        if self.cp == 1:
            return sizes
        if self.cp_comm == "a2a+gather":
            return f"{sizes} {self.heads_ranks}x{self.keys_ranks}"
        return f"{sizes} {self.cp_comm}"
