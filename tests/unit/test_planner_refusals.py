"""Refusals of layouts, held against the validation that stops a real launch."""

import copy
import dataclasses
import itertools
import sys

import pytest

from megatron_anchor.attention.backends import Hardware
from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import automatic
from megatron_anchor.planner.refusals import refusals
from megatron_anchor.training import validation
from megatron_anchor.training.arguments import add_anchor_arguments

SIZES = (1, 2, 3, 4, 8, 16)
VALIDATED = ("heads", "alignment", "kernel")
"""Kinds that training/validation knows; Megatron's layers assert the others."""


@pytest.fixture(scope="module")
def namespace():
    from megatron.training.arguments import parse_args

    command = (
        "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --bf16 "
        "--max-position-embeddings 64 --micro-batch-size 1 --position-embedding-type rope "
        "--attention-dropout 0 --eval-interval 10 --train-iters 4 --lr 1e-3"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt", *command.split()])
        return parse_args(add_anchor_arguments)


def arguments(namespace, model, layout, length):
    args = copy.copy(namespace)
    args.hidden_size, args.num_attention_heads, args.kv_channels = (
        model.hidden,
        model.heads,
        model.head,
    )
    args.num_query_groups, args.group_query_attention = model.groups, True
    args.seq_length = args.max_position_embeddings = length
    args.tensor_model_parallel_size, args.sequence_parallel = layout.tp, layout.tp > 1
    args.context_parallel_size, args.cp_comm_type = layout.cp, [layout.cp_comm]
    two_levels = layout.cp_comm == "a2a+gather"
    sizes = [layout.heads_ranks, layout.keys_ranks] if two_levels else None
    args.hierarchical_context_parallel_sizes = sizes
    return args


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "qwen2.5-7b", "qwen1.5-1.8b"])
@pytest.mark.parametrize("kind", ["A100-80GB", "H100", "B200"])
def test_a_layout_is_refused_exactly_where_a_launch_would_be(name, kind, namespace, monkeypatch):
    shape, gpu = known_shape(name), find_gpu(kind)
    hardware = Hardware(
        capability=gpu.capability,
        packages={"transformer-engine": "2.20.2", "flash-attn": "2.8.3"},
    )
    monkeypatch.setattr(validation, "this_hardware", lambda: hardware)
    seen = set()
    kinds = ("a2a", "p2p", "gather", "a2a+gather")
    for tp, cp, comm, length in itertools.product(SIZES, SIZES, kinds, (4096, 4100)):
        layout = Layout(tp=tp, cp=cp, cp_comm=comm)
        if comm == "a2a+gather":
            layout = automatic(layout, shape, gpu)
        ours = [
            reason
            for reason in refusals(shape, layout, gpu=gpu, sequence_length=length, global_batch=1)
            if reason.startswith(VALIDATED)
        ]
        theirs = validation.refusals(arguments(namespace, shape.model, layout, length))
        assert bool(ours) == bool(theirs), f"{layout} at {length}: {ours} against {theirs}"
        seen |= {reason.split(":")[0] for reason in ours} | ({"none"} if not ours else set())
    assert {"none", "heads", "alignment"} <= seen


def why(asked="llama-2-7b", gpu="A100-80GB", length=65536, batch=8, **sizes):
    found = refusals(
        known_shape(asked) if isinstance(asked, str) else asked,
        Layout(**sizes),
        gpu=find_gpu(gpu),
        sequence_length=length,
        global_batch=batch,
    )
    return "\n".join(found)


def test_every_kind_of_refusal_names_the_value_and_the_remedy():
    assert why() == ""
    assert "32 query heads cannot be shared by TP 3; use a divisor" in why(tp=3)
    assert "8 key/value heads and TP 16" not in why("llama-3-8b", tp=16)
    assert "2 query heads per TP rank cannot be shared by 4 ranks" in why(tp=16, cp=4)
    assert why(pp=5) == "", "the last stage has 4 of 32 layers"
    assert "32 layers leave none for the last of PP 33 stages" in why(pp=33)
    assert "26 layers" not in why("deepseek-v2-lite", pp=4)
    assert "EP 2 is for models with experts" in why(ep=2, dp=2)
    assert "128 experts cannot be shared by EP 3" in why("qwen3-30b-a3b", ep=3, dp=3)
    assert "EP 8 does not divide TP x CP x DP = 4" in why("qwen3-30b-a3b", ep=8, dp=4)
    assert "the shared experts' width 2816 cannot be shared by TP 3" in why(
        "deepseek-v2-lite", tp=3
    )
    assert "the padded vocabulary 152064 cannot be shared by TP 7" in why("qwen2.5-7b", tp=7)
    assert "--seq-length 1000 is no multiple of 16 (CP 8 x 2 x TP 1)" in why(length=1000, cp=8)
    assert "the next lower one is 992" in why(length=1000, cp=8)
    assert "a global batch of 8 cannot be shared by 16" in why(dp=16)
    assert "TP 16 would reach beyond a server of 8 GPUs" in why(tp=16)


def test_wide_heads_have_no_ring_where_the_kernel_has_none():
    wide = known_shape("llama-3-8b")
    wide = dataclasses.replace(wide, model=dataclasses.replace(wide.model, head=256))
    assert "head dimensions up to 128" in why(wide, gpu="B200", cp=8, cp_comm="p2p")
    assert why(wide, gpu="H100", cp=8, cp_comm="p2p") == ""


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral-7b-v0.1", "gpt-oss-20b"])
def test_latents_windows_and_sinks_have_no_ring(name):
    assert "p2p is not for" in why(name, cp=8, cp_comm="p2p")
    assert why(name, cp=8) == ""
