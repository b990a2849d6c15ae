"""`anchor-masked`: one anchor that only the first document sees, as segments of the same buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_anchor.attention.backends.sdpa import attend
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.packing.patterns import attention_pattern
from megatron_anchor.packing.positions import positions
from tests.masks import dense_mask
from tests.oracle import dense_attention

LAYERS, HEADS, D = 3, 2, 8


def rotate(x_THD: Tensor, position_T: Tensor) -> Tensor:
    """RoPE in float64, by complex numbers."""
    frequency = 100.0 ** -(torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    turn = torch.polar(torch.ones(1, dtype=torch.float64), position_T[:, None, None] * frequency)
    pairs = torch.complex(x_THD[..., : D // 2], x_THD[..., D // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


def run_model(embedding_TD: Tensor, position_T: Tensor, attention, weights: Tensor) -> Tensor:
    """A few layers of rotary attention with residuals: [T, HEADS x D]."""
    x = embedding_TD
    for of_layer in weights:
        q, k, v = ((x @ w).unflatten(1, (HEADS, D)) for w in of_layer)
        x = x + attention(rotate(q, position_T), rotate(k, position_T), v).flatten(1).tanh()
    return x


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.sampled_from([0, 5]))
def test_copies_compute_what_one_anchor_seen_by_the_first_document_does(
    lengths: list[int], anchor_position: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = (LAYERS, 3, HEADS * D, HEADS * D)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64) / 4
    anchor = torch.randn(1, HEADS * D, generator=generator, dtype=torch.float64)
    tokens = torch.randn(sum(lengths), HEADS * D, generator=generator, dtype=torch.float64)

    # The shared form: slot 0 is the anchor, and a token of the first document like any other.
    anchor_document, *others = lengths
    mask_TT = torch.from_numpy(dense_mask(np.cumsum([0, 1 + anchor_document, *others])))
    shared_positions = torch.tensor([anchor_position, *range(1, sum(lengths) + 1)])
    shared = run_model(
        torch.cat((anchor, tokens)),
        shared_positions,
        lambda q, k, v: dense_attention(q, k, v, mask_TT=mask_TT, scale=1 / math.sqrt(D)),
        weights,
    )

    # Ours: a copy of the anchor at the head of every document.
    borders = np.cumsum([0, *(1 + length for length in lengths)])
    position_T = torch.from_numpy(
        positions(
            borders,
            int(borders[-1]),
            pattern=attention_pattern("anchor-masked"),
            anchor_position=anchor_position,
        )
    )
    cu_seqlens = attention_pattern("anchor-masked").segments(borders)
    packed = pack_micro_batch(
        position_T[None], torch.from_numpy(cu_seqlens)[None], seq_length=int(borders[-1])
    )
    pieces = [torch.cat((anchor, piece)) for piece in tokens.split(lengths)]
    ours = run_model(
        torch.cat(pieces),
        position_T,
        lambda q, k, v: attend(q, k, v, runs=packed.runs(), scale=1 / math.sqrt(D), dropout=0.0),
        weights,
    )
    is_anchor = torch.zeros(len(ours), dtype=torch.bool)
    is_anchor[torch.from_numpy(borders[:-1])] = True
    torch.testing.assert_close(ours[~is_anchor], shared[1:], rtol=1e-9, atol=1e-9)
    copies = ours[is_anchor]
    torch.testing.assert_close(copies, shared[:1].expand_as(copies), rtol=1e-9, atol=1e-9)


def test_it_is_not_the_anchor_pattern() -> None:
    borders = np.array([0, 5, 9, 10])
    ours, anchor = (
        attention_pattern(name).segments(borders).tolist() for name in ("anchor-masked", "anchor")
    )
    assert ours == [0, 5, 6, 9, 10]
    assert anchor == [0, 5, 9, 10]


def test_alignment_is_refused_with_the_reason() -> None:
    from tests.unit.packing_oracle import make_config

    with pytest.raises(ValueError, match=r"which no --document-alignment 4 .* can keep"):
        make_config("nowhere", attention_pattern="anchor-masked", document_alignment=4)
