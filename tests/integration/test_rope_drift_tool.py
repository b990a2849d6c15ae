"""The tool as a user runs it, on a Hugging Face folder and on the Megatron checkpoint of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.precision.cli import main
from tests.conversion_models import hugging_face_model

ROOT = Path(__file__).parents[2]
ASKED = ("--quick", "--length", "40", "--shifts", "0", "300", "--lengths", "8", "60", "--reach")
ASKED = (*ASKED, "128", "--arms", "bf16", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    hugging_face_model("qwen2").save_pretrained(folder / "hf")
    words = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, 131)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text(" ".join(f"w{2 + i * i % 129}" for i in range(70)))
    return folder


def texts_of(model):
    return "--texts", str(model / "text.txt"), "--tokenizer", str(model / "tokenizer")


def test_the_tool_starts_at_once_and_shows_an_example():
    """Help needs neither torch nor transformers."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "tools/measure_rope_drift.py", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "python tools/measure_rope_drift.py --hf" in done.stdout
    assert not {"torch", "transformers"} & {line.split()[-1] for line in done.stderr.splitlines()}


def test_the_tool_writes_figures_tables_and_findings(model, tmp_path, capsys):
    asked = ("--hf", str(model / "hf"), *texts_of(model), *ASKED, "--out", str(tmp_path / "drift"))
    assert main(asked) == 0
    said = capsys.readouterr()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("drift-frequencies.png", "drift-heads.png", "drift.csv", "drift.json", "drift.md"),
        "drift.png",
    ]
    assert (tmp_path / "drift.md").read_text() == said.out
    found = json.loads((tmp_path / "drift.json").read_text())
    bf16, float32 = (found["arms"][name]["end-to-end"]["D"] for name in ("bf16", "float32"))
    assert all(a > 100 * b for a, b in zip(bf16, float32, strict=True))
    assert set(found["arms"]["bf16"]["D_logit"]) == {"8", "60"}
    assert "layer" in said.err  # the progress bar
    assert "the model was trained for 256" in said.err


def test_a_megatron_checkpoint_gives_the_same_numbers(model, capsys):
    convert_to_megatron(model / "hf", model / "megatron", progress=False)
    printed = []
    for place in (("--hf", str(model / "hf")), ("--megatron", str(model / "megatron"))):
        assert main([*place, *texts_of(model), *ASKED, "--json", "--name", "same"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
