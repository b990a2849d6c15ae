"""Rotation: Hugging Face's values, float32 inside, explicit positions."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.rope import (
    RotarySettings,
    cos_and_sin,
    inverse_frequencies,
    rotate,
)
from tests.oracle import gradients

HEAD_DIM, S = 16, 600
SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def hugging_face_rotation(scaling, positions, dtype=torch.float32):
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": 5e5},
    )
    return LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])


def our_rotation(scaling, positions, **kwargs):
    rotary = RotarySettings(
        head_dim=HEAD_DIM, base=5e5, scaling=scaling, max_position_embeddings=512, **kwargs
    )
    inv_freq, factor = inverse_frequencies(rotary, seq_length=S)
    return cos_and_sin(positions, inv_freq, attention_factor=factor)


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotation_equals_hugging_face_bit_for_bit(kind):
    positions = torch.cat((torch.arange(S), torch.tensor([0, 7, 3, 0])))
    theirs_cos, theirs_sin = hugging_face_rotation(SCALINGS[kind], positions)
    ours_cos, ours_sin = our_rotation(SCALINGS[kind], positions)
    assert torch.equal(torch.cat((ours_cos, ours_cos), -1), theirs_cos[0])
    assert torch.equal(torch.cat((ours_sin, ours_sin), -1), theirs_sin[0])

    q = torch.randn(len(positions), 3, HEAD_DIM)
    theirs, _ = apply_rotary_pos_emb(q[None], q[None], theirs_cos, theirs_sin, unsqueeze_dim=2)
    assert torch.equal(rotate(q, ours_cos, ours_sin), theirs[0])


def test_scalings_are_not_all_the_same():
    positions = torch.arange(S)
    tables = [our_rotation(scaling, positions)[0] for scaling in SCALINGS.values()]
    assert len({tuple(t[-1].tolist()) for t in tables}) == len(tables)


def test_bfloat16_rotation_stays_at_the_floor_of_its_inputs_and_outputs():
    """Against float64, ours errs like one rounding of the result; Hugging Face's errs more."""
    torch.manual_seed(0)
    positions = torch.arange(4096, dtype=torch.int64)
    q = torch.randn(4096, 8, HEAD_DIM).bfloat16()
    cos, sin = our_rotation({}, positions, angle_dtype="float64")
    truth = rotate_float64(q.double(), positions)
    floor = (truth.bfloat16().double() - truth).abs().mean()
    ours = (rotate(q, cos, sin).double() - truth).abs().mean()
    theirs_cos, theirs_sin = hugging_face_rotation({}, positions, torch.bfloat16)
    theirs, _ = apply_rotary_pos_emb(q[None], q[None], theirs_cos, theirs_sin, unsqueeze_dim=2)
    assert ours <= 1.01 * floor
    assert (theirs[0].double() - truth).abs().mean() > 1.5 * floor


def rotate_float64(q, positions):
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    angles = positions[:, None].double() * 5e5**-exponents
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = q.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_interleaved_rotation_is_the_same_rotation_of_permuted_dimensions():
    positions = torch.arange(9)
    cos, sin = our_rotation({}, positions)
    halves = torch.randn(9, 2, HEAD_DIM)
    pairs = torch.stack(halves.chunk(2, -1), -1).flatten(-2)
    turned = rotate(pairs, cos, sin, interleaved=True)
    expected = torch.stack(rotate(halves, cos, sin).chunk(2, -1), -1).flatten(-2)
    assert torch.equal(turned, expected)


def test_partial_rotation_leaves_the_rest_of_the_head_alone():
    positions = torch.arange(5)
    cos, sin = our_rotation({}, positions, fraction=0.5)
    q = torch.randn(5, 2, HEAD_DIM)
    turned = rotate(q, cos, sin)
    assert torch.equal(turned[..., HEAD_DIM // 2 :], q[..., HEAD_DIM // 2 :])
    assert not torch.equal(turned[1:, :, : HEAD_DIM // 2], q[1:, :, : HEAD_DIM // 2])


def test_position_zero_is_not_rotated():
    cos, sin = our_rotation({}, torch.zeros(3, dtype=torch.int64))
    q = torch.randn(3, 2, HEAD_DIM)
    assert torch.equal(rotate(q, cos, sin), q)


def test_rotation_is_computed_once_a_micro_batch():
    packed = pack_micro_batch(torch.arange(6)[None], torch.tensor([[0, 4, 6, 6]]), seq_length=6)
    rotary = RotarySettings(head_dim=HEAD_DIM)
    assert packed.rotation(rotary)[0] is packed.rotation(rotary)[0]
    assert packed.rotation(rotary)[0].shape == (6, 1, HEAD_DIM // 2)


def test_micro_batch_documents_are_laid_one_sample_after_another():
    cu_seqlens = torch.tensor([[0, 4, 6, 6, 6], [0, 1, 2, 3, 6]], dtype=torch.int32)
    packed = pack_micro_batch(torch.zeros(2, 6, dtype=torch.int64), cu_seqlens, seq_length=6)
    assert packed.document_lengths.tolist() == [4, 2, 1, 1, 1, 3]
    assert packed.cu_seqlens_q.tolist() == [0, 4, 6, 7, 8, 9, 12]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"head_dim": 7}, "head_dim 7 is 7 dimensions"),
        ({"head_dim": 8, "fraction": 0.0}, "is 0 dimensions"),
        ({"head_dim": 8, "angle_dtype": "bfloat16"}, "unknown angle dtype 'bfloat16'"),
    ],
)
def test_bad_settings_are_refused_with_the_value(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RotarySettings(**kwargs)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarm", "factor": 2.0}, "unknown rope_type 'yarm'"),
        ({"rope_type": "linear"}, "'linear' needs a parameter .* lacks: 'factor'"),
    ],
)
def test_bad_scalings_are_refused_with_the_value(scaling, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(RotarySettings(head_dim=8, scaling=scaling))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_graph_that_is_compiled_for_gpus_is_the_same_rotation(interleaved):
    """Traced and differentiated by the compiler's front end, run without its code generator."""
    torch.manual_seed(0)
    compiled = torch.compile(rotate, dynamic=True, backend="aot_eager")
    for tokens, dtype in ((9, torch.float32), (14, torch.bfloat16)):
        tables = our_rotation({}, torch.arange(tokens), fraction=0.5)
        q, upstream = torch.randn(2, tokens, 3, HEAD_DIM)
        (ours, (ours_grad,)), (eager, (eager_grad,)) = (
            gradients(partial(rotation, tables, interleaved), [q.to(dtype)], upstream)
            for rotation in (partial(apply_rotation, f) for f in (compiled, rotate))
        )
        assert torch.equal(ours, eager)
        assert torch.equal(ours_grad, eager_grad)


def apply_rotation(function, tables, interleaved, x):
    return function(x, *tables, interleaved=interleaved)
