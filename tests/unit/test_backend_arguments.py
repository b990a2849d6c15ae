"""From command-line flags to a kernel: what is asked of it, and refusals on devices not at hand."""

import re
import sys

import pytest
import torch

from megatron_anchor.attention.backends import Hardware
from megatron_anchor.training import validation
from megatron_anchor.training.arguments import (
    add_anchor_arguments,
    document_alignment,
)
from megatron_anchor.training.context_parallel import context_parallel
from megatron_anchor.training.validation import attention_request, refusals, require_supported
from tests.attention_layers import attention_layer

GOOD = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --bf16 "
    "--group-query-attention --num-query-groups 4 --max-position-embeddings 64 "
    "--micro-batch-size 1 --position-embedding-type rope --attention-dropout 0 --eval-interval 10 "
    "--train-iters 4 --lr 1e-3"
)
ON_H100 = Hardware(capability=(9, 0), packages={"transformer-engine": "2.20.2"})


@pytest.fixture
def parse(monkeypatch):
    def parse(extra="", hardware=ON_H100):
        from megatron.training.arguments import parse_args

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *f"{GOOD} {extra}".split()])
        monkeypatch.setattr(validation, "this_hardware", lambda: hardware)
        return parse_args(add_anchor_arguments)

    return parse


SERVED = {
    "": ("ulysses", "contiguous", 1),
    "--context-parallel-size 4": ("ulysses", "contiguous", 1),
    "--context-parallel-size 4 --cp-comm-type p2p": ("te", "zigzag", 8),
    "--context-parallel-size 4 --cp-comm-type p2p a2a": ("te", "zigzag", 8),
    "--context-parallel-size 4 --anchor-context-parallel te": ("te", "zigzag", 8),
    "--context-parallel-size 4 --cp-comm-type all_gather --document-alignment 16": (
        "te",
        "zigzag",
        16,
    ),
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": (
        "te",
        "zigzag",
        8,
    ),
    # Key/value heads are repeated where Ulysses is asked for, and otherwise gathered.
    "--context-parallel-size 8 --cp-comm-type a2a": ("ulysses", "contiguous", 1),
    "--context-parallel-size 8": ("ulysses+gather", "chunks", 1),
    "--context-parallel-size 16 --seq-length 96": ("ulysses+gather", "chunks", 1),
    "--context-parallel-size 4 --cp-comm-type gather": ("gather", "chunks", 1),
    "--context-parallel-size 16 --cp-comm-type p2p": ("te", "zigzag", 32),  # ranks > heads
}


@pytest.mark.parametrize("extra", SERVED)
def test_kind_of_context_parallelism_decides_how_documents_are_split(extra, parse):
    args = parse(extra)
    assert refusals(args) == []
    found = context_parallel(args)
    assert (found.kind, found.split.kind, document_alignment(args)) == SERVED[extra]


REFUSED = {
    "--context-parallel-size 4 --cp-comm-type p2p --document-alignment 4": (
        r"--document-alignment 4: .* 8 equal chunks .* multiple of 8"
    ),
    "--context-parallel-size 8 --anchor-context-parallel te": (
        "8 query and 4 key/value heads of a tensor-parallel rank over 8 ranks, .* crashes"
    ),
    "--context-parallel-size 4 --cp-comm-type p2p --anchor-context-parallel ulysses": (
        "--anchor-context-parallel ulysses was asked for"
    ),
    "--context-parallel-size 4 --cp-comm-type p2p --anchor-attention-backend varlen": (
        "--cp-comm-type p2p needs Transformer Engine's own"
    ),
    "--context-parallel-size 4 --cp-comm-type a2a+p2p": "--hierarchical-context-parallel-sizes",
    "--context-parallel-size 4 --cp-comm-type p2p --attention-dropout 0.1": (
        "--attention-dropout 0.1 under Transformer Engine"
    ),
    "--context-parallel-size 4 --cp-comm-type p2p --deterministic-mode": "backward pass on sm90",
    "--context-parallel-size 4 --cp-comm-type p2p a2a p2p": (
        "--cp-comm-type p2p a2a p2p: 3 kinds for 2 layers; give one for all of them, or one per"
    ),
    "--cp-comm-type a2a a2a a2a": "3 kinds for 2 layers",
    "--context-parallel-size 4 --cp-comm-type foo": (
        r"unknown --cp-comm-type 'foo': expected one of auto, a2a, gather, .* all_gather$"
    ),
    "--context-parallel-size 4 --cp-comm-type allgather": "write it all_gather",
    "--anchor-attention-backend te --attention-backend unfused": "builds S x S scores",
    "--anchor-attention-backend te --attention-precision fp32": "for bfloat16 and float16",
    "--anchor-attention-backend flash": "FlashAttention 3 is not installed",
}


@pytest.mark.parametrize("extra", REFUSED)
def test_what_transformer_engine_cannot_do_is_refused_before_training(extra, parse):
    with pytest.raises(ValueError, match=REFUSED[extra]):
        require_supported(parse(extra))


def test_a100_without_flash_attn_is_sent_to_another_kernel(parse):
    a100 = Hardware(capability=(8, 0), packages={"transformer-engine": "2.20.2"})
    with pytest.raises(ValueError, match=r"on sm80 .*pip install flash-attn\).*varlen or flash"):
        require_supported(parse("--anchor-attention-backend te", hardware=a100))
    assert refusals(parse(hardware=a100)) == [], "auto takes varlen"


def test_request_says_what_one_tensor_parallel_rank_asks(parse):
    asked = attention_request(
        parse("--tensor-model-parallel-size 2 --context-parallel-size 2 --attention-backend fused")
    )
    assert (asked.query_heads, asked.kv_heads, asked.head_dim) == (4, 2, 64)
    assert (asked.dtype, asked.preferred) == (torch.bfloat16, "fused")
    assert asked.context_parallel_kinds == ("a2a",)
    assert not asked.te_context_parallel


def test_help_lists_every_backend_and_kind(capsys, parse):
    with pytest.raises(SystemExit):
        parse("--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name in ("'te'", "'flash'", "'varlen'", "'flex'", "'sdpa'"):
        assert name in text
    assert "--anchor-context-parallel {auto,ulysses,te}" in text


@pytest.mark.parametrize("name", ["fp8_dot_product_attention", "fp8_multi_head_attention"])
def test_fp8_attention_is_refused_where_the_layer_is_built(name):
    with pytest.raises(ValueError, match=f"TransformerConfig.{name}: no kernel does FP8"):
        attention_layer(heads=2, head_dim=16, backend="sdpa", config_values={name: True})
