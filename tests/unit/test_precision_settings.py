"""What is refused, with place and remedy, before anything long begins; and what texts are taken."""

import json
import shutil

import pytest

from megatron_anchor.command_line import run
from megatron_anchor.errors import UserError
from megatron_anchor.precision.arms import ARMS
from megatron_anchor.precision.cli import main, parser, settings_of
from megatron_anchor.precision.measurement import STATES
from megatron_anchor.precision.settings import Settings
from megatron_anchor.precision.texts import (
    choose_texts,
    default_texts,
    open_tokenizer,
    texts_of_files,
)
from tests.conversion_models import hugging_face_model
from tests.corpus_fixtures import tokenizer_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    hugging_face_model("llama").save_pretrained(folder)
    return folder


def refused(capsys, *arguments):
    """Expect exit code 2 and one line; give it."""
    assert run(main, ["--no-progress", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def config_folder(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_defaults_are_the_papers():
    asked = Settings()
    assert (asked.shift2, min(asked.shifts), max(asked.shifts)) == (16, 0, 2000)
    assert (asked.num_texts, asked.length) == (50, 4096)
    assert (min(asked.lengths), max(asked.lengths), asked.reach) == (64, 8192, 131072)
    assert settings_of(parser().parse_args(["--hf", "x"])) == asked


def test_help_names_every_arm_and_kind_of_states():
    said = " ".join(parser().format_help().split())
    assert f"all of {', '.join(ARMS)} (docs" in said.replace("- ", "-")
    assert all(kind in said for kind in STATES)


def test_quick_gives_defaults_and_flags_win():
    asked = settings_of(parser().parse_args(["--hf", "x", "--quick", "--length", "99"]))
    assert (asked.num_texts, asked.length, asked.shift2) == (1, 99, 16)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'gpt2' has learned posit"),
        ({"model_type": "opt"}, "'opt' has learned positions, not RoPE"),
        ({"model_type": "bloom"}, "'bloom' has ALiBi, not RoPE"),
        ({"model_type": "falcon", "alibi": True}, "'falcon' has ALiBi, not RoPE"),
        ({"model_type": "other", "position_embedding_type": "absolute"}, "learned positions"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "unknown architecture"),
    ],
)
def test_a_model_without_rope_is_refused_by_what_it_has(config, said, tmp_path, capsys):
    assert said in refused(capsys, "--hf", config_folder(tmp_path, **config))


def test_a_missing_folder_and_a_missing_checkpoint_are_named(tmp_path, capsys):
    assert "nowhere/config.json does not exist" in refused(capsys, "--hf", tmp_path / "nowhere")
    assert "nowhere" in refused(capsys, "--megatron", tmp_path / "nowhere")


def test_a_config_that_is_no_json_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(capsys, "--hf", tmp_path)


def test_a_folder_without_tokenizer_is_named_with_the_flag(folder, capsys):
    assert "has no tokenizer" in (said := refused(capsys, "--hf", folder, "--quick"))
    assert "--tokenizer DIR" in said


def config_change(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


DAMAGES = {
    "missing weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 200),
        "model.safetensors: not a whole safetensors file",
    ),
    "weights of fewer layers": (
        config_change(num_hidden_layers=6),
        "lack model.layers.4.input_layernorm.weight",
    ),
    "weights of another shape": (config_change(num_attention_heads=16), "has shape [64, 64]"),
    "unknown dtype": (config_change(dtype="float7"), "float7"),
    "unknown rope": (
        config_change(rope_parameters={"rope_type": "warp", "rope_theta": 1e4}),
        "rope type 'warp' is none of",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_before_anything_is_measured(damage, folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change, said = DAMAGES[damage]
    change(copy)
    assert said in refused(capsys, "--hf", copy, "--quick")


def _small_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "<unk>": 1, "word": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_rows_that_are_no_texts_are_named_by_file_and_line(folder, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "word word"}\n{"text": \n')
    tokenizer = _small_tokenizer(tmp_path)
    said = refused(
        capsys, "--hf", folder, "--quick", "--tokenizer", tokenizer, "--texts", bad, "--length", 9
    )
    assert "bad.jsonl:2" in said
    said = refused(
        capsys, "--hf", folder, "--quick", "--tokenizer", tokenizer, "--texts", tmp_path / "no.txt"
    )
    assert "no.txt" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": ("float7",)}, "--arms float7: choose from bf16"),
        ({"states": ("other",)}, "--states other: choose from end-to-end, shared"),
        ({"shifts": (16, 0)}, "--shifts begins with 16, which is --shift2"),
        ({"shifts": (0, 0)}, "--shifts 0 0: expected each once"),
        ({"shifts": (-1,)}, "expected shifts of at least 0"),
        ({"lengths": (0,)}, "lengths of at least 1"),
        ({"num_texts": 0}, "--num-texts 0: expected at least 1"),
        ({"num_long_texts": 0}, "--num-long-texts 0: expected at least 1"),
        ({"length": 1}, "--length 1: expected at least 2"),
        ({"reach": 100}, "--reach 100: expected a power of two from 64 on"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_flag(changes, said):
    with pytest.raises(UserError, match=said):
        Settings(**changes)


def test_flags_that_do_not_belong_together_and_missing_places(folder, tmp_path, capsys):
    assert "belong to --megatron" in refused(capsys, "--hf", folder, "--like", folder)
    said = refused(capsys, "--hf", folder, "--out", tmp_path / "no/x")
    assert "no/x" in said
    assert "No such file or directory" in said
    for place in (f"{tmp_path}/new/", tmp_path):
        assert "names a folder" in refused(capsys, "--hf", folder, "--out", place)
    assert "--device quantum" in refused(capsys, "--hf", folder, "--device", "quantum")


def test_short_texts_are_left_out_and_too_few_long_ones_refused(tmp_path):
    tokenizer = open_tokenizer(_small_tokenizer(tmp_path))
    texts = [("a", "word " * 5), ("b", "word " * 30), ("c", "word " * 20)]
    chosen = choose_texts(texts, tokenizer, length=20, count=2)
    assert [(text.name, len(text.tokens_S)) for text in chosen] == [("b", 20), ("c", 20)]
    with pytest.raises(UserError, match=r"only 1 of 3 texts have 21 tokens .* has 30"):
        choose_texts(texts, tokenizer, length=21, count=2)
    with_bos = choose_texts(texts, tokenizer, length=21, count=2, add_bos=True)
    assert [text.tokens_S[:2].tolist() for text in with_bos] == [[0, 2], [0, 2]]
    with pytest.raises(UserError, match="token id 2, but the model has 2"):
        choose_texts(texts, tokenizer, length=5, count=1, vocabulary=2)


def test_a_text_is_read_on_where_its_head_has_too_few_tokens(tmp_path):
    tokenizer = open_tokenizer(_small_tokenizer(tmp_path))
    text = " " * 500 + "word " * 10
    assert len(choose_texts([("a", text)], tokenizer, length=10, count=1)[0].tokens_S) == 10


def test_texts_come_from_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    found = list(texts_of_files([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]))
    assert [text for _, text in found] == ["one", "two", "three"]
    assert found[2][0] == f"{tmp_path / 'b.jsonl'}:2"


def test_default_texts_are_prose_and_code_that_every_python_has():
    first = [name for name, _ in _take(default_texts(), 4)]
    assert [name.split(",")[0] for name in first] == [
        "pydoc_data.topics",
        "standard library",
    ] * 2
    tokenizer = open_tokenizer(tokenizer_json().parent)
    assert len(choose_texts(default_texts(), tokenizer, length=512, count=2)) == 2


def _take(texts, count):
    return [text for _, text in zip(range(count), texts, strict=False)]
