"""Transformer Engine's real context parallelism over gloo, against one rank.

The layer is this project's, the pieces are cut by its batch code, the communication is Transformer
Engine's own Python; only the kernels below are stood in for (tests/te_stand_in.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.rope import RotarySettings, cos_and_sin, inverse_frequencies, rotate
from megatron_anchor.context_parallel.split import slots_in_zigzag
from tests import te_stand_in
from tests.distributed.ranks import run_ranks
from tests.oracle import dense_attention, document_mask, gradients

pytestmark = pytest.mark.skipif(not te_stand_in.is_usable(), reason=te_stand_in.MISSING)

D, HEADS, KV_HEADS = 16, 8, 4
SCALE = D**-0.5
ROTARY = RotarySettings(head_dim=D)
REAL_LENGTHS = ([5, 1, 40, 50], [23, 17, 1])
"""Two samples: odd documents, among them one token; each is filled up to the alignment."""


def aligned(ranks: int) -> list[list[int]]:
    """Slots of every document, both samples of equal length."""
    unit = 2 * ranks
    samples = [[-(-length // unit) * unit for length in lengths] for lengths in REAL_LENGTHS]
    longest = max(map(sum, samples))
    for sample in samples:
        if sum(sample) < longest:
            sample.append(longest - sum(sample))  # the padding at the sample's end
    return samples


def inputs(S: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the output's gradient [S, B, heads, D], and positions [B, S]."""
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(S, 2, heads, D, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return tensors, torch.randint(0, 500, (2, S), generator=generator)


def on_one_rank(samples: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, dq, dk, dv of dense attention in a dtype, with the float32 rotation."""
    S = sum(samples[0])
    (q, k, v, grad), positions = inputs(S, torch.bfloat16)
    mask = document_mask([length for sample in samples for length in sample])
    cos, sin = cos_and_sin(positions.t(), inverse_frequencies(ROTARY)[0])

    def attend(q, k, v):
        rotated = [rotate(x, cos, sin) for x in (q, k)]
        flat = [x.transpose(0, 1).flatten(0, 1) for x in (*rotated, v)]
        out = dense_attention(*flat, mask_TT=mask, scale=SCALE)
        return out.unflatten(0, (2, S)).transpose(0, 1)

    out, grads = gradients(attend, [x.to(dtype) for x in (q, k, v)], grad)
    return [out, *grads]


def on_this_rank(
    kind: str, samples: list[list[int]]
) -> tuple[list[torch.Tensor], list, torch.Tensor]:
    """Run one layer on this rank's pieces: output and gradients, kernel calls, and the slots."""
    from megatron_anchor import on_cpu

    on_cpu.enable()
    from megatron.core import mpu

    dist.init_process_group(backend="gloo")
    ranks = dist.get_world_size()
    sizes = {"hierarchical_context_parallel_sizes": [2, ranks // 2]} if kind == "a2a+p2p" else {}
    mpu.initialize_model_parallel(context_parallel_size=ranks, **sizes)
    layer = build_layer(kind, ranks)
    S = sum(samples[0])
    (q, k, v, grad), positions = inputs(S, torch.bfloat16)
    cu_seqlens = torch.zeros(2, max(map(len, samples)) + 1, dtype=torch.int32)
    for row, lengths in enumerate(samples):
        cu_seqlens[row] = S
        cu_seqlens[row, : len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    if kind == "ulysses":
        slots = torch.arange(S).expand(2, S).chunk(ranks, 1)[dist.get_rank()]
    else:
        rows = [slots_in_zigzag(row, cp_size=ranks) for row in cu_seqlens.numpy()]
        slots = torch.from_numpy(np.stack(rows)[:, dist.get_rank()])
    index = slots.t()[..., None, None]
    leaves = [x.gather(0, index.expand(-1, -1, *x.shape[2:])).requires_grad_() for x in (q, k, v)]
    packed = pack_micro_batch(positions.gather(1, slots), cu_seqlens, seq_length=S)
    out = layer(*leaves, None, packed_seq_params=packed)
    out.backward(grad.gather(0, index.expand(-1, -1, *grad.shape[2:])).flatten(2))
    calls = te_stand_in.install().calls
    dist.destroy_process_group()
    return [out.detach().view(-1, 2, HEADS, D), *(x.grad for x in leaves)], calls, slots


def build_layer(kind: str, ranks: int):
    from megatron.core import mpu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_anchor.attention.core import AnchorCoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=D * HEADS,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        context_parallel_size=ranks,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    groups = SimpleNamespace(
        tp=mpu.get_tensor_model_parallel_group(),
        cp=mpu.get_context_parallel_group(),
        hcp=mpu.get_hierarchical_context_parallel_groups(check_initialized=False),
    )
    return AnchorCoreAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        cp_comm_type="a2a" if kind == "ulysses" else kind,
        pg_collection=groups,
        rotary=ROTARY,
        backend="te",
        context_parallel="ulysses" if kind == "ulysses" else "te",
    )


def together(pieces: list[tuple], S: int) -> list[torch.Tensor]:
    """Put the ranks' pieces back in the order of the sample."""
    whole = [torch.zeros(S, 2, *x.shape[2:]) for x in pieces[0][0]]
    for tensors, _, slots in pieces:
        for total, piece in zip(whole, tensors, strict=True):
            index = slots.t()[..., None, None].expand(-1, -1, *piece.shape[2:])
            total.scatter_(0, index, piece.float())
    return whole


CAUSAL, ALL = "NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_MASK"
KERNEL_CALLS = {
    "p2p": lambda ranks: [CAUSAL, *[ALL] * (ranks - 1)],
    "all_gather": lambda ranks: ["NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"] * 2,
    "a2a": lambda ranks: [CAUSAL],
    "a2a+p2p": lambda ranks: [CAUSAL, *[ALL] * (ranks // 2 - 1)],
    "ulysses": lambda ranks: [CAUSAL],
}
"""Masks of the kernel calls of one forward pass on each rank: each kind goes its own way."""

CASES = [
    (2, "p2p"),
    (2, "all_gather"),
    (2, "a2a"),
    (4, "p2p"),
    (4, "all_gather"),
    (4, "a2a"),
    (4, "a2a+p2p"),
    (4, "ulysses"),
]


@pytest.mark.parametrize(("ranks", "kind"), CASES)
def test_transformer_engines_context_parallelism_equals_one_rank(ranks, kind):
    """Forward and backward, within the error floor of bfloat16 attention."""
    samples = aligned(ranks)
    truth = on_one_rank(samples, torch.float64)
    floor = on_one_rank(samples, torch.bfloat16)
    pieces = run_ranks(on_this_rank, ranks, kind, samples)
    for name, got, base, true in zip(
        ("output", "dq", "dk", "dv"), together(pieces, sum(samples[0])), floor, truth, strict=True
    ):
        error, allowed = (got - true).abs().max(), (base - true).abs().max()
        # Partial results are rounded once more for each rank that they pass.
        assert error <= 3 * allowed, f"{name} off by {error:.4f}, floor {allowed:.4f}"
        print(f"{kind} on {ranks}: {name} within {error:.1e}, floor {allowed:.1e}")
    for _, calls, _ in pieces:
        assert [name for name, _ in calls] == ["fused_attn_fwd"] * (len(calls) // 2) + [
            "fused_attn_bwd"
        ] * (len(calls) // 2)
        assert sorted(mask for _, mask in calls[: len(calls) // 2]) == sorted(
            KERNEL_CALLS[kind](ranks)
        )


def test_ragged_documents_would_be_wrong_and_are_refused_before():
    """The trap that the alignment rule is for: the total comes out even, the documents do not."""
    with pytest.raises(
        ValueError, match="document 0 of the sample has 5 slots, not a multiple of 4"
    ):
        slots_in_zigzag(np.array([0, 5, 8]), cp_size=2)


def test_the_oracle_tells_wrong_pieces_apart():
    samples = aligned(2)
    truth = on_one_rank(samples, torch.float64)
    other = on_one_rank([[sum(s)] for s in samples], torch.float64)
    floor = on_one_rank(samples, torch.bfloat16)
    assert (other[0] - truth[0]).abs().max() > 10 * (floor[0] - truth[0]).abs().max()
