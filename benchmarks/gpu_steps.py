"""Five training steps of a small Llama-shaped model on this device against the CPU's losses.

Both begin with the same weights and read the same packed documents. The CPU trains in float32 and
in bfloat16; how far its own losses lie apart is what rounding does, and what a kernel in bfloat16
may do, twice over. In float32, which rounds 65536 times finer, a 64th of it is allowed.

    python benchmarks/gpu_steps.py --output steps.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu_checks
import gpu_train
import torch

from megatron_anchor.attention.backends import BACKENDS, AttentionRequest, load_backend
from megatron_anchor.attention.backends.request import this_hardware

STEPS = 5
SHAPE = gpu_train.Shape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocabulary=512)
QUICK_SHAPE = replace(SHAPE, layers=1, hidden=64, ffn=64)
DOCUMENTS = [300, 1, 45, 500, 90, 88]
PRINTED = 1e-6
CPU_ARMS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train(
    shape: gpu_train.Shape, weights: Path, backend: str, dtype: torch.dtype, device: str
) -> list[float]:
    """Losses of the steps, from these weights."""
    from megatron_anchor.attention.packed import pack_micro_batch

    model = gpu_train.build_model(shape, backend, dtype, device)
    found = model.load_state_dict(torch.load(weights, weights_only=True), strict=False)
    left_out = [name for name in found.missing_keys if not name.endswith("_extra_state")]
    if left_out or found.unexpected_keys:
        raise RuntimeError(f"weights do not fit: {left_out} {found.unexpected_keys}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = sum(DOCUMENTS)
    borders = torch.tensor([[0, *DOCUMENTS]]).cumsum(1).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].to(device)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        text = torch.randint(0, shape.vocabulary, (1, tokens + 1), generator=generator).to(device)
        text = text // 8  # fewer words than the vocabulary has, so that there is something to learn
        packed = pack_micro_batch(positions, borders, seq_length=tokens)
        each = model(text[:, :-1], positions, None, labels=text[:, 1:], packed_seq_params=packed)
        loss = each.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save_weights(shape: gpu_train.Shape, path: Path) -> None:
    """Random weights, drawn on the CPU."""
    model = gpu_train.build_model(shape, "sdpa", torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05 + mean
    torch.save({name: value.detach() for name, value in model.named_parameters()}, path)


def cpu_losses(folder: Path, *, quick: bool) -> dict[str, list[float]]:
    """Train on the CPU in a process of its own, where CUDA means the CPU.

    Raises:
        RuntimeError: it failed, with its last lines.
    """
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--cpu-arm",
        str(folder),
        *["quick"] * quick,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"the CPU's steps: {last[0]}")
    found: dict[str, list[float]] = torch.load(folder / "losses.pt", weights_only=True)
    return found


def cpu_arm(folder: Path, shape: gpu_train.Shape) -> None:
    """Write the weights and the CPU's losses."""
    gpu_train.start_megatron("cpu")
    save_weights(shape, folder / "weights.pt")
    losses = {
        name: train(shape, folder / "weights.pt", "sdpa", dtype, "cpu")
        for name, dtype in CPU_ARMS.items()
    }
    torch.save(losses, folder / "losses.pt")


def compare(
    cpu: dict[str, list[float]], dtype: torch.dtype, losses: Callable[[], list[float]]
) -> tuple[float, str]:
    """The largest difference from the CPU's float32 losses over what is allowed."""
    ours = losses()
    rounding = max(abs(a - b) for a, b in zip(cpu["float32"], cpu["bfloat16"], strict=True))
    allowed = 2 * rounding if dtype == torch.bfloat16 else rounding / 64
    off = max(abs(a - b) for a, b in zip(ours, cpu["float32"], strict=True))
    shown = ", ".join(f"{loss:.5f}" for loss in ours)
    return off / (allowed + PRINTED), f"{shown}; off by {off:.1e}, rounding {rounding:.1e}"


def arms(checks: gpu_checks.Checks) -> list[tuple[str, torch.dtype]]:
    """The backends that can serve, sdpa in float32 first."""
    found = [("sdpa", torch.float32)]
    for name in BACKENDS:
        request = AttentionRequest(
            head_dim=SHAPE.head_dim,
            dtype=torch.bfloat16,
            query_heads=SHAPE.heads,
            kv_heads=SHAPE.kv_heads,
            hardware=this_hardware(),
        )
        reason = load_backend(name).unsupported_reason(request)
        if reason is None:
            found.append((name, torch.bfloat16))
        else:
            checks.leave_out(f"five steps, {name}", reason)
    return found


def main() -> None:
    """Train on the CPU, then with every kernel here."""
    if sys.argv[1:2] == ["--cpu-arm"]:
        cpu_arm(Path(sys.argv[2]), QUICK_SHAPE if "quick" in sys.argv[3:] else SHAPE)
        return
    options = gpu_checks.parse(__doc__)
    checks = gpu_checks.Checks(options)
    with tempfile.TemporaryDirectory() as name:
        measure_all(checks, options, Path(name))


def measure_all(checks: gpu_checks.Checks, options: argparse.Namespace, folder: Path) -> None:
    """Compare every kernel, once the CPU's losses are there."""
    cpu: dict[str, list[float]] = {}
    shape, weights = QUICK_SHAPE if options.quick else SHAPE, folder / "weights.pt"

    def on_cpu() -> tuple[float, str]:
        cpu.update(cpu_losses(folder, quick=options.quick))
        return 0.0, ", ".join(f"{loss:.5f}" for loss in cpu["float32"])

    checks.run("five steps, the CPU's own losses", "float32", on_cpu)
    if not cpu:
        return
    gpu_train.start_megatron(options.device)
    for backend, dtype in arms(checks):
        steps = partial(train, shape, weights, backend, dtype, options.device)
        case = str(dtype).removeprefix("torch.")
        checks.run(f"five steps, {backend}", case, partial(compare, cpu, dtype, steps))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
