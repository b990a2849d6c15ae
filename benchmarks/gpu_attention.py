"""Attention forward and backward, `full` against `anchor`, for every kernel of this machine.

Work is counted as 4 x head dim x heads x visible pairs forward and 2.5 times that backward, so the
rate says how well a kernel does what it has to do, and the time says what documents save. `share`
is the rate over the best that any kernel reached at that length. Needs torch and megatron-core;
Transformer Engine and flash-attn appear when they are installed. Ends within 10 minutes.

    python benchmarks/gpu_attention.py --output measurements/attention
    python benchmarks/gpu_attention.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import gpu_lengths
import torch

from megatron_anchor.attention.backends import (
    BACKENDS,
    AttentionRequest,
    Layer,
    bind_backend,
    load_backend,
    this_hardware,
)
from megatron_anchor.attention.packed import pack_micro_batch

SEQ_LENGTHS, QUICK_SEQ_LENGTHS = [16384, 65536, 131072], [256, 1024]
BACKWARD_OVER_FORWARD = 2.5
PICTURE = {
    "title": "Attention forward and backward",
    "value": "TFLOP/s",
    "label": "TFLOP/s of visible pairs",
}


def serving_backends(options: argparse.Namespace) -> list[str]:
    """Name the kernels that can serve, and print why the others cannot."""
    request = AttentionRequest(
        head_dim=options.head_dim,
        dtype=options.dtype,
        query_heads=options.heads,
        kv_heads=options.kv_heads,
        hardware=this_hardware(),
    )
    names = []
    for name in options.backends or BACKENDS:
        reason = load_backend(name).unsupported_reason(request)
        if reason is None:
            names.append(name)
        else:
            print(f"without {name}: {reason}")
    return names


def bind(name: str, options: argparse.Namespace) -> Any:
    """Bind a kernel to a layer of the benchmark's shape."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.heads * options.head_dim,
        num_attention_heads=options.heads,
        num_query_groups=options.kv_heads,
        kv_channels=options.head_dim,
        attention_dropout=0.0,
        params_dtype=options.dtype,
    )
    layer = Layer(
        config=config,
        layer_number=1,
        scale=options.head_dim**-0.5,
        pg_collection=SimpleNamespace(tp=None, cp=None),  # type: ignore[arg-type]
    )
    return bind_backend(name, layer)


def measure(name: str, lengths: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Time forward and backward of one kernel over one sample."""
    tokens, attend = sum(lengths), bind(name, options)
    cu_seqlens = torch.tensor([[0, *lengths]], device=options.device).cumsum(1).to(torch.int32)
    positions = torch.arange(tokens, device=options.device)[None]
    packed = pack_micro_batch(positions, cu_seqlens, seq_length=tokens)
    shapes = [(tokens, heads, options.head_dim) for heads in (options.heads, options.kv_heads)]
    q, k, v = (
        torch.randn(shape, device=options.device, dtype=options.dtype, requires_grad=True)
        for shape in (shapes[0], shapes[1], shapes[1])
    )
    upstream = torch.randn_like(q)

    def run() -> tuple[float, float]:
        started = now(options)
        out = attend(q, k, v, runs=packed.runs(), scale=options.head_dim**-0.5, dropout=0.0)
        between = now(options)
        out.backward(upstream)
        q.grad = k.grad = v.grad = None
        return between - started, now(options) - between

    run()  # compiles and warms up
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [run() for _ in range(options.repeats)]
    forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    work = 4 * options.head_dim * options.heads * pairs * (1 + BACKWARD_OVER_FORWARD)
    row = {
        "documents": len(lengths),
        "forward ms": forward * 1e3,
        "backward ms": backward * 1e3,
        "TFLOP/s": work / (forward + backward) / 1e12,
    }
    if options.device == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def now(options: argparse.Namespace) -> float:
    """Seconds, when the device is done with what it was given."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def add_shares(rows: list[dict[str, Any]]) -> None:
    """Add what the best rate of all says about each, and what documents save."""
    for row in rows:
        if row.get("TFLOP/s") is None:
            continue
        same = [r for r in rows if r["tokens"] == row["tokens"] and r.get("TFLOP/s") is not None]
        row["share"] = row["TFLOP/s"] / max(r["TFLOP/s"] for r in same)
        full = [r for r in same if (r["kernel"], r["pattern"]) == (row["kernel"], "full")]
        spent = row["forward ms"] + row["backward ms"]
        if full:
            row["full / this"] = (full[0]["forward ms"] + full[0]["backward ms"]) / spent


def cases(options: argparse.Namespace) -> list[tuple[int, str, str, list[int]]]:
    """List tokens, name of the lengths, pattern and document lengths, the shortest first."""
    sources = [gpu_lengths.slimpajama_like(), gpu_lengths.long_documents()]
    if options.corpus:
        sources.append(gpu_lengths.from_corpus(options.corpus))
    found = []
    for tokens in options.seq_lengths:
        found.append((tokens, "one document", "full", [tokens]))
        found += [(tokens, s.name, "anchor", s.pack(tokens)) for s in sources]
    return found


def main() -> None:
    """Measure all cases and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_lengths.add_common_arguments(parser)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.device == "cuda" and this_hardware().capability is None:
        parser.error("no CUDA device; --device cpu --quick shows that the program runs")
    if options.quick:
        options.heads, options.kv_heads, options.head_dim, options.repeats = 4, 2, 16, 2
    default = QUICK_SEQ_LENGTHS if options.quick else SEQ_LENGTHS
    options.seq_lengths = sorted(options.seq_lengths or default)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    names, rows, started = serving_backends(options), [], time.monotonic()
    for tokens, lengths_name, pattern, lengths in cases(options):
        for name in names:
            row: dict[str, Any] = {"tokens": tokens, "lengths": lengths_name}
            row |= {"pattern": pattern, "kernel": name, "note": ""}
            if time.monotonic() - started > 60 * options.minutes:
                row["note"] = "not run: out of time"
            else:
                row |= gpu_lengths.attempt(measure, name, lengths, options)
            rows.append(row)
            print(f"{tokens} {lengths_name} {pattern} {name} {row['note'] or 'done'}", flush=True)
            add_shares(rows)
            if options.output:
                gpu_lengths.save(options.output.with_suffix(".json"), rows)
    rows = gpu_lengths.in_columns(rows)
    print(gpu_lengths.table(rows))
    if options.output:
        gpu_lengths.write(
            options.output,
            rows,
            **PICTURE,
        )


if __name__ == "__main__":
    main()
