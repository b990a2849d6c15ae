"""Sizes of the groups of context parallelism, and what they send and keep.

Legend: P context-parallel ranks = A x B: Ulysses among A, keys and values gathered across B;
S slots of a sample, s = S / P; H query heads and G key/value heads of a tensor-parallel rank, D
head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

GATHER_LIMIT = 1 << 30
"""Bytes that gathered keys and values may take by default, if a single head does not need more."""


def largest_heads_ranks(
    *, cp_size: int, query_heads: int, kv_heads: int, ranks_per_node: int
) -> int:
    """A: the largest divisor of P, within a node, that divides the heads.

    Args:
        cp_size: P.
        query_heads: of a tensor-parallel rank.
        kv_heads: of a tensor-parallel rank.
        ranks_per_node: GPUs of a node.
    """
    return max(
        A
        for A in range(1, min(cp_size, kv_heads, max(1, ranks_per_node)) + 1)
        if cp_size % A == query_heads % A == kv_heads % A == 0
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Elements that a rank sends in a layer's forward pass."""

    heads: float
    """All-to-all of queries, keys, values and the output, among the A ranks."""
    keys: float
    """Keys and values, across the B groups."""

    @property
    def total(self) -> float:
        """Both."""
        return self.heads + self.keys


def elements_sent(
    *,
    slots: float,
    query_heads: float,
    kv_heads: float,
    head_dim: int,
    heads_ranks: int,
    keys_ranks: int,
    value_dim: int | None = None,
) -> Sent:
    """Count what a rank sends in a forward pass.

    (A - 1) / A s D (2 H + 2 max(G, A)) for heads, (B - 1) s 2 max(G, A) D for keys. With B = 1 this
    is Ulysses, with A = 1 gathering alone, which sends as much as a ring of keys and values does.

    Args:
        slots: s.
        query_heads: H.
        kv_heads: G.
        head_dim: D, of queries and keys.
        heads_ranks: A; key/value heads are repeated up to it.
        keys_ranks: B.
        value_dim: of values and the output; None: D.
    """
    A, B, groups = heads_ranks, keys_ranks, max(kv_heads, heads_ranks)
    both = head_dim + (head_dim if value_dim is None else value_dim)
    return Sent(
        heads=(A - 1) / A * slots * both * (query_heads + groups),
        keys=(B - 1) * slots * groups * both,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the gathered keys and values of some heads take at most, in bytes.

    Forward holds the gathered buffer and the runs' copies. Backward holds the buffer, the copies,
    their gradients, and sums in float32.
    """

    slots: int
    """A, gathered slots of all samples of a micro-batch."""
    longest: int
    """S, the most keys that a single run can have. All ranks must find the same heads, so it is
    not that of the runs at hand."""
    width: int
    """D + E."""
    itemsize: int
    """Bytes of an element of keys and values."""

    def of_buffers(self, heads: int) -> int:
        """Bytes that do not depend on the runs."""
        return heads * self.slots * self.width * (self.itemsize + max(4, self.itemsize))

    def of_keys(self, heads: int) -> int:
        """Bytes of one key of a run."""
        return heads * self.width * (2 * self.itemsize + max(4, self.itemsize))

    def least(self) -> int:
        """Bytes that a single head needs."""
        return self.of_buffers(1) + self.longest * self.of_keys(1)

    def heads(self, kv_heads: int, limit: int) -> int:
        """The most heads at once within `limit` bytes; at least one."""
        fitting = (
            heads
            for heads in range(kv_heads, 0, -1)
            if kv_heads % heads == 0
            and self.of_buffers(heads) + self.longest * self.of_keys(heads) <= limit
        )
        return next(fitting, 1)

    def keys(self, heads: int, limit: int) -> int:
        """The most keys of runs in one kernel call."""
        return max(self.longest, (limit - self.of_buffers(heads)) // self.of_keys(heads))
