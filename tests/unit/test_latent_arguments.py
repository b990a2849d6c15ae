"""Flags of multi-latent attention and multi-token prediction: what they mean, what is refused."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
import torch

from megatron_anchor.attention.rope import (
    RotarySettings,
    cos_and_sin,
    inverse_frequencies,
    logit_scale,
)
from megatron_anchor.training.arguments import add_anchor_arguments, rope_scaling
from megatron_anchor.training.providers import rotary_settings
from megatron_anchor.training.validation import (
    attention_request,
    gather_memory,
    refusals,
    require_supported,
)
from tests.unit.test_training_arguments import GOOD

LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12 --qk-layernorm --normalization RMSNorm "
)
YARN = "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 0.8 "
BY_JSON = (
    '--rope-parameters \'{"rope_type":"yarn","factor":40,"mscale":1.0,"mscale_all_dim":0.8,'
    '"original_max_position_embeddings":4096}\' '
)


@pytest.fixture
def parse(monkeypatch):
    def parse(flags=""):
        from megatron.training.arguments import parse_args

        words = re.findall(r"'[^']*'|\S+", f"{GOOD} {flags}")
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *(w.strip("'") for w in words)])
        return parse_args(add_anchor_arguments)

    return parse


def test_widths_are_those_of_the_latent_flags(parse):
    args = parse(f"{LATENT} --kv-channels 128 --tensor-model-parallel-size 2 --sequence-parallel")
    request = attention_request(args)
    assert (request.head_dim, request.value_dim) == (24, 12)
    assert (request.query_heads, request.kv_heads) == (4, 4)
    assert gather_memory(args).width == 36
    rotary = rotary_settings(args)
    assert (rotary.head_dim, rotary.interleaved, rotary.scaling) == (8, True, {})
    assert refusals(args) == []


@pytest.mark.parametrize("flags", ["", "--rope-type rope", "--rotary-scaling-factor 1"])
def test_without_a_factor_it_is_plain_rope_whatever_the_type(parse, flags):
    """Megatron's type is yarn by default, and its config's factor 40; the flag's is 1."""
    settings = rotary_settings(parse(LATENT + flags))
    assert settings.scaling == {}
    assert logit_scale(settings, head_dim=24) == pytest.approx(1 / math.sqrt(24))


@pytest.mark.parametrize("mscale", [(1.0, 0.0), (1.0, 1.0), (0.707, 0.707), (0.5, 0.0), (1.0, 0.8)])
def test_yarn_by_flags_rotates_and_scales_as_megatrons_layer(parse, mscale, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding, _yarn_get_mscale

    flags = f"--rotary-scaling-factor 40 --mscale {mscale[0]} --mscale-all-dim {mscale[1]}"
    settings = rotary_settings(parse(f"{LATENT} {flags} --qk-pos-emb-head-dim 64"))
    theirs = YarnRotaryEmbedding(
        64,
        rotary_base=10000,
        scaling_factor=40.0,
        original_max_position_embeddings=4096,
        mscale=mscale[0],
        mscale_all_dim=mscale[1],
        use_cpu_initialization=True,
    )
    angles, concentration = theirs.forward(512)
    inv_freq, factor = inverse_frequencies(settings)
    cos, sin = cos_and_sin(torch.arange(512), inv_freq, attention_factor=factor)
    expected = angles[:, 0, 0, :32]
    assert factor == pytest.approx(concentration)
    assert torch.allclose(cos, expected.cos() * concentration, atol=1e-4)
    assert torch.allclose(sin, expected.sin() * concentration, atol=1e-4)
    scale = _yarn_get_mscale(40.0, mscale[1]) ** 2 / math.sqrt(24)
    assert logit_scale(settings, head_dim=24) == pytest.approx(scale)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "linear", "factor": 8.0},
    ],
)
def test_the_scale_of_the_logits_is_transformers(rope):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    if not hasattr(theirs, "yarn_apply_mscale"):
        pytest.skip("this transformers has it inside its attention layer")
    settings = RotarySettings(head_dim=64, interleaved=True, scaling=rope)
    ours = logit_scale(settings, head_dim=192)
    assert ours == pytest.approx(theirs.yarn_apply_mscale(rope, 192**-0.5))
    assert (ours > 0.08) == (rope.get("factor", 1) > 1 and "mscale_all_dim" in rope)


def test_yarn_by_flags_and_in_hugging_faces_form_are_one(parse):
    by_flags, by_json = (rotary_settings(parse(LATENT + flags)) for flags in (YARN, BY_JSON))
    (ours, factor), (theirs, other) = map(inverse_frequencies, (by_flags, by_json))
    assert torch.equal(ours, theirs)
    assert factor == pytest.approx(other)
    assert logit_scale(by_flags, head_dim=24) == logit_scale(by_json, head_dim=24)
    assert logit_scale(by_flags, head_dim=24) > 1.5 / math.sqrt(24)


def test_yarn_of_flags_is_no_scaling_of_other_models(parse):
    assert rope_scaling(parse("--rotary-scaling-factor 40")) == {}
    assert json.dumps(rope_scaling(parse(LATENT + YARN)))


