"""One recipe from the Hugging Face folder to the verified export, on the CPU: TOY=1.

Every step is the process that a user starts. The arms that change most are switched on: a list of
documents, domain tags, YaRN and recomputed MLPs; the anchor is the eos, as Qwen has no bos.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus_fixtures import texts, tokenizer_json

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/qwen_1.5_1.8b_128k.sh"
ARMS = {"UPSAMPLE": "1", "DOMAIN_TAGS": "1", "ROPE_SCALING": "yarn", "RECOMPUTE": "mlp"}
ARMS |= {"LOSS_WEIGHTING": "effective-context", "GROW_FROM": "128"}
WORK = Path("work/qwen_1.5_1.8b_128k-toy")
ARM = "131072-anchor-tags-upsampled-rope10000000-yarn-effective-context-from128"
EOS = 1


def recipe(folder, *steps, arms=ARMS):
    """Run steps of the recipe; give what was printed."""
    known = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PYTHONPATH")}
    done = subprocess.run(
        [RECIPE, *steps],
        cwd=folder,
        env=known | arms | {"TOY": "1", "PYTHON": sys.executable, "HF_MODEL": "hf"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a user has: config.json at Qwen1.5-1.8B's size, a tokenizer without bos, and texts."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("recipe")
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=768,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=EOS,
        eos_token_id=EOS,
        dtype="bfloat16",
    ).save_pretrained(folder / "hf")
    source = tokenizer_json().parent
    shutil.copy(source / "tokenizer.json", folder / "hf")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    domains = ("RedPajamaC4", "RedPajamaBook")
    rows = (
        {"text": text, "meta": {"redpajama_set_name": domains[number % 2]}}
        for number, text in enumerate(texts())
    )
    (folder / "data").mkdir()
    (folder / "data/few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def said(folder):
    """What the steps up to the verified export printed."""
    steps = ("shrink", "convert", "preprocess", "upsample", "plan", "train", "export", "verify")
    return recipe(folder, *steps)


def test_every_step_does_its_work(said, folder):
    for proof in (
        "Qwen2ForCausalLM, 2",  # tensors converted, and back
        "60 documents",
        "long_documents.npy: ",
        "fitting in 74.4 GiB per GPU: 1",
        "> attention pattern anchor, RoPE base 1e+07",
        "iteration        3/       3",
        "successfully saved checkpoint from iteration       3",
        "document length limit: 5.120000E+02",
        "lm loss unweighted",
        "top-1 agreement",
    ):
        assert proof in said, proof
    assert said.count("PASSED: the same model") == 2
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", said)]
    assert len(losses) == 3
    assert all(5 < loss < 8 for loss in losses), "log(768) = 6.6"


def test_the_export_is_the_model_that_the_arm_trains(said, folder):
    flags = (folder / WORK / "131072-start/megatron_args.txt").read_text().splitlines()
    assert f"--anchor-token {EOS}" in flags
    assert "--add-qkv-bias" in flags
    config = json.loads((folder / WORK / f"{ARM}-hf-3/config.json").read_text())
    assert config["rope_theta"] == 1e7
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    assert config["max_position_embeddings"] == 131072
    started = (folder / WORK / "tiny/model.safetensors").read_bytes()
    trained = (folder / WORK / f"{ARM}-hf-3/model.safetensors").read_bytes()
    assert started != trained, "nothing was learned"


def test_the_last_checkpoints_are_there_for_the_evaluation(said, folder):
    found = sorted(path.name for path in (folder / WORK / ARM).glob("iter_*"))
    assert found == ["iter_0000002", "iter_0000003"]


def test_a_script_that_is_started_again_does_nothing_twice(said, folder):
    again = recipe(folder, "shrink", "convert", "upsample", "train", "export")
    assert again.count(" is there") == 4
    assert f"{WORK}/{ARM} has iteration 3" in again
    assert sys.executable not in again, "a command was run"


@pytest.mark.skipif(
    not (ROOT / "tools/evaluate_long_context.py").is_file(),
    reason="tools/evaluate_long_context.py is not there",
)
def test_the_checkpoints_are_evaluated(said, folder):
    recipe(folder, "evaluate")
    assert any((folder / WORK / "results" / ARM).iterdir())


TEMPLATE = """\
{% for message in messages %}{% if message.role == "assistant" %}\
answer {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\
{% else %}question {{ message.content }} {% endif %}{% endfor %}"""


def test_the_trained_arm_is_tuned_on_answers_only(said, folder):
    (folder / "template.jinja").write_text(TEMPLATE)
    with (folder / "chats.jsonl").open("w") as stream:
        for number in range(40):
            question = {"role": "user", "content": f"what is {number}"}
            answer = {"role": "assistant", "content": f"it is {number}"}
            stream.write(json.dumps({"messages": [question, answer]}) + "\n")
    arms = {"ROPE_SCALING": "yarn", "CHAT": "chats.jsonl", "CHAT_TEMPLATE": "template.jinja"}
    arms |= {"TUNE_FROM": str(WORK / ARM), "TRAIN_ITERS": "2", "SAVE_LAST": "1"}
    told = recipe(folder, "preprocess", "train", "export", "verify", arms=arms)
    assert "PASSED: the same model" in told
    assert "lm loss unweighted" in told
    described = json.loads(
        (folder / WORK / "corpus-chat_messages_document.weights.json").read_text()
    )
    assert 0 < described["weighted_tokens"] < described["tokens"]
