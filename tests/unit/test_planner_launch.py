"""The printed command, read by the parser and the validation of the program that it starts."""

import dataclasses
import re
import shlex
import string
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_anchor.attention.backends import Hardware
from megatron_anchor.checkpoint.megatron_args import argument_values, flag_lines
from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.launch import launch_command, model_flags, notes, trained_shape
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import Lengths, slimpajama_like
from megatron_anchor.planner.models import MODELS, known_shape
from megatron_anchor.planner.plan import Question, make_plan
from megatron_anchor.planner.work import model_work
from megatron_anchor.training import validation
from megatron_anchor.training.arguments import add_anchor_arguments, model_windows
from megatron_anchor.training.slot_work import slot_work

TRAINED = {"--tokenizer-type", "--tokenizer-model"}
"""Flags of the converter that depend on more than the model."""


def question(name="llama-2-7b", gpu="A100-80GB", gpus=8, length=65536, batch=8):
    return Question(
        name, known_shape(name), slimpajama_like(2000), find_gpu(gpu), gpus, length, batch
    )


def words_of(command):
    """What the shell makes of it: the words behind the program's name."""
    *settings, launch = command.replace("\\\n", " ").splitlines()
    settings = [shlex.split(line)[0] for line in settings if not line.startswith("export")]
    places = dict(line.split("=", 1) for line in settings)
    words = [string.Template(word).safe_substitute(places) for word in shlex.split(launch)]
    program = words.index("megatron_anchor.pretrain_gpt")
    return words[:program], words[program + 1 :]


@pytest.fixture
def parse(monkeypatch):
    def parse(words, gpu, gpus):
        from megatron.training.arguments import parse_args

        hardware = Hardware(
            capability=gpu.capability,
            packages={"transformer-engine": "2.20.2", "flash-attn": "2.8.3"},
        )
        monkeypatch.setattr(validation, "this_hardware", lambda: hardware)
        major, minor = gpu.capability
        device = SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
        monkeypatch.setenv("WORLD_SIZE", str(gpus))
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the command exports it
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *words])
        return parse_args(add_anchor_arguments)

    return parse


QUESTIONS = [
    question(),
    question("llama-3-70b", "H100", 128, 131072, 16),
    question("llama-3.1-8b", "B200", 16, 65536, 16),
    question("qwen3-30b-a3b", "H100", 64, 65536, 32),
    question("gpt-oss-20b", "H100", 64, 65536, 32),
    question("smollm3-3b", "H100", 16, 131072, 16),
    question("mistral-7b-v0.1", "A100-80GB", 8, 32768, 8),
    question("deepseek-v2-lite", "H100", 32, 32768, 32),
    question("deepseek-v3", "H200", 512, 65536, 64),
    question("glm-4.5-air", "H200", 64, 65536, 64),
]


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda q: q.name)
def test_the_program_accepts_every_command_that_a_plan_prints(asked, parse):
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    plan = make_plan(asked)
    kinds = {}
    for choice in plan.choices:
        layout = choice.layout
        uneven = bool(asked.shape.layers % layout.pp)
        kinds.setdefault((layout.recompute, layout.cp_comm, layout.ep > 1, uneven), layout)
    for layout in kinds.values():
        command = launch_command(asked, layout)
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in command
        launcher, words = words_of(command)
        args = parse(words, asked.gpu, asked.gpus)
        assert validation.refusals(args) == []
        assert (
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.context_parallel_size,
            args.expert_model_parallel_size,
        ) == (layout.tp, layout.pp, layout.cp, layout.ep)
        assert args.seq_length == asked.sequence_length <= args.max_position_embeddings
        assert args.train_iters * args.global_batch_size * args.seq_length >= 1e9
        assert args.use_distributed_optimizer
        validate_args(args)  # Megatron's own
        config = core_transformer_config_from_args(args)
        assert_same_model(config, args, asked.shape)
        assert slot_work(args) == pytest.approx(planned_slot_work(asked.shape))
        assert args.data_parallel_size == layout.dp
        processes = int(launcher[launcher.index("--nproc-per-node") + 1])
        nodes = int(launcher[launcher.index("--nnodes") + 1]) if "--nnodes" in launcher else 1
        assert processes * nodes == asked.gpus


