"""The converters as a user runs them: exit codes, messages, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_anchor import command_line
from megatron_anchor.checkpoint import cli_to_hugging_face, cli_to_megatron, cli_verify
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from tests.conversion_models import hugging_face_model

ROOT = Path(__file__).parents[2]


def run_process(tool, *arguments, expect=0):
    """Run a tool as a process; give what it printed on stdout, or all where it must fail."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stderr + done.stdout


def run(capsys, command, *arguments, expect=0):
    """The same in this process, which has everything imported already."""
    assert command_line.run(command.main, list(map(str, arguments))) == expect
    said = capsys.readouterr()
    return said.out if expect == 0 else said.err + said.out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Qwen3 with a tokenizer that has an eos and no bos."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    hugging_face_model("qwen3").save_pretrained(folder / "hf")
    words = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, 131)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", model_max_length=256
    ).save_pretrained(folder / "hf")
    return folder


def test_there_and_back_and_verified(model, tmp_path, capsys):
    out = tmp_path / "megatron"
    said = run(capsys, cli_to_megatron, "--hf", model / "hf", "--out", out, "--extend-to", "65536")
    assert "megatron_args.txt" in said
    flags = (out / "megatron_args.txt").read_text().splitlines()
    for line in (
        "--num-layers 4",
        "--kv-channels 16",
        "--qk-layernorm",
        "--rotary-base 5000000",
        "--max-position-embeddings 65536",
        "--padded-vocab-size 256",
        "--anchor-token 0",
        "--tokenizer-type HuggingFaceTokenizer",
        f"--tokenizer-model {out / 'hugging_face'}",
    ):
        assert line in flags
    assert "--untie-embeddings-and-output-weights" not in flags

    back = tmp_path / "back"
    said = run(capsys, cli_to_hugging_face, "--megatron", out, "--out", back, "--json")
    result = json.loads(said)
    assert result["family"] == "Qwen3ForCausalLM"
    config = json.loads((back / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e6
    assert config["max_position_embeddings"] == 65536
    assert config["vocab_size"] == 131
    assert json.loads((back / "tokenizer_config.json").read_text())["model_max_length"] == 65536
    assert (back / "tokenizer.json").read_bytes() == (model / "hf/tokenizer.json").read_bytes()

    said = run_process(
        "verify_conversion.py", "--megatron", out, "--hf", back, "--text", "w3 w7 w9 w100"
    )
    assert "46 of 46 equal bit by bit" in said
    assert "4 tokens" in said
    assert said.endswith("PASSED: the same model\n")


def test_one_flipped_bit_fails_the_verification_and_names_the_tensor(model, tmp_path, capsys):
    convert_to_megatron(model / "hf", tmp_path / "megatron", progress=False)
    victim = tmp_path / "hf"
    victim.mkdir()
    for path in (model / "hf").iterdir():
        (victim / path.name).write_bytes(path.read_bytes())
    weights = bytearray((victim / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (victim / "model.safetensors").write_bytes(weights)
    said = run(
        capsys,
        cli_verify,
        *("--megatron", tmp_path / "megatron", "--hf", victim, "--no-logits"),
        expect=1,
    )
    assert "45 of 46 equal" in said
    assert "differs: model" in said
    assert "FAILED" in said


def test_an_argument_that_the_family_cannot_say_is_left_out_only_on_demand(model, tmp_path, capsys):
    import torch

    from megatron_anchor.checkpoint.rows import Files
    from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint

    megatron = tmp_path / "megatron"
    convert_to_megatron(model / "hf", megatron, progress=False)
    with Files() as files:
        state = TorchDistCheckpoint(megatron / "release", files).common_state()
    state["args"].no_rope_freq, state["args"].of_our_fork = 2, "x"
    torch.save(state, megatron / "release/common.pt")
    words = ("--megatron", megatron, "--out", tmp_path / "back", "--no-progress")
    said = run(capsys, cli_to_hugging_face, *words, expect=2)
    assert "no_rope_freq 2 (layers without rotation; expected None or False)" in said
    assert said.endswith("--ignore-arguments no_rope_freq of_our_fork\n")
    said = run(capsys, cli_to_hugging_face, *words, "--ignore-arguments", "of_our_fork", expect=2)
    assert "of_our_fork" not in said
    both = ("--ignore-arguments", "no_rope_freq", "of_our_fork")
    said = run(capsys, cli_to_hugging_face, *words, *both)
    assert "note: exported without no_rope_freq 2" in said
    said = run(
        capsys,
        cli_verify,
        *("--megatron", megatron, "--hf", tmp_path / "back", "--no-logits"),
        expect=1,
    )
    assert "other setting: no_rope_freq 2" in said
    assert said.endswith("FAILED: not the same model\n")


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    said = run_process(
        "convert_hf_to_megatron.py", "--hf", tmp_path, "--out", tmp_path / "out", expect=2
    )
    assert said.startswith("error: ")
    assert "config.json does not exist" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        (cli_to_megatron, "convert_hf_to_megatron.py"),
        (cli_to_hugging_face, "convert_megatron_to_hf.py"),
        (cli_verify, "verify_conversion.py"),
    ],
)
def test_help_shows_a_worked_example(command, tool):
    assert f"example:\n  python tools/{tool}" in command.parser().format_help()
    assert (ROOT / "tools" / tool).is_file()
