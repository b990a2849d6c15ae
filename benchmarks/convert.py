"""Speed and memory of the converters on a random model, next to `cp` on the same disk.

    python benchmarks/convert.py --folder /tmp/convert --parameters 1e9

Each conversion runs in a process of its own, so that its peak memory is its own. The median of the
rounds counts; `cp` and the converters take turns. Files are new every time, and the sources are in
the page cache for all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from side_by_side import Comparison, Figure, Findings, at_least_one, duration

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def write_model(folder: Path, *, parameters: float) -> None:
    """Write random bf16 weights of about so many parameters, without a model in memory."""
    import torch

    from megatron_anchor.checkpoint.families import rules_for
    from megatron_anchor.checkpoint.hugging_face_config import model_of
    from megatron_anchor.checkpoint.hugging_face_weights import TensorPlan, write_weights

    one = 2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192
    layers = max(1, round((parameters - 2 * 32000 * 2048) / one))
    config = SHAPE | {"num_hidden_layers": layers}
    model = model_of(config)
    plans = [
        TensorPlan(name, shape, torch.bfloat16)
        for rule in rules_for(model)
        for indices in rule.indices(model)
        for name, shape in zip(rule.names(indices), rule.source_shapes(model), strict=True)
    ]
    sizes = {plan.name: plan.bytes for plan in plans}
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    write_weights(
        folder,
        plans,
        lambda name: [generator.integers(0, 2**16, sizes[name] // 2, np.uint16).view(np.uint8)],
        shard_bytes=1_000_000_000,
    )
    (folder / "config.json").write_text(json.dumps(config))


def measured(function: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Run in a new process; give seconds and peak resident memory in GB, imports aside."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, args))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _child(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import megatron.core  # noqa: F401
    import torch  # noqa: F401
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import megatron_anchor.checkpoint.to_hugging_face
    import megatron_anchor.checkpoint.to_megatron  # noqa: F401

    CONFIG_MAPPING["llama"]  # imports the class that the converters ask for defaults

    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    function(*args)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send({"seconds": seconds, "peak": peak / 2**20, "idle": idle / 2**20})


def copy(source: Path, out: Path) -> None:
    """What `cp` does, file by file."""
    out.mkdir()
    subprocess.run(["cp", *source.iterdir(), out], check=True)


def to_megatron(source: Path, out: Path) -> None:
    """Convert without a bar."""
    from megatron_anchor.checkpoint.to_megatron import convert_to_megatron

    convert_to_megatron(source, out, progress=False)


def to_hugging_face(source: Path, out: Path) -> None:
    """Convert without a bar."""
    from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face

    convert_to_hugging_face(source, out, progress=False, shard_bytes=1_000_000_000)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        help="on the disk to measure; all is made in a new folder there",
    )
    parser.add_argument("--parameters", type=float, default=1e9, help="default 1e9")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="default 3")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="convert_", dir=args.folder))
    try:
        findings = measure(root, args.parameters, args.rounds)
    finally:
        shutil.rmtree(root)
    print(findings.table())
    if args.json:
        findings.write(args.json)


def measure(root: Path, parameters: float, rounds: int) -> Findings:
    """Write a model to a folder, and convert and copy it in turns."""
    write_model(root / "hf", parameters=parameters)
    to_megatron(root / "hf", root / "megatron")
    os.sync()
    size = sum(path.stat().st_size for path in (root / "hf").iterdir()) / 1e9
    runs: dict[str, tuple[Callable[..., None], Path]] = {
        "cp": (copy, root / "hf"),
        "Hugging Face to Megatron": (to_megatron, root / "hf"),
        "Megatron to Hugging Face": (to_hugging_face, root / "megatron"),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (function, source) in runs.items():
            results[name].append(measured(function, source, root / "out"))
            shutil.rmtree(root / "out")
            os.sync()
    return Findings(
        comparisons=[row(name, results, size) for name in runs if name != "cp"],
        figures=[memory(name, results) for name in runs],
    )


def row(name: str, results: dict[str, list[dict[str, float]]], size: float) -> Comparison:
    """Make a conversion's row; `size` is in GB."""
    ours, theirs = ([r["seconds"] for r in results[way]] for way in (name, "cp"))
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    return Comparison(
        what=f"{name}, {size:.2f} GB of bf16 weights",
        peer="cp",
        ours=duration(statistics.median(ours)),
        theirs=duration(statistics.median(theirs)),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        repeats=len(ratios),
    )


def memory(name: str, results: dict[str, list[dict[str, float]]]) -> Figure:
    """Make a figure of a process' peak memory."""
    peak, idle = (max(r[key] for r in results[name]) for key in ("peak", "idle"))
    return Figure(
        what=f"peak memory, {name}", value=f"{peak:.2f} GB, {idle:.2f} GB of it before it starts"
    )


if __name__ == "__main__":
    main()
