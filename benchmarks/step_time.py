"""Step time of `anchor` against `full` attention on a real corpus, one thread on the CPU.

Both patterns take the same samples in turns: one forward and backward of a Llama-shaped GPTModel
with this package's layer spec. Next to the measured ratio stands the ratio of counted work
(multiplications of the linear layers, the output layer and the attention products), which is what
kernels of equal efficiency would give. Times are CPU time, which other programs blur least.

    make demo && .venv/bin/python benchmarks/step_time.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from side_by_side import Comparison, Findings, at_least_one, duration

from megatron_anchor import compat, on_cpu

PATTERNS = ("anchor", "full")
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 4, 256, 8, 4, 704, 4096
HEAD_DIM = HIDDEN // HEADS


def counted_work(seq_length: int, lengths: tuple[int, ...]) -> float:
    """Count the multiply-adds of a forward pass over one sample, in millions."""
    qkv = HIDDEN * HEAD_DIM * (HEADS + 2 * KV_HEADS)
    per_token = LAYERS * (qkv + HIDDEN * HIDDEN + 3 * HIDDEN * FFN) + HIDDEN * VOCAB
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return (per_token * seq_length + LAYERS * 2 * HIDDEN * pairs) / 1e6


def build_model() -> torch.nn.Module:
    """Build a float32 GPTModel on one process."""
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        transformer_impl="local",
    )
    rotary = RotarySettings(head_dim=HEAD_DIM, base=1e5)
    return GPTModel(
        config,
        anchor_block_spec(config, rotary=rotary, backend="sdpa"),
        vocab_size=VOCAB,
        max_sequence_length=1,
        position_embedding_type="none",
    )


def samples(prefix: Path, pattern: str, seq_length: int, count: int) -> list[dict[str, Any]]:
    """Read the first samples of a corpus."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    from megatron_anchor.packing.dataset import PackedDataset, PackedDatasetConfig

    config = PackedDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=SimpleNamespace(vocab_size=VOCAB),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        attention_pattern=pattern,
        anchor_token_id=0,
    )
    builder = BlendedMegatronDatasetBuilder(PackedDataset, [count, 0, 0], lambda: True, config)
    dataset = builder.build()[0]
    return [dataset[number] for number in range(count)]


def step_seconds(model: torch.nn.Module, sample: dict[str, Any]) -> tuple[float, tuple[int, ...]]:
    """Time one forward and backward; give the document lengths too."""
    from megatron_anchor.attention.packed import pack_micro_batch

    tokens, labels, positions, cu_seqlens = (
        sample[field][None] for field in ("tokens", "labels", "position_ids", "cu_seqlens")
    )
    packed = pack_micro_batch(positions, cu_seqlens, seq_length=tokens.shape[1])
    model.zero_grad()
    started = time.process_time()
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
    (losses * sample["loss_mask"]).mean().backward()
    return time.process_time() - started, packed.document_lengths


def main() -> None:
    """Measure one row a sequence length, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = Path("demo_output/corpus/docstrings_text_document")
    parser.add_argument("--corpus", type=Path, default=corpus, help="prefix of a .bin/.idx corpus")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--samples", type=at_least_one, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu.enable()
    compat.quiet_expected_warnings()
    model, rows = build_model(), list[Comparison]()
    for seq_length in options.seq_lengths:
        data = {p: samples(options.corpus, p, seq_length, options.samples) for p in PATTERNS}
        step_seconds(model, data["anchor"][0])  # warm up
        seconds: dict[str, list[float]] = {p: [] for p in PATTERNS}
        work, documents = dict.fromkeys(PATTERNS, 0.0), 0
        for number in range(options.samples):
            for pattern in PATTERNS:
                spent, lengths = step_seconds(model, data[pattern][number])
                seconds[pattern].append(spent)
                work[pattern] += counted_work(seq_length, lengths)
            documents += int(data["anchor"][number]["num_documents"])
        rows.append(compared(seq_length, seconds, work["full"] / work["anchor"], documents))
        print(f"{seq_length} tokens: {rows[-1].ratio:.2f} x", flush=True)
    findings = Findings(comparisons=rows)
    print(findings.table())
    if options.json:
        findings.write(options.json)


def compared(
    seq_length: int, seconds: dict[str, list[float]], counted: float, documents: int
) -> Comparison:
    """Make a row of the table from the steps of one length."""
    ratios = [f / a for f, a in zip(seconds["full"], seconds["anchor"], strict=True)]
    medians = {pattern: statistics.median(times) for pattern, times in seconds.items()}
    return Comparison(
        what=f"training step, S = {seq_length}, {documents / len(ratios):.0f} documents",
        peer="the same model with full attention",
        ours=duration(medians["anchor"]),
        theirs=duration(medians["full"]),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        repeats=len(ratios),
        note=f"counted work allows {counted:.2f} x",
    )


if __name__ == "__main__":
    main()
