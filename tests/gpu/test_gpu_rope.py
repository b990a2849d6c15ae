"""The compiled rotation on a GPU against the CPU path."""

import pytest
import torch

from megatron_anchor.attention.fused_rope import rotate_in_one_pass
from megatron_anchor.attention.rope import RotarySettings, cos_and_sin, inverse_frequencies, rotate
from tests.oracle import gradients

POSITIONS = torch.cat((torch.arange(500), torch.arange(131072 - 500, 131072)))


def tables(device):
    rotary = RotarySettings(head_dim=128, base=5e6)
    inv_freq, factor = inverse_frequencies(rotary)
    return cos_and_sin(POSITIONS.to(device), inv_freq.to(device), attention_factor=factor)


@pytest.mark.parametrize("interleaved", [False, True])
def test_float32_rotation_equals_the_cpu_within_float32_rounding(interleaved):
    """Same tables on both: what is left is a contracted multiply-add."""
    cos, sin = tables("cpu")
    q, upstream = torch.randn(2, len(POSITIONS), 4, 128)
    expected, expected_grads = gradients(
        lambda x: rotate(x, cos, sin, interleaved=interleaved), [q], upstream
    )
    got, grads = gradients(
        lambda x: rotate_in_one_pass(x, cos.cuda(), sin.cuda(), interleaved=interleaved),
        [q.cuda()],
        upstream.cuda(),
    )
    bound = 2 * torch.finfo(torch.float32).eps * q.abs().max() * 2
    assert (got.cpu() - expected).abs().max() <= bound
    assert (grads[0].cpu() - expected_grads[0]).abs().max() <= 2 * bound


def test_bfloat16_rotation_rounds_once_at_the_end():
    cos, sin = tables("cpu")
    q = torch.randn(len(POSITIONS), 4, 128).bfloat16()
    truth = rotate(q.double(), cos, sin)
    got = rotate_in_one_pass(q.cuda(), cos.cuda(), sin.cuda()).cpu()
    floor = (truth.bfloat16().double() - truth).abs().mean()
    assert (got.double() - truth).abs().mean() <= 1.01 * floor


def test_tables_on_the_gpu_are_those_of_the_cpu_within_float32_angles():
    """A float32 angle near 131072 has an ulp of 0.0078: cos and sin follow the same angle."""
    for ours, theirs in zip(tables("cuda"), tables("cpu"), strict=True):
        assert (ours.cpu() - theirs).abs().max() <= 1e-6
