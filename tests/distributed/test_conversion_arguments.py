"""Arguments that change a model without changing a tensor: the export refuses, verify fails.

The checkpoints are conversions of Hugging Face models whose recorded arguments are then changed, so
that weights stay equal bit by bit.
"""

from __future__ import annotations

import shutil
from argparse import Namespace

import pytest
import torch

from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from megatron_anchor.checkpoint.verify import (
    compare_logits,
    compare_tensors,
    open_checkpoint,
    setting_differences,
)
from megatron_anchor.errors import UserError
from tests.conversion_models import hugging_face_model
from tests.distributed.ranks import run_ranks

TOKENS = torch.randint(131, (48,), generator=torch.Generator().manual_seed(4))
OURS = ("rope_parameters", "anchor_token")
CHANGED = {
    "layers without rotation": ("llama", {"no_rope_freq": 2}),
    "scaled experts": ("mixtral", {"moe_router_topk_scaling_factor": 2.5}),
    "a field without a flag": ("llama", {"softmax_scale": 0.5}),
    "a window of stock Megatron": ("llama, stock", {"window_size": (7, 0)}),
    "no rotation in stock Megatron": ("llama, stock", {"no_rope_freq": [0, 0, 1, 0]}),
    "scaled experts of stock Megatron": ("mixtral, stock", {"moe_router_topk_scaling_factor": 2.5}),
    "another llama3 factor of stock Megatron": (
        "llama, stock",
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
}
OTHER = {
    "a window shorter by one": (
        *("mistral, window", {"window_size": (5, 0)}),
        "sliding_window 6 (Hugging Face sliding_window 7)",
    ),
    "a window longer by one": (
        *("mistral, window", {"window_size": (7, 0)}),
        "sliding_window 8 (Hugging Face sliding_window 7)",
    ),
    "a window in the wrong layers": (
        *("qwen3, window in every second layer", {"window_attn_skip_freq": [0, 1, 0, 1]}),
        "sliding_window 5 in layers [2, 4] (Hugging Face sliding_window 5 in layers [1, 3])",
    ),
    "rotation in a layer without": (
        *("smollm3", {"no_rope_freq": None}),
        "no_rope () (Hugging Face (False, False, False, True))",
    ),
    "no sink": ("gpt-oss", {"softmax_type": "vanilla"}, "sinks False (Hugging Face True)"),
    "another clamp": (
        *("gpt-oss", {"activation_func_clamp_value": 0.6}),
        "swiglu_limit 0.6 (Hugging Face 0.5)",
    ),
    "no clamp's offset": ("gpt-oss", {"glu_linear_offset": 0.0}, "glu_linear_offset 0.0"),
}
"""What a family says, changed: the case's model, its arguments and what verification says."""
SAME = {
    "with a window": ("mistral, window", {}),
    "with windows in some layers": ("qwen3, window in every second layer", {}),
    "without rotation in some layers": ("smollm3, uneven layers with a window, biases", {}),
    "with sinks": ("gpt-oss", {}),
    "ours": ("llama", {}),
    "with experts": ("mixtral", {}),
    "with yarn": ("llama yarn, attention bias", {}),
    "stock": ("llama, stock", {}),
    "stock with experts": ("mixtral, stock", {}),
    "trained with dropout, FP8 and eight ranks": (
        "llama, stock",
        {
            "hidden_dropout": 0.1,
            "fp8": "hybrid",
            "tensor_model_parallel_size": 8,
            "sequence_parallel": True,
            "transformer_impl": "transformer_engine",
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "cuda_graph_impl": "local",
            "moe_grouped_gemm": True,
        },
    ),
}


def change_arguments(folder, *, stock, **changes):
    """Record other arguments in a checkpoint, and none of ours in stock Megatron's."""
    with Files() as files:
        state = TorchDistCheckpoint(folder, files).common_state()
    given = {k: v for k, v in vars(state["args"]).items() if not stock or k not in OURS}
    state["args"] = Namespace(**given | changes)
    torch.save(state, folder / "common.pt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a case to the Hugging Face folder and the changed checkpoint."""
    root, found = tmp_path_factory.mktemp("arguments"), {}
    for number, (case, (name, changes, *_)) in enumerate((CHANGED | OTHER | SAME).items()):
        model, stock = name.removesuffix(", stock"), name.endswith(", stock")
        source = root / model.replace(" ", "_")
        if not source.exists():
            hugging_face_model(model).save_pretrained(source / "hf")
            convert_to_megatron(source / "hf", source / "megatron", progress=False)
        shutil.copytree(source / "megatron", root / str(number))
        change_arguments(root / str(number) / "release", stock=stock, **changes)
        found[case] = source / "hf", root / str(number)
    return found


def verdicts(folders):
    """Compare every checkpoint with its Hugging Face model."""
    found = {}
    with Files() as files:
        for case, (source, megatron) in folders.items():
            checkpoint = open_checkpoint(megatron, files)
            found[case] = (
                compare_tensors(checkpoint, source, files).passed,
                setting_differences(checkpoint, source),
                compare_logits(checkpoint, source, TOKENS, dtype=torch.float32),
            )
    return found


@pytest.fixture(scope="module")
def verified(folders):
    return run_ranks(verdicts, 1, folders)[0]


@pytest.mark.parametrize("case", CHANGED)
def test_verify_sees_it_in_the_settings_and_in_the_logits(case, verified):
    same_bits, settings, logits = verified[case]
    assert same_bits
    name, value = list(CHANGED[case][1].items())[-1]
    assert any(f"{name} {value}" in said for said in settings)
    print(f"{case}: logits differ by {logits.largest_difference:.2g}, {logits.kl:.2g} nats")
    assert not logits.passed  # by itself, whatever the tables say
    assert logits.largest_difference > 100 * logits.tolerance


@pytest.mark.parametrize("case", OTHER)
def test_verify_sees_another_value_of_what_a_family_says(case, verified):
    same_bits, settings, logits = verified[case]
    assert same_bits
    assert any(OTHER[case][2] in said for said in settings), settings
    print(f"{case}: logits differ by {logits.largest_difference:.2g}, {logits.kl:.2g} nats")
    assert logits.largest_difference > 100 * logits.tolerance


@pytest.mark.parametrize("case", SAME)
def test_verify_passes_what_is_the_same_model(case, verified):
    same_bits, settings, logits = verified[case]
    assert same_bits
    assert settings == []
    assert logits.passed, logits
    print(f"{case}: logits differ by {logits.largest_difference:.2g}, {logits.kl:.2g} nats")


@pytest.mark.parametrize("case", CHANGED)
def test_the_export_refuses_it_by_name(case, folders, tmp_path):
    _, megatron = folders[case]
    name, value = list(CHANGED[case][1].items())[-1]
    with pytest.raises(UserError) as caught:
        convert_to_hugging_face(megatron, tmp_path / "out", progress=False)
    assert f"{name} {value}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    done = convert_to_hugging_face(
        megatron, tmp_path / "out", ignored_arguments=[name], progress=False
    )
    assert any(f"exported without {name} {value}" in note for note in done.notes)


@pytest.mark.parametrize("case", SAME)
def test_the_export_does_not_refuse_what_changes_nothing(case, folders, tmp_path):
    source, megatron = folders[case]
    convert_to_hugging_face(megatron, tmp_path / "out", like=source, progress=False)
