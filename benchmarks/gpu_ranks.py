"""Two ranks of NCCL, on two GPUs or on one: collectives, and context parallelism against one rank.

NCCL takes two ranks on one GPU from 2.30 on, when NCCL_MULTI_RANK_GPU_ENABLE=1 (its environment
page calls that experimental); before, it refuses, and the report says so.

    python benchmarks/gpu_ranks.py --output ranks.json
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gpu_checks
import torch
import torch.distributed as dist

RANKS = 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
DOCUMENTS = [5, 1, 130, 376]
SECONDS = 60


def start(rank: int, port: int, device: str) -> torch.device:
    """Join the group; ranks share a device where there is one only."""
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    return here


def sums(here: torch.device) -> tuple[float, str]:
    """all_reduce of whole numbers in bfloat16, which are exact."""
    x = torch.arange(200, device=here).bfloat16() * (dist.get_rank() + 1)
    dist.all_reduce(x)
    wrong = int((x != torch.arange(200, device=here).bfloat16() * 3).sum())
    return float("inf") if wrong else 0.0, f"{wrong} of 200 values differ"


def attention(kind: str, here: torch.device) -> tuple[float, str]:
    """The package's context parallelism over both ranks against one, forward and backward."""
    from megatron_anchor.attention.backends import load_backend
    from megatron_anchor.attention.context_parallel import Communication
    from megatron_anchor.attention.packed import pack_micro_batch

    S, group = sum(DOCUMENTS), dist.group.WORLD
    kernel, scale = load_backend("sdpa").attend, HEAD_DIM**-0.5
    borders = torch.tensor([[0, *DOCUMENTS]]).cumsum(1).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].to(here)
    generator = torch.Generator().manual_seed(7)
    tensors = [
        torch.randn(S, 1, heads, HEAD_DIM, generator=generator).bfloat16().to(here)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]

    def run(communication: Communication, slots: slice, parts: Any) -> list[torch.Tensor]:
        leaves = [x[slots].clone().requires_grad_() for x in tensors[:3]]
        packed = pack_micro_batch(positions, borders, seq_length=S, part_of_chunk=parts)
        out = communication.attend(*leaves, kernel=kernel, packed=packed, scale=scale, dropout=0.0)
        out.backward(tensors[3][slots])
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    own = slice(dist.get_rank() * S // RANKS, (dist.get_rank() + 1) * S // RANKS)
    chunks = torch.arange(RANKS).numpy()
    both = {
        "a2a": lambda: run(Communication(heads_group=group), own, ()),
        "gather": lambda: run(Communication(keys_group=group), own, (chunks,)),
    }[kind]()
    whole = run(Communication(), slice(0, S), ())
    pairs = [(got, want[own]) for got, want in zip(both, whole, strict=True)]
    if kind == "a2a":
        different = sum(not torch.equal(got, want) for got, want in pairs)
        return float("inf") if different else 0.0, f"{different} of 4 tensors differ in a bit"
    off = max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)
    return off / (4 * torch.finfo(torch.bfloat16).eps), f"off by {off:.1e} of the largest value"


def rank_main(rank: int, port: int, options: argparse.Namespace) -> None:
    """Run the checks on one rank; each writes its own file."""
    options.output = own_file(options.output, rank)
    checks = gpu_checks.Checks(options)
    here = start(rank, port, options.device)
    name = "NCCL" if options.device == "cuda" else "gloo"
    where = f"{RANKS} ranks on {min(RANKS, max(1, torch.cuda.device_count()))} device(s)"
    checks.run(f"{name}, all_reduce", where, partial(sums, here))
    for kind in ("a2a", "gather"):
        checks.run(f"{name}, attention under {kind}", where, partial(attention, kind, here))
    dist.destroy_process_group()


def own_file(path: Path, rank: int) -> Path:
    """Where a rank writes what it found."""
    return path.with_name(f"{path.stem}-rank{rank}.json")


def main() -> None:
    """Start the ranks, and write what both found and why one ended."""
    rank = os.environ.get("GPU_RANKS_RANK")
    options = gpu_checks.parse(__doc__)
    if rank is not None:
        rank_main(int(rank), int(os.environ["GPU_RANKS_PORT"]), options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"GPU_RANKS_PORT": str(port), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    command = [sys.executable, "-W", "ignore", *sys.argv]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"GPU_RANKS_RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(RANKS)
    ]
    checks = gpu_checks.Checks(options)
    for number, process in enumerate(ranks):
        error = ended(process, seconds=60 * options.minutes)
        for row in gpu_checks.read(own_file(options.output, number)):
            checks.add(row | {"case": f"{row['case']}, rank {number}"})
        if error:
            about = {"error / allowed": None, "result": gpu_checks.FAILED, "note": error}
            checks.add({"check": "ranks end", "case": f"rank {number}"} | about)
        own_file(options.output, number).unlink(missing_ok=True)


def ended(process: subprocess.Popen[str], *, seconds: float) -> str | None:
    """Wait for a rank, and give its last words if it failed."""
    try:
        _, words = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"did not end within {seconds:.0f} s"
    telling = [line for line in words.splitlines() if "Error" in line or "GPU" in line]
    if process.returncode:
        return (telling or words.splitlines() or [f"exit code {process.returncode}"])[-1][:200]
    return None


if __name__ == "__main__":
    main()
