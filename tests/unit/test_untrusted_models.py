"""Model folders from strangers: nothing in them is run, and nothing outside of them is read."""

import ast
import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_anchor import command_line
from megatron_anchor.checkpoint import cli_to_megatron, cli_verify, pretrained
from megatron_anchor.checkpoint.hugging_face_config import read_config
from megatron_anchor.checkpoint.model_folder import check_links
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation import cli as evaluation
from megatron_anchor.evaluation.harness import HarnessJob, check_code, load_harness_model
from megatron_anchor.evaluation.models import Placement
from megatron_anchor.precision import cli as precision
from tests.evaluation_models import tiny_model

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("megatron_anchor", "tools", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def loading_calls():
    """Give every call by which transformers could load a folder: place and keywords."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("from_pretrained", "from_config", "pipeline")
            ):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", keywords


def test_no_call_leaves_it_to_transformers_whether_to_run_a_folders_code():
    calls = dict(loading_calls())
    assert len(calls) >= 5
    undecided = [place for place, keywords in calls.items() if "trust_remote_code" not in keywords]
    assert not undecided
    trusting = {
        place.split(":")[0]
        for place, keywords in calls.items()
        if ast.unparse(keywords["trust_remote_code"]) != "False"
    }
    assert trusting == {"megatron_anchor/tokenizers/huggingface.py"}  # --trust-remote-code


EVIL = """
import os
os.mkdir({mark!r})
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "evil"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


def evaluate(folder, out):
    words = ["--checkpoints", str(folder), "--tasks", "vt", "--seq-lengths", "1100"]
    words += ["--num-samples", "1", "--output-dir", str(out), "--no-progress", "--device", "cpu"]
    return command_line.run(evaluation.main, words)


def measure_drift(folder, out):
    words = ["--hf", str(folder), "--quick", "--length", "64", "--num-texts", "1", "--no-progress"]
    words += ["--lengths", "64", "--out", str(out / "drift")]
    return command_line.run(precision.main, words)


def to_megatron(folder, out):
    words = ["--hf", str(folder), "--out", str(out / "m"), "--no-progress"]
    return command_line.run(cli_to_megatron.main, words)


COMMANDS = {"evaluate": evaluate, "measure-drift": measure_drift, "to-megatron": to_megatron}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "hf"
    tiny_model(folder, seed=0, layers=1)
    return folder


@pytest.fixture
def evil(model, tmp_path, monkeypatch):
    """A folder that asks for code of its own, somebody who answers yes, and the code's mark."""
    folder, mark = tmp_path / "evil", tmp_path / "hit"
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    kinds = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(folder / "config.json", auto_map=kinds, model_type="evil")
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokens"]})
    monkeypatch.setattr(builtins, "input", lambda *_: "yes")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, mark


def change(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_the_code_would_run_if_it_were_trusted(evil, tmp_path, monkeypatch):
    """The tests below could fail."""
    from transformers import AutoConfig, dynamic_module_utils

    folder, mark = evil
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize("kind", ["unknown model", "known model"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_a_folders_own_code(command, kind, evil, tmp_path, capsys):
    folder, mark = evil
    if kind == "known model":
        change(folder / "config.json", model_type="llama")
    (tmp_path / "out").mkdir()
    code = COMMANDS[command](folder, tmp_path / "out")
    said = capsys.readouterr().err
    assert not mark.exists()
    assert "[y/N]" not in said
    assert "trust_remote_code" not in said
    if kind == "unknown model":
        assert code == 2
        assert said.startswith("error: ")


@pytest.mark.parametrize("load", ["load_config", "load_tokenizer", "load_causal_model"])
def test_the_message_names_the_file_that_asks(load, evil):
    folder, mark = evil
    change(folder / "tokenizer_config.json", tokenizer_class="Unheard")
    with pytest.raises(UserError, match=r"asks for Python code of the folder's own"):
        getattr(pretrained, load)(folder)
    assert not mark.exists()


def test_a_known_model_is_transformers_own_whatever_it_asks_for(evil):
    folder, mark = evil
    change(folder / "config.json", model_type="llama")
    loaded = pretrained.load_causal_model(folder, dtype=torch.float32)
    assert type(loaded).__module__ == "transformers.models.llama.modeling_llama"
    assert type(pretrained.random_causal_model(folder)) is type(loaded)
    assert not mark.exists()


def test_lm_evaluation_harness_which_would_run_it_is_not_given_it(evil, model):
    folder, _ = evil
    job = {"lengths": [4096], "num_samples": 1, "seed": 0, "batch_size": 1}
    job |= {"placement": Placement("cpu", "float32")}
    asked = HarnessJob(folder=model, tokenizer=folder, **job)
    assert asked.model_arguments()["trust_remote_code"] is False
    with pytest.raises(UserError, match=r"config\.json has an auto_map: lm-eval"):
        load_harness_model(asked)
    check_code(HarnessJob(folder=model, tokenizer=model, **job))


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def pickled(folder, mark, *, sharded):
    """Replace a folder's weights by a pickle that runs code."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    name = "odd-name.bin" if sharded else "pytorch_model.bin"
    torch.save({"model.norm.weight": Attack(mark)}, folder / name)
    if sharded:
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_pickled_code_is_refused_in_our_words(command, sharded, model, tmp_path, capsys):
    folder, mark = tmp_path / "hf", tmp_path / "hit"
    shutil.copytree(model, folder)
    pickled(folder, mark, sharded=sharded)
    (tmp_path / "out").mkdir()
    if command == "evaluate" and sharded:  # it tells models apart by their weight files
        (folder / "pytorch_model-1.bin").write_bytes((folder / "odd-name.bin").read_bytes())
    code = COMMANDS[command](folder, tmp_path / "out")
    said = capsys.readouterr().err
    assert not mark.exists()
    assert code == 2
    assert "refused to unpickle posix.mkdir" in said
    assert "weights_only" not in said


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", b"\x80\x02}q\x00."])
def test_damaged_pickles_end_an_evaluation_with_code_2(content, model, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert COMMANDS["evaluate"](folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder}/pytorch_model.bin is ")
    assert "weights_only" not in said


LINKED = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", [*LINKED, "additional_chat_templates/a.jinja"])
def test_a_link_out_of_the_folder_is_refused_and_not_copied(name, model, tmp_path):
    folder, secret = tmp_path / "hf", tmp_path / "secret"
    shutil.copytree(model, folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    secret.write_bytes(path.read_bytes() if path.is_file() else b"{}")
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    for convert in (
        lambda: convert_to_megatron(folder, tmp_path / "out", progress=False),
        lambda: read_config(folder),
        lambda: pretrained.load_causal_model(folder),
    ):
        with pytest.raises(UserError, match=rf"{name} leads to {secret}, outside"):
            convert()
    assert not (tmp_path / "out").exists()


def test_a_linked_folder_of_templates_is_refused(model, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(model, folder)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/key.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match="additional_chat_templates leads to"):
        convert_to_megatron(folder, tmp_path / "out", progress=False)


def test_an_export_does_not_follow_links_of_like(model, tmp_path):
    convert_to_megatron(model, tmp_path / "megatron", progress=False)
    like = tmp_path / "like"
    shutil.copytree(model, like)
    (tmp_path / "secret").write_text("{}")
    (like / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"chat_template\.jinja leads to"):
        convert_to_hugging_face(tmp_path / "megatron", tmp_path / "out", like=like, progress=False)
    assert not (tmp_path / "out").exists()


def test_links_inside_a_folder_a_linked_folder_and_the_hubs_cache_are_read(model, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    convert_to_megatron(tmp_path / "link", tmp_path / "megatron", progress=False)
    assert not (tmp_path / "megatron/hugging_face/tokenizer.json").is_symlink()
    pretrained.load_tokenizer(snapshot)

    (snapshot / "added_tokens.json").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match=r"added_tokens\.json leads to"):
        check_links(snapshot)

    folder = tmp_path / "inside"
    shutil.copytree(model, folder)
    (folder / "config.json").rename(folder / "real.json")
    (folder / "config.json").symlink_to("real.json")
    check_links(folder)


def test_verify_reads_no_links_and_runs_no_code(evil, model, tmp_path, capsys):
    folder, mark = evil
    change(folder / "config.json", model_type="llama")
    convert_to_megatron(model, tmp_path / "megatron", progress=False)
    words = ["--megatron", str(tmp_path / "megatron"), "--hf", str(folder), "--no-logits"]
    assert command_line.run(cli_verify.main, words) == 0
    assert pretrained.load_tokenizer(folder) is not None
    (folder / "vocab.json").symlink_to("/etc/hostname")
    assert command_line.run(cli_verify.main, words) == 2
    assert "vocab.json leads to /etc/hostname" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("content", ["[", "[1]", "[" * 100_000, '"text"'])
def test_a_tokenizer_config_that_is_something_else_is_named(content, model, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(model, folder)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json (is not JSON|must hold)"):
        convert_to_megatron(folder, tmp_path / "out", progress=False)
