"""FlexAttention: the block mask against the one mask predicate, and the kernel run eagerly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import is_tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_anchor.attention.backends import flex, sdpa
from megatron_anchor.attention.block_mask import BLOCK, documents_block_mask
from megatron_anchor.attention.core import AnchorCoreAttention
from megatron_anchor.attention.masks import dense_mask
from megatron_anchor.attention.packed import pack_micro_batch
from tests.oracle import dense_attention, document_mask

odd_documents = st.lists(
    st.one_of(st.integers(1, 3), st.integers(120, 140), st.just(BLOCK), st.integers(250, 400)),
    min_size=1,
    max_size=8,
)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def blocks_of(dense_TT):
    """Cut a dense mask in blocks: which hold some visible pair, and which only visible ones."""
    T = len(dense_TT)
    padding = -T % BLOCK
    some = np.pad(dense_TT, (0, padding)).reshape(-(-T // BLOCK), BLOCK, -1, BLOCK)
    every = np.pad(dense_TT, (0, padding), constant_values=True).reshape(some.shape)
    return some.any((1, 3)), every.all((1, 3))


def block_table(count, indices):
    table = np.zeros(indices.shape[-2:], dtype=bool)
    for row, (n, columns) in enumerate(zip(count[0, 0], indices[0, 0], strict=True)):
        table[row, columns[:n]] = True
    return table


@settings(max_examples=40)
@given(lengths=odd_documents, shared=st.booleans())
def test_block_mask_is_the_predicate_and_its_blocks_are_the_right_ones(lengths, shared):
    T = sum(lengths)
    mask = documents_block_mask(
        cumulative(lengths), slots=T, shared_anchor_every=T if shared else None
    )
    expected = dense_mask(np.cumsum([0, *lengths]), anchor_index=0 if shared else -1)
    slot = torch.arange(T)
    assert np.array_equal(mask.mask_mod(0, 0, slot[:, None], slot[None]).numpy(), expected)
    some, every = blocks_of(expected)
    partial = block_table(mask.kv_num_blocks, mask.kv_indices)
    full = block_table(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (full & ~every).any(), "a full block is not looked into"
    assert np.array_equal(full | partial, some), "exactly the blocks with something to see"
    diagonal = np.eye(len(full), dtype=bool)
    assert ((full == every) | diagonal | shared).all(), "what is full below the diagonal is marked"
    assert np.array_equal(block_table(mask.q_num_blocks, mask.q_indices).T, partial)
    assert np.array_equal(block_table(mask.full_q_num_blocks, mask.full_q_indices).T, full)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", [[37, 5, 90, 1, 123], [256], [1], [128, 128, 1]])
def test_eager_flex_equals_sdpa_and_the_oracle(lengths, heads):
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v = (torch.randn(T, n, 16) for n in (heads[0], heads[1], heads[1]))
    packed = pack_micro_batch(torch.arange(T)[None], cumulative(lengths)[None], seq_length=T)
    ours, theirs = (
        kernel.attend(q, k, v, packed=packed, scale=0.25, dropout=0.0) for kernel in (flex, sdpa)
    )
    truth = dense_attention(
        q.double(), k.double(), v.double(), mask_TT=document_mask(lengths), scale=0.25
    )
    floor = (dense_attention(q, k, v, mask_TT=document_mask(lengths), scale=0.25) - truth).abs()
    assert (ours - truth).abs().max() <= 2 * floor.max() + 2 * torch.finfo(torch.float32).eps
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_shared_anchor_gives_what_copies_give():
    """Two samples, each of three documents behind one anchor, against copies at their heads."""
    torch.manual_seed(0)
    S, D, own = 12, 16, [[4, 3, 5], [6, 5, 1]]
    anchor, tokens = torch.randn(2, 3, 1, 2, D), torch.randn(2, 3, S, 2, D)
    anchor[:] = anchor[:, :1]  # the same states at position 0 wherever a copy stands
    copies, shared, documents, borders = [], [], [], []
    for sample, lengths in enumerate(own):
        rows = []
        for number, length in enumerate(lengths):
            n = length - 1 if number == 0 else length
            rows += [anchor[sample, 0], tokens[sample, number, :n]]
            if number == 0:
                shared.append(anchor[sample, 0])
            shared.append(tokens[sample, number, :n])
            documents.append(n + 1)
        copies += rows
        borders.append([0, *np.cumsum(lengths)])
    copied, one = torch.cat(copies), torch.cat(shared)
    T = len(copied)
    packed = pack_micro_batch(torch.zeros(1, T), cumulative(documents)[None], seq_length=T)
    single = pack_micro_batch(
        torch.zeros(2, S), torch.tensor(borders), seq_length=S, shared_anchor=True
    )
    settings = {"scale": 0.3, "dropout": 0.0}
    expected = flex.attend(copied, copied, copied, packed=packed, **settings)
    got = flex.attend(one, one, one, packed=single, **settings)
    heads = [int(i) for i in np.cumsum([0, *documents[:-1]])]
    ours_heads = {heads[0], heads[3]}
    keep = [i for i in range(T) if i not in heads or i in ours_heads]
    assert len(keep) == len(got) == 2 * S
    assert torch.allclose(got, expected[keep], atol=1e-6)
    apart = pack_micro_batch(torch.zeros(2, S), torch.tensor(borders), seq_length=S)
    unseen = flex.attend(one, one, one, packed=apart, **settings)
    assert (unseen - expected[keep]).abs().max() > 0.1, "leaving out the anchor would be noticed"


def test_other_kernels_refuse_a_shared_anchor():
    from tests.attention_layers import attention_layer

    layer: AnchorCoreAttention = attention_layer(heads=2, head_dim=16, backend="sdpa")
    packed = pack_micro_batch(
        torch.arange(4)[None], torch.tensor([[0, 2, 4]]), seq_length=4, shared_anchor=True
    )
    q = torch.randn(4, 1, 2, 16)
    with pytest.raises(ValueError, match=r"the kernel sdpa knows no shared anchor.*backend flex"):
        layer(q, q, q, None, packed_seq_params=packed)


class AllocatedBytes(TorchDispatchMode):
    """Adds up every tensor that is made, which is no less than the peak of those alive at once."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if is_tensor(x)}
        for made in tree_leaves(result):
            if is_tensor(made) and made.untyped_storage().data_ptr() not in given:
                self.total += made.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [64, 131072])
def test_no_mask_of_all_pairs_is_built_at_131072_slots(length, shared):
    """One byte a pair would be 17 GB."""
    S = 131072
    cu_seqlens = torch.arange(0, S + 1, length, dtype=torch.int32)
    with AllocatedBytes() as allocated:
        mask = documents_block_mask(cu_seqlens, slots=S, shared_anchor_every=S if shared else None)
    assert mask.shape == (1, 1, S, S)
    assert 10e6 < allocated.total < 200e6


def test_a_mask_of_all_pairs_would_be_noticed():
    with AllocatedBytes() as allocated:
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 4096, 4096, device="cpu")
    assert allocated.total >= 4096**2
