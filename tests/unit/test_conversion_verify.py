"""What the verification must see: settings, dtypes, names of either layer spec."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_anchor import command_line
from megatron_anchor.checkpoint import cli_verify
from megatron_anchor.checkpoint.finite import NonFinite
from megatron_anchor.checkpoint.rows import as_bytes
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.errors import UserError
from tests.conversion_models import hugging_face_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral")
    hugging_face_model("mistral").save_pretrained(folder / "hf")
    convert_to_megatron(folder / "hf", folder / "megatron", progress=False)
    convert_to_megatron(folder / "hf", folder / "half", dtype=torch.bfloat16, progress=False)
    return folder


def verdict(capsys, megatron, folder, *flags, expect):
    arguments = ["--megatron", megatron, "--hf", folder, "--no-logits", *flags]
    assert command_line.run(cli_verify.main, list(map(str, arguments))) == expect
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": 1e-3}, r"epsilon 1e-06 (Hugging Face 0.001)"),
        ({"sliding_window": 128}, "full attention (Hugging Face sliding_window 128)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "rotary_base 10000.0"),
    ],
)
def test_another_setting_fails_without_logits(mistral, tmp_path, capsys, change, said):
    shutil.copytree(mistral / "hf", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = verdict(capsys, mistral / "megatron", tmp_path / "hf", expect=1)
    assert said in found
    assert "FAILED" in found
    verdict(
        capsys,
        *(mistral / "megatron", tmp_path / "hf", "--extended"),
        expect=0 if "rope_parameters" in change else 1,
    )


def test_another_dtype_is_said(mistral, capsys):
    found = verdict(capsys, mistral / "half", mistral / "hf", expect=0)
    assert "39 of 39 equal bit by bit after a cast" in found
    assert "39 tensors are torch.bfloat16 in Megatron, torch.float32 in Hugging Face" in found
    assert "PASSED: the same model but for its dtype" in found
    assert "cast" not in verdict(capsys, mistral / "megatron", mistral / "hf", expect=0)


def test_logits_are_compared_from_the_names_of_transformer_engines_layer_spec_too(tmp_path):
    hugging_face_model("mixtral").save_pretrained(tmp_path / "hf")
    done = convert_to_megatron(
        tmp_path / "hf", tmp_path / "megatron", target="transformer_engine", progress=False
    )
    assert "--transformer-impl transformer_engine" in done.flags
    tool = [sys.executable, str(ROOT / "tools/verify_conversion.py"), "--max-tokens", "32"]
    found = subprocess.run(
        [*tool, "--megatron", tmp_path / "megatron", "--hf", tmp_path / "hf"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert found.stdout.endswith("PASSED: the same model\n"), found.stdout + found.stderr


def damaged(folder, tmp_path, **values):
    """A copy of a model folder with values of some tensors changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "bad")
    path = tmp_path / "bad/model.safetensors"
    weights = load_file(path)
    for name, value in values["weights"].items():
        weights[name].view(-1)[[0, -1]] = value
    save_file(weights, path, {"format": "pt"})
    return tmp_path / "bad"


BAD = {
    "model.layers.1.self_attn.k_proj.weight": float("nan"),
    "model.norm.weight": float("-inf"),
}


def test_weights_that_are_no_numbers_are_named_both_ways_and_by_the_verification(
    mistral, tmp_path, capsys
):
    said = [f"{name}: 2 values are NaN or Inf" for name in BAD]
    bad = damaged(mistral / "hf", tmp_path, weights=BAD)
    with pytest.raises(UserError, match="--allow-non-finite") as refused:
        convert_to_megatron(bad, tmp_path / "megatron", progress=False)
    assert all(line in str(refused.value) for line in said)
    assert not (tmp_path / "megatron").exists()
    convert_to_megatron(bad, tmp_path / "megatron", allow_non_finite=True, progress=False)
    with pytest.raises(UserError, match="--allow-non-finite") as refused:
        convert_to_hugging_face(tmp_path / "megatron", tmp_path / "out", progress=False)
    assert all(line in str(refused.value) for line in said)
    assert not (tmp_path / "out").exists()
    convert_to_hugging_face(
        tmp_path / "megatron", tmp_path / "out", allow_non_finite=True, progress=False
    )
    found = verdict(capsys, tmp_path / "megatron", tmp_path / "out", expect=0)
    assert all(line in found for line in said)


def test_a_cast_that_overflows_is_named(mistral, tmp_path):
    bad = damaged(mistral / "hf", tmp_path, weights={"model.norm.weight": 1e6})
    with pytest.raises(UserError, match=r"\(as float16\): model.norm.weight: 2 values"):
        convert_to_megatron(bad, tmp_path / "m", dtype=torch.float16, progress=False)
    convert_to_megatron(bad, tmp_path / "m", dtype=torch.bfloat16, progress=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_counted_is_what_torch_calls_not_finite(dtype):
    limits = torch.finfo(dtype)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:4] = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype)
    values[[10, 20, 999]] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    found = NonFinite()
    found.look_at("x", as_bytes(values).reshape(10, -1), dtype)
    assert found.counts == {"x": int((~values.isfinite()).sum())} == {"x": 3}
