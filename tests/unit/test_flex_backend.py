"""FlexAttention: the block mask against the one mask predicate, and the kernel run eagerly."""

from functools import partial

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
from megatron_anchor.attention.block_mask import BLOCK, runs_block_mask
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.runs import document_runs
from tests.masks import dense_mask
from tests.oracle import dense_attention, document_mask, gradients

odd_documents = st.lists(
    st.one_of(st.integers(1, 3), st.integers(120, 140), st.just(BLOCK), st.integers(250, 400)),
    min_size=1,
    max_size=8,
)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def documents(lengths):
    return document_runs(np.array(lengths), device=torch.device("cpu"))


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
@given(lengths=odd_documents)
def test_block_mask_is_the_predicate_and_its_blocks_are_the_right_ones(lengths):
    T = sum(lengths)
    mask = runs_block_mask(documents(lengths))
    expected = dense_mask(np.cumsum([0, *lengths]))
    slot = torch.arange(T)
    assert np.array_equal(mask.mask_mod(0, 0, slot[:, None], slot[None]).numpy(), expected)
    some, every = blocks_of(expected)
    partial = block_table(mask.kv_num_blocks, mask.kv_indices)
    full = block_table(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (full & ~every).any(), "a full block is not looked into"
    assert np.array_equal(full | partial, some), "exactly the blocks with something to see"
    diagonal = np.eye(len(full), dtype=bool)
    assert ((full == every) | diagonal).all(), "what is full below the diagonal is marked"
    assert np.array_equal(block_table(mask.q_num_blocks, mask.q_indices).T, partial)
    assert np.array_equal(block_table(mask.full_q_num_blocks, mask.full_q_indices).T, full)


@pytest.fixture
def backward_on_cpu(monkeypatch):
    """torch's eager FlexAttention can be differentiated on a CPU; only its public check refuses."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", [[37, 5, 90, 1, 123], [256], [1], [128, 128, 1]])
def test_eager_flex_equals_sdpa_and_stays_at_the_error_floor(lengths, heads, backward_on_cpu):
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v, upstream = (torch.randn(T, n, 16) for n in (heads[0], heads[1], heads[1], heads[0]))
    packed = pack_micro_batch(torch.arange(T)[None], cumulative(lengths)[None], seq_length=T)

    def dense(*inputs):
        return dense_attention(*inputs, mask_TT=document_mask(lengths), scale=0.25)

    def attend(kernel, *inputs):
        return kernel.attend(*inputs, runs=packed.runs(), scale=0.25, dropout=0.0)

    truth = gradients(dense, [x.double() for x in (q, k, v)], upstream)
    floor, ours, theirs = (
        gradients(function, [q, k, v], upstream)
        for function in (dense, partial(attend, flex), partial(attend, sdpa))
    )
    largest = max(x.abs().max() for x in (truth[0], *truth[1], upstream))
    ulp = 2 * torch.finfo(torch.float32).eps * largest
    for factor, got, other, base, true in zip(
        (2, 3, 3, 3), *((x[0], *x[1]) for x in (ours, theirs, floor, truth)), strict=True
    ):
        assert (got - true).abs().max() <= factor * (base - true).abs().max() + ulp
        assert torch.allclose(got, other, atol=1e-5)


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


@pytest.mark.parametrize("length", [64, 131072])
def test_no_mask_of_all_pairs_is_built_at_131072_slots(length):
    """One byte a pair would be 17 GB."""
    S = 131072
    with AllocatedBytes() as allocated:
        mask = runs_block_mask(documents([length] * (S // length)))
    assert mask.shape == (1, 1, S, S)
    assert 10e6 < allocated.total < 200e6


def test_a_mask_of_all_pairs_would_be_noticed():
    with AllocatedBytes() as allocated:
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 4096, 4096, device="cpu")
    assert allocated.total >= 4096**2


@pytest.fixture
def compiled(monkeypatch):
    """Our compiled kernel under a compiler of no cost; a call that is not compiled is an error."""
    from torch.nn.attention import flex_attention as module

    def uncompiled(**_):
        raise AssertionError("FlexAttention ran uncompiled, with S x S scores")

    monkeypatch.setattr(module, "_warn_once", uncompiled)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, disable=False):
        yield flex._flex_attention.__wrapped__("cuda")
    torch._dynamo.reset()


def call_kinds(kernel, count):
    q = torch.ones(1, 1, 4, 16)
    for number in range(count):
        assert torch.equal(kernel(q, q, q, scale=1.0 + number), q)


def test_more_kinds_of_calls_than_torch_would_compile_are_all_compiled(compiled):
    call_kinds(compiled, 4)


def test_running_out_of_compilations_is_an_error_and_no_silent_fallback(compiled):
    torch._dynamo.config.recompile_limit = 1
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        call_kinds(compiled, 4)
