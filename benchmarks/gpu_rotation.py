"""The compiled rotation against the plain one of the CPU, bit by bit, up to position 131071.

In bfloat16, as training uses it, no value may differ; a product and a sum that the compiler
contracts round once less in float32, which shows in bfloat16 only where a value lies on the border
between two. So the bits that differ are counted, and none may be off by more than one step.

    python benchmarks/gpu_rotation.py --output rotation.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gpu_checks
import torch

from megatron_anchor.attention.fused_rope import compiled_rotate
from megatron_anchor.attention.rope import RotarySettings, cos_and_sin, inverse_frequencies, rotate

DIFFERING = 1e-4
"""Share of bfloat16 values that contraction may move by one step: 2^16 float32 steps lie between
two bfloat16 values, and a few of them around the border can be crossed."""


def tables(positions: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of Llama 3's rotation."""
    inv_freq, factor = inverse_frequencies(RotarySettings(head_dim=128, base=5e5))
    return cos_and_sin(positions.to(device), inv_freq.to(device), attention_factor=factor)


def compare(
    dtype: torch.dtype,
    interleaved: bool,
    function: Callable[..., torch.Tensor],
    positions: torch.Tensor,
    device: str,
) -> tuple[float, str]:
    """Rotate and differentiate by `function` and on the CPU, and count what differs."""
    generator = torch.Generator().manual_seed(0)
    x, upstream = (
        torch.randn(len(positions), 4, 128, generator=generator).to(dtype) for _ in range(2)
    )
    cos, sin = tables(positions, "cpu")

    def run(rotation: Callable[..., torch.Tensor], where: str) -> list[torch.Tensor]:
        leaf = x.to(where).requires_grad_()
        out = rotation(leaf, cos.to(where), sin.to(where), interleaved=interleaved)
        out.backward(upstream.to(where))
        assert leaf.grad is not None
        return [out.detach().cpu(), leaf.grad.cpu()]

    ours = run(function, device)
    pairs = list(zip(ours, run(rotate, "cpu"), strict=True))
    differing = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    step = torch.finfo(dtype).eps
    off = max(float(((a - b).abs() / (b.abs() + step)).max()) for a, b in pairs) / step
    note = "the same bits" if not differing else f"{differing:.2%} differ, by up to {off:.1f} steps"
    if dtype == torch.float32:  # a contracted multiply-add, twice in the gradient
        largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        return largest / (4 * step), note
    return max(differing / DIFFERING, off / 2), note


def table_error(positions: torch.Tensor, device: str) -> tuple[float, str]:
    """cos and sin of this device against the CPU's."""
    pairs = zip(tables(positions, device), tables(positions, "cpu"), strict=True)
    error = max(float((ours.cpu() - theirs).abs().max()) for ours, theirs in pairs)
    return error / 1e-6, "the same bits" if not error else f"up to {error:.1e}"


def main() -> None:
    """Compare in both layouts, compiled and not."""
    options = gpu_checks.parse(__doc__)
    checks = gpu_checks.Checks(options)
    count = 64 if options.quick else 2048
    positions = torch.cat((torch.arange(count), torch.arange(131072 - count, 131072)))
    # The rehearsal goes through the compiler's first half alone: the second takes minutes on a CPU.
    compiled = torch.compile(rotate, backend="eager") if options.quick else compiled_rotate()
    functions = {"rotation, compiled": compiled, "rotation, not compiled": rotate}
    for dtype in (torch.bfloat16, torch.float32):
        for interleaved in (False, True):
            for what, function in functions.items():
                case = f"{dtype}".removeprefix("torch.") + (" interleaved" if interleaved else "")
                measure = partial(compare, dtype, interleaved, function, positions, options.device)
                checks.run(what, case, measure)
    checks.run("tables of cos and sin", "float32", partial(table_error, positions, options.device))


if __name__ == "__main__":
    main()
