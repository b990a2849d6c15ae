"""Ulysses against one rank: the attention layer's output and gradients, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.rope import RotarySettings
from megatron_anchor.attention.ulysses import unsupported_reason
from tests.distributed.ranks import run_ranks

D, S, B = 16, 96, 2
LENGTHS = ([5, 1, 40, 50], [96])


def attention_layer(group, query_heads):
    """AnchorCoreAttention on a hand-made config, its context-parallel group as given."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_anchor.attention.core import AnchorCoreAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=D * query_heads, num_attention_heads=query_heads
    )
    config.attention_dropout = 0.0
    return AnchorCoreAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=SimpleNamespace(cp=group),
        rotary=RotarySettings(head_dim=D),
        backend="sdpa",
    )


def attend_on_ranks(cp_size, query_heads, kv_heads, dtype):
    """Return this rank's pieces of the output and gradients under CP, and the whole without."""
    dist.init_process_group(backend="gloo")
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    generator = torch.Generator().manual_seed(7)
    q, k, v, upstream = (
        torch.randn(S, B, heads, D, generator=generator).to(dtype)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    positions = torch.randint(0, 999, (B, S), generator=generator)
    cu_seqlens = torch.zeros(B, 6, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        cu_seqlens[row] = S
        cu_seqlens[row, : len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)

    def run(group):
        s, r = S // group.size(), dist.get_rank(group)
        piece = slice(r * s, (r + 1) * s)
        leaves = [x[piece].clone().requires_grad_() for x in (q, k, v)]
        packed = pack_micro_batch(positions[:, piece], cu_seqlens, seq_length=S)
        out = attention_layer(group, query_heads)(*leaves, None, packed_seq_params=packed)
        out.backward(upstream[piece].flatten(2))
        return [out.detach(), *(leaf.grad for leaf in leaves)], piece

    pieces, piece = run(dist.group.WORLD)
    whole, _ = run(alone)
    dist.destroy_process_group()
    return [torch.equal(got, want[piece]) for got, want in zip(pieces, whole, strict=True)], [
        float((got - want[piece]).abs().max()) for got, want in zip(pieces, whole, strict=True)
    ]


@pytest.mark.parametrize(
    ("cp_size", "query_heads", "kv_heads"),
    [(2, 4, 2), (2, 8, 1), (4, 4, 4), (4, 8, 2), (4, 8, 1), (2, 6, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ulysses_equals_one_rank_bitwise(cp_size, query_heads, kv_heads, dtype):
    for equal, differences in run_ranks(
        attend_on_ranks, cp_size, cp_size, query_heads, kv_heads, dtype
    ):
        assert all(equal), f"output, dq, dk, dv differ by {differences}"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp_size", "reason"),
    [
        (6, 6, 4, "6 query heads .* cannot be shared by 4"),
        (12, 3, 2, "3 key/value heads .* and 2 context-parallel"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(heads, kv_heads, cp_size, reason):
    import re

    assert re.search(
        reason, unsupported_reason(query_heads=heads, kv_heads=kv_heads, cp_size=cp_size)
    )
    assert unsupported_reason(query_heads=8, kv_heads=2, cp_size=4) is None