def planned_slot_work(shape):
    """Balancing's unit is l^2, two of the planner's pairs."""
    linear = model_work(shape, sequence_length=1, pairs=0)
    pair = model_work(shape, sequence_length=0, pairs=1)
    return 2 * linear.total / pair.total


def assert_same_model(config, args, shape):
    """What Megatron would build is what the plan counted."""
    model, experts, latent = shape.model, shape.experts, shape.latent
    assert (config.num_layers, config.hidden_size) == (model.layers, model.hidden)
    assert args.padded_vocab_size == model.padded_rows
    assert bool(config.multi_latent_attention) == (latent is not None)
    if latent is None:
        assert (config.kv_channels, config.num_query_groups) == (model.head, model.groups)
    else:
        assert (config.kv_lora_rank, config.q_lora_rank) == (
            latent.kv_lora_rank,
            latent.q_lora_rank,
        )
        assert config.qk_head_dim + config.qk_pos_emb_head_dim == shape.query_dim
        assert config.v_head_dim == shape.value_dim
    assert (config.mtp_num_layers or 0) == shape.predicted
    assert (config.softmax_type == "learnable") == shape.sinks
    assert model_windows(args) == shape.windows
    assert bool(config.num_moe_experts) == (experts is not None)
    if shape.dense_layers:
        assert config.ffn_hidden_size == shape.ffn
    if experts is not None:
        assert config.num_moe_experts == experts.number
        assert (config.moe_router_topk, config.moe_ffn_hidden_size) == (
            experts.per_token,
            experts.ffn,
        )
        assert (config.moe_shared_expert_intermediate_size or 0) == experts.shared_ffn
        frequency = config.moe_layer_freq
        listed = frequency if isinstance(frequency, list) else [1] * model.layers
        assert listed == [int(n >= experts.dense_layers) for n in range(model.layers)]
        assert config.expert_tensor_parallel_size == 1


CONVERTED = [name for name in MODELS if not known_shape(name).arguments.keys() - {"mtp_num_layers"}]
"""Models that `checkpoint.Model` alone describes."""


@pytest.mark.parametrize("name", CONVERTED)
def test_the_models_flags_are_the_converters(name):
    model = known_shape(name).model
    values = argument_values(model, dtype=torch.bfloat16, tokenizer=None, anchor=None)
    theirs = {line.split(" ")[0]: line.split(" ")[1:] for line in flag_lines(values)}
    theirs = {flag: value for flag, value in theirs.items() if flag not in TRAINED}
    words, ours = shlex.split(" ".join(model_flags(known_shape(name)))), {}
    for word in words:
        if word.startswith("--"):
            flag = word
            ours[flag] = []
        else:
            ours[flag].append(word)
    assert ours == theirs


def test_a_longer_context_gets_the_papers_base_and_says_where_there_is_none():
    llama = known_shape("llama-2-7b")
    assert trained_shape(llama, 65536).model.rotary_base == 5e6
    assert trained_shape(llama, 131072).model.rotary_base == 1e7
    assert trained_shape(llama, 4096) == llama
    assert trained_shape(llama, 40960).model.rotary_base == 1e4
    (note,) = notes(question(length=40960), Layout(dp=8))
    assert re.search(r"--rotary-base stays 10000: .* choose one for 40960 tokens", note)
    assert notes(question(), Layout(cp=8)) == []


def test_the_ring_on_an_a100_is_told_to_need_flash_attn():
    (note,) = notes(question(), Layout(cp=8, cp_comm="p2p"))
    assert "needs flash-attn" in note
    assert notes(question(gpu="H100"), Layout(cp=8, cp_comm="p2p")) == []


def test_the_corpus_and_the_folder_that_were_asked_about_stand_in_the_command(tmp_path):
    asked = dataclasses.replace(
        question(),
        name=str(tmp_path),
        lengths=Lengths("mine", np.array([500]), prefix="corpus/it's mine"),
    )
    _, words = words_of(launch_command(asked, Layout(cp=8)))
    assert words[words.index("--data-path") + 1] == "corpus/it's mine"
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path)
