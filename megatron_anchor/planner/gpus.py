"""What a GPU can do, by its maker's data sheets; each figure can be replaced by a flag."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from megatron_anchor.errors import UserError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in its usual server."""

    name: str
    capability: tuple[int, int]
    """CUDA compute capability."""
    tflops: float
    """Dense bfloat16 tensor-core peak, 10^12 operations a second."""
    memory_gib: float
    """Memory that CUDA reports, GiB; a little less than the name says."""
    nvlink: float
    """GB/s in one direction inside a server: half of the data sheet's bidirectional figure."""
    network: float
    """GB/s in one direction for each GPU between servers."""
    per_node: int = 8
    source: str = ""

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * GIB


_A100 = "NVIDIA A100 data sheet; network: DGX A100 (8 x 200 Gb/s)"
_H100 = "NVIDIA H100 data sheet (SXM); network: DGX H100 (8 x 400 Gb/s)"
_H200 = "NVIDIA H200 data sheet (SXM); network: DGX H200 (8 x 400 Gb/s)"
_B200 = "NVIDIA DGX B200 data sheet (8 GPUs: 72 PFLOP/s FP8 sparse, 1440 GB, 14.4 TB/s NVLink)"

GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu(
            name="A100-40GB",
            capability=(8, 0),
            tflops=312,
            memory_gib=39.4,
            nvlink=300,
            network=25,
            source=_A100,
        ),
        Gpu(
            name="A100-80GB",
            capability=(8, 0),
            tflops=312,
            memory_gib=79.1,
            nvlink=300,
            network=25,
            source=_A100,
        ),
        Gpu(
            name="H100",
            capability=(9, 0),
            tflops=989,
            memory_gib=79.1,
            nvlink=450,
            network=50,
            source=_H100,
        ),
        Gpu(
            name="H200",
            capability=(9, 0),
            tflops=989,
            memory_gib=139.8,
            nvlink=450,
            network=50,
            source=_H200,
        ),
        Gpu(
            name="B200",
            capability=(10, 0),
            tflops=2250,
            memory_gib=167.0,
            nvlink=900,
            network=50,
            source=_B200,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """Look a GPU up by name, in any case.

    Raises:
        UserError: for an unknown one, with the nearest name.
    """
    aliases = {"a100": "a100-80gb", "h100-80gb": "h100", "h200-141gb": "h200"}
    key = name.lower()
    gpu = GPUS.get(aliases.get(key, key))
    if gpu is None:
        near = get_close_matches(key, GPUS, n=1)
        raise UserError(
            f"--gpu {name}: "
            + (f"did you mean {GPUS[near[0]].name}? " if near else "")
            + f"known are {', '.join(g.name for g in GPUS.values())}; for another one give the "
            "nearest of them with --peak-tflops, --memory-gib, --nvlink-gbs and --network-gbs"
        )
    return gpu
