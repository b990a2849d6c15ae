"""The options of packing in Megatron's own training loop."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_anchor.attention.core import AnchorCoreAttention
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.attention.rope import RotarySettings
from tests.distributed.pretraining import pretrain, write_corpus

OPTIONS = (
    "--train-iters 3 --packing best-fit --document-alignment 4 --calculate-per-token-loss "
    "--no-anchor-first-token-loss --anchor-token eos --anchor-position 2 "
    "--attention-precision fp32 --interleave-chunks --interleave-min-chunk-length 2 "
)


def test_balancing_changes_no_loss_and_no_gradient(tmp_path: Path) -> None:
    lengths = [40, 3, 7, 12, 60, 5, 90, 2, 33, 18, 9, 27, 4, 55, 11, 6] * 2
    corpus = write_corpus(tmp_path / "c", lengths)
    arguments = f"--data-path {corpus} --data-cache-path {tmp_path / 'cache'} " + OPTIONS
    curves = [
        pretrain(2, arguments + extra, tensorboard=tmp_path / name)
        for name, extra in (("plain", ""), ("balanced", "--balance-attention-work"))
    ]
    for name in ("lm loss", "grad-norm"):
        plain, balanced = (curve[name] for curve in curves)
        assert set(plain) == {1, 2, 3}
        assert balanced == pytest.approx(plain, rel=2e-6)
    assert 0 < curves[0]["padding share"][1] < 1
    assert 0 < curves[0]["cut documents per sample"][1] < curves[0]["documents per sample"][1]
    before, after = curves[1]["work imbalance in order"], curves[1]["work imbalance"]
    assert all(1 <= after[step] <= before[step] for step in (1, 2, 3))
    assert after != before
    assert "work imbalance" not in curves[0]
    assert curves[0]["attention work"] == pytest.approx(curves[1]["attention work"])


def attention(precision: str) -> Any:
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    config.attention_dropout = 0.0
    return AnchorCoreAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        rotary=RotarySettings(head_dim=16, base=1e4),
        backend="sdpa",
        precision=precision,
    )


def test_float32_attention_is_nearer_to_the_truth_and_keeps_the_models_dtype() -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(48, 1, 4, 16).bfloat16() for _ in range(3)]
    packed = pack_micro_batch(
        torch.arange(48)[None], torch.tensor([[0, 20, 48]], dtype=torch.int32), seq_length=48
    )
    exact = attention("model")(*[x.float() for x in qkv], None, packed_seq_params=packed)
    outputs = {
        precision: attention(precision)(*qkv, None, packed_seq_params=packed)
        for precision in ("model", "fp32")
    }
    assert {out.dtype for out in outputs.values()} == {torch.bfloat16}
    error = {name: (out.float() - exact).abs().max().item() for name, out in outputs.items()}
    assert torch.equal(outputs["fp32"], exact.bfloat16())
    assert error["fp32"] < error["model"]
