"""Time and memory of a training step of a Llama-shaped model on one GPU, `full` against `anchor`.

One step is forward, backward and the optimizer's update over one sample, through this package's
layer spec in Megatron's GPTModel, in bfloat16 with full recomputation. The default shape is that of
Llama 3.2 1B with a vocabulary of 32000. Needs torch and megatron-core; other kernels appear when
they are installed. Ends within 10 minutes.

    python benchmarks/gpu_train.py --output measurements/train
    python benchmarks/gpu_train.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import gpu_lengths
import torch

from megatron_anchor import compat
from megatron_anchor.attention.backends import (
    BACKENDS,
    AttentionRequest,
    choose_backend,
    load_backend,
    this_hardware,
)
from megatron_anchor.attention.packed import pack_micro_batch

SEQ_LENGTHS, QUICK_SEQ_LENGTHS = [16384, 65536, 131072], [256, 512]
PICTURE = {"value": "tokens/s", "label": "tokens per second"}


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 8192
    vocabulary: int = 32000

    @property
    def head_dim(self) -> int:
        """Dimensions of an attention head."""
        return self.hidden // self.heads

    def work(self, lengths: list[int]) -> float:
        """Count the floating-point operations of a step, recomputation left out."""
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        layer = qkv + self.hidden**2 + 3 * self.hidden * self.ffn
        linear = 2 * sum(lengths) * (self.layers * layer + self.hidden * self.vocabulary)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 3 * (linear + 4 * self.layers * self.hidden * pairs)


TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocabulary=256)


def start_megatron(device: str) -> None:
    """Set up one process' groups and random state."""
    if device == "cpu":
        from megatron_anchor import on_cpu

        on_cpu.enable()
    else:
        torch.cuda.set_device(0)
    compat.quiet_expected_warnings()
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        backend="nccl" if device == "cuda" else "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def build_model(shape: Shape, backend: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Build a GPTModel around a kernel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        transformer_impl="local",
    )
    spec = anchor_block_spec(
        config, rotary=RotarySettings(head_dim=shape.head_dim, base=5e6), backend=backend
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=1,
        position_embedding_type="none",
    )
    return model.to(device=device, dtype=dtype)


def measure(
    name: str, lengths: list[int], shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Time steps of a fresh model over one sample of these documents."""
    tokens, model = sum(lengths), build_model(shape, name, options.dtype, options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    cu_seqlens = torch.tensor([[0, *lengths]], device=options.device).cumsum(1).to(torch.int32)
    positions = torch.arange(tokens, device=options.device)[None]
    text = torch.randint(0, shape.vocabulary, (1, tokens + 1), device=options.device)

    def step() -> float:
        started = now(options)
        packed = pack_micro_batch(positions, cu_seqlens, seq_length=tokens)
        losses = model(text[:, :-1], positions, None, labels=text[:, 1:], packed_seq_params=packed)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return now(options) - started

    step()  # compiles, warms up and makes the optimizer's state
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spent = statistics.median(step() for _ in range(options.repeats))
    row = {
        "documents": len(lengths),
        "step s": spent,
        "tokens/s": tokens / spent,
        "TFLOP/s": shape.work(lengths) / spent / 1e12,
    }
    if options.device == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def now(options: argparse.Namespace) -> float:
    """Seconds, when the device is done with what it was given."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def kernels(shape: Shape, options: argparse.Namespace) -> list[str]:
    """Name the kernels to measure: those asked for, else `auto`'s choice and the fallback."""
    request = AttentionRequest(
        head_dim=shape.head_dim,
        dtype=options.dtype,
        query_heads=shape.heads,
        kv_heads=shape.kv_heads,
        hardware=this_hardware(),
    )
    if options.backends:
        return [choose_backend(name, request).name for name in options.backends]
    return [name for name in BACKENDS if load_backend(name).unsupported_reason(request) is None]


def add_ratio(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add what documents save, where the step over one document was measured."""
    same = [r for r in rows if (r["tokens"], r["kernel"]) == (row["tokens"], row["kernel"])]
    full = next(r for r in same if r["pattern"] == "full")
    if "step s" in row and "step s" in full:
        row["full / this"] = full["step s"] / row["step s"]


def main() -> None:
    """Measure all cases and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_lengths.add_common_arguments(parser)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.device == "cuda" and this_hardware().capability is None:
        parser.error("no CUDA device; --device cpu --quick shows that the program runs")
    shape = TINY if options.quick else Shape(layers=options.layers)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    names = kernels(shape, options)
    start_megatron(options.device)
    default = QUICK_SEQ_LENGTHS if options.quick else SEQ_LENGTHS
    sources = [gpu_lengths.slimpajama_like(), gpu_lengths.long_documents()]
    if options.corpus:
        sources.append(gpu_lengths.from_corpus(options.corpus))
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for tokens in sorted(options.seq_lengths or default):
        cases = [("one document", "full", [tokens])]
        cases += [(s.name, "anchor", s.pack(tokens)) for s in sources]
        for name in names:
            for lengths_name, pattern, lengths in cases:
                row: dict[str, Any] = {"tokens": tokens, "lengths": lengths_name}
                row |= {"pattern": pattern, "kernel": name, "note": ""}
                if time.monotonic() - started > 60 * options.minutes:
                    row["note"] = "not run: out of time"
                else:
                    row |= gpu_lengths.attempt(measure, name, lengths, shape, options)
                rows.append(row)
                print(f"{tokens} {lengths_name} {name} {row['note'] or 'done'}", flush=True)
                add_ratio(row, rows)
                if options.output:
                    gpu_lengths.save(options.output.with_suffix(".json"), rows)
    rows = gpu_lengths.in_columns(rows)
    print(gpu_lengths.table(rows))
    if options.output:
        gpu_lengths.write(
            options.output,
            rows,
            title=f"Training step, {shape.layers} layers of {shape.hidden}",
            **PICTURE,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