REFUSED = {
    "--rope-type yarn": "--rope-type yarn: pass --rope-parameters",
    f"{LATENT} --rope-type rope --rotary-scaling-factor 40": "--rotary-scaling-factor 40 is yarn's",
    f"{LATENT} --rotary-scaling-factor 0.5": "--rotary-scaling-factor 0.5: expected 1 or more",
    f"{LATENT} {YARN} {BY_JSON}": "--rope-parameters and --rotary-scaling-factor ask for two",
    f"{LATENT} --mscale-all-dim 1 {BY_JSON}": "--mscale 1 --mscale-all-dim 1: --rope-parameters is",
    f"{LATENT} --use-rope-scaling": "--use-rope-scaling: Megatron's --multi-latent-attention does",
    f"{LATENT} --rotary-seq-len-interpolation-factor 2": "--rotary-seq-len-interpolation-factor: M",
    f"{LATENT} --rotary-percent 0.5": "--rotary-percent 0.5: --multi-latent-attention rotates",
    f"{LATENT} --rotary-interleaved": "--rotary-interleaved: --multi-latent-attention rotates",
    f"{LATENT} --no-rope-freq 2": "--no-rope-freq: --multi-latent-attention has no layers without",
    f"{LATENT} --qk-pos-emb-head-dim 7": "--qk-pos-emb-head-dim 7: RoPE rotates pairs",
    f"{LATENT} --group-query-attention --num-query-groups 2": "--group-query-attention: --multi-la",
    f"{LATENT} --qk-l2-norm": "--qk-l2-norm: --multi-latent-attention normalises latents",
    f"{LATENT} --attention-output-gate": "--attention-output-gate: Megatron has none",
    f"{LATENT} --mla-down-proj-fusion": "--mla-down-proj-fusion: only --transformer-impl transform",
    f"{LATENT} --mla-down-proj-fusion --transformer-impl transformer_engine": "it needs --q-lora-r",
    f"{LATENT} --cache-mla-latents": "--cache-mla-latents: it is for inference",
    f"{LATENT} --tensor-model-parallel-size 2": "--tensor-model-parallel-size 2 needs --sequence-p",
    f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel --kv-lora-rank 25": "--kv-lora-r"
    "ank 25 .* = 33 cannot be shared by --tensor-model-parallel-size 2",
    f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel --q-lora-rank 9": "--q-lora-rank"
    " 9 cannot be shared",
    f"{LATENT} --context-parallel-size 2 --cp-comm-type p2p": "never run with --multi-latent-atten",
    f"{LATENT} --context-parallel-size 2 --cp-comm-type all_gather": "all_gather: Transformer Engi",
    f"{LATENT} --qk-clip": "--qk-clip: Megatron finds the layers of --bf16 and --fp16 models only",
    "--mtp-num-layers 1 --attention-pattern full": "--attention-pattern full: documents see each",
    "--mtp-num-layers 1 --attention-pattern anchor-masked": "anchor-masked: copies of the anch",
    "--mtp-num-layers -1": "--mtp-num-layers -1: expected 1 or more",
    "--mtp-num-layers 1 --mtp-detach-heads": "--mtp-detach-heads: its gradients",
    "--mtp-num-layers 2 --recompute-granularity full --recompute-method block": "method block: Meg",
    "--mtp-num-layers 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2": "--recompute-num-layers 2: Megatron recomputes these layers one by",
    "--mtp-num-layers 1 --no-rope-freq 2": "--no-rope-freq: Megatron does not say which",
    "--mtp-num-layers 1 --window-size 8,0 --window-attn-skip-freq 2": "--window-attn-skip-freq: Me",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etm|tL": (
        r"--pipeline-model-parallel-layout: its layers \(m\) must be on the last stage"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_run_is_refused_with_value_and_remedy(parse, flags):
    with pytest.raises(ValueError, match="cannot run with these arguments") as raised:
        require_supported(parse(flags))
    assert re.search(REFUSED[flags], str(raised.value)), raised.value


@pytest.mark.parametrize(
    "flags",
    [
        f"{LATENT} {YARN}",
        f"{LATENT} {BY_JSON} --q-lora-rank 32",
        f"{LATENT} --rope-type rope --kv-channels 3 --attention-precision fp32",
        f"{LATENT} --context-parallel-size 2 --cp-comm-type gather --mtp-num-layers 2",
        "--mtp-num-layers 2 --mtp-use-repeated-layer --attention-pattern intra-document",
        "--mtp-num-layers 1 --window-size 8,0",
        "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "--mtp-num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
        "Ett|mmL",
    ],
)
def test_these_are_not_refused(parse, flags):
    assert refusals(parse(f"{flags} --attention-dropout 0")) == []


@pytest.mark.parametrize("fused", [False, True])
def test_transformer_engines_projections_are_cut_where_they_are_fused_only(parse, fused):
    args = parse(
        f"{LATENT} --q-lora-rank 9 --kv-lora-rank 25 --tensor-model-parallel-size 2 "
        "--sequence-parallel --transformer-impl transformer_engine"
        + " --mla-down-proj-fusion"
        * fused
    )
    found = [reason for reason in refusals(args) if "cannot be shared" in reason]
    assert len(found) == (2 if fused else 0)
