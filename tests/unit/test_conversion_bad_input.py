"""Bad input: a message with place and remedy, nothing executed, nothing left behind."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.errors import UserError
from tests.conversion_models import hugging_face_model, weights_of


class Attack:
    """Makes a folder when it is unpickled by someone careless."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    hugging_face_model("llama").save_pretrained(folder / "hf", max_shard_size="100KB")
    convert_to_megatron(folder / "hf", folder / "megatron", progress=False)
    return folder


@pytest.fixture
def copy(original, tmp_path):
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def refused(convert, source, message, *, tmp_path, **options):
    """Expect an error, and no trace of an output."""
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        convert(source, tmp_path / "out", progress=False, **options)
    assert set(tmp_path.iterdir()) == before
    return str(caught.value)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resave(folder, change):
    """Rewrite a model's weights as one file after a change."""
    weights = weights_of(folder)
    change(weights)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    save_file(weights, folder / "model.safetensors")


def test_a_missing_shard_is_named(copy, tmp_path):
    victim = sorted((copy / "hf").glob("*.safetensors"))[1]
    victim.unlink()
    refused(convert_to_megatron, copy / "hf", victim.name, tmp_path=tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(copy, tmp_path, keep):
    victim = sorted((copy / "hf").glob("*.safetensors"))[1]
    data = victim.read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    victim.write_bytes(data[:cut] if cut >= 0 else data[:-1])
    refused(convert_to_megatron, copy / "hf", victim.name, tmp_path=tmp_path)


def test_a_file_that_shrinks_while_it_is_read_leaves_nothing(copy, tmp_path, monkeypatch):
    from megatron_anchor.checkpoint import to_megatron

    victim = sorted((copy / "hf").glob("*.safetensors"))[-1]
    check = to_megatron.check_tensors

    def shrink(*args):
        found = check(*args)
        os.truncate(victim, 500)
        return found

    monkeypatch.setattr(to_megatron, "check_tensors", shrink)
    refused(convert_to_megatron, copy / "hf", f"{victim.name} ends at byte", tmp_path=tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}},
        {"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "xy"},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {
            "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "y": {"dtype": "F16", "shape": [1], "data_offsets": [6, 8]},
        },
        {"x": 3},
        {"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": 8}},
        {"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        ["x"],
    ],
)
def test_a_malformed_header_is_refused(copy, tmp_path, header):
    text = json.dumps(header).encode()
    for path in [*(copy / "hf").glob("*.safetensors*")]:
        path.unlink()
    (copy / "hf" / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(8)
    )
    refused(convert_to_megatron, copy / "hf", r"model\.safetensors", tmp_path=tmp_path)
    from safetensors import SafetensorError, safe_open

    if "I64" not in str(header) and "True" not in str(header):  # we take less than the library
        with (
            pytest.raises(SafetensorError),
            safe_open(copy / "hf/model.safetensors", "pt"),
        ):
            pass


def test_a_header_that_is_nested_too_deeply_is_refused(copy, tmp_path):
    for path in [*(copy / "hf").glob("*.safetensors*")]:
        path.unlink()
    text = b"[" * 200_000
    (copy / "hf/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refused(convert_to_megatron, copy / "hf", "header is malformed", tmp_path=tmp_path)


def test_wrong_shapes_are_named(copy, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    resave(copy / "hf", lambda w: w.update({name: torch.zeros(95, 64)}))
    refused(convert_to_megatron, copy / "hf", rf"{name} has shape \[95, 64\]", tmp_path=tmp_path)


def test_a_tensor_without_a_rule_is_named(copy, tmp_path):
    resave(copy / "hf", lambda w: w.update({"model.layers.0.mlp.extra.weight": torch.zeros(3)}))
    refused(
        convert_to_megatron,
        copy / "hf",
        "no rule for model.layers.0.mlp.extra.weight",
        tmp_path=tmp_path,
    )


def test_a_missing_tensor_is_named(copy, tmp_path):
    resave(copy / "hf", lambda w: w.pop("model.norm.weight"))
    refused(convert_to_megatron, copy / "hf", "lack model.norm.weight", tmp_path=tmp_path)


def test_mixed_dtypes_of_a_kind_need_a_decision(copy, tmp_path):
    name = "model.layers.3.self_attn.o_proj.weight"
    resave(copy / "hf", lambda w: w.update({name: w[name].half()}))
    refused(convert_to_megatron, copy / "hf", f"{name} is torch.float16", tmp_path=tmp_path)
    convert_to_megatron(copy / "hf", tmp_path / "out", dtype=torch.float32, progress=False)


def test_an_output_layer_that_is_not_the_tied_embedding_is_not_dropped(copy, tmp_path):
    change_config(copy / "hf", tie_word_embeddings=True)
    refused(convert_to_megatron, copy / "hf", "lm_head.weight differs", tmp_path=tmp_path)


def test_a_vocabulary_larger_than_the_embedding_is_refused(copy, tmp_path):
    change_config(copy / "hf", vocab_size=140)
    refused(convert_to_megatron, copy / "hf", "vocab_size in config.json is 140", tmp_path=tmp_path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(copy, tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(200)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(copy / "hf/tokenizer.json"))
    refused(convert_to_megatron, copy / "hf", "200 tokens, the embedding 131", tmp_path=tmp_path)


def test_an_unknown_architecture_gets_a_suggestion(copy, tmp_path):
    change_config(copy / "hf", architectures=["LLamaForCausalLM"])
    refused(convert_to_megatron, copy / "hf", "did you mean LlamaForCausalLM", tmp_path=tmp_path)


def test_an_output_folder_with_content_is_kept(copy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    refused(convert_to_megatron, copy / "hf", "not empty", tmp_path=tmp_path)
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_pickled_weights_that_execute_code_are_refused(copy, tmp_path):
    for path in (copy / "hf").glob("*.safetensors*"):
        path.unlink()
    torch.save({"model.norm.weight": Attack(tmp_path / "hit")}, copy / "hf/pytorch_model.bin")
    refused(convert_to_megatron, copy / "hf", "refused to unpickle .*mkdir", tmp_path=tmp_path)


def test_an_attack_would_work_on_the_careless(tmp_path):
    """The tests above and below could fail."""
    pickle.loads(pickle.dumps(Attack(tmp_path / "hit")))
    assert (tmp_path / "hit").exists()


def test_metadata_that_executes_code_is_refused(copy, tmp_path):
    (copy / "megatron/release/.metadata").write_bytes(pickle.dumps(Attack(tmp_path / "hit")))
    refused(
        convert_to_hugging_face,
        copy / "megatron",
        "refused to unpickle: posix.mkdir",
        tmp_path=tmp_path,
    )


@pytest.mark.parametrize("victim", ["common state", "tensor", "common.pt"])
def test_objects_that_execute_code_are_refused(copy, tmp_path, victim):
    folder = copy / "megatron" / "release"
    attack = io.BytesIO()
    torch.save([Attack(tmp_path / "hit")], attack)
    if victim == "common.pt":
        (folder / "common.pt").write_bytes(attack.getvalue())
    else:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            name = "common_state" if victim == "common state" else "decoder.layers.mlp.linear_fc2.w"
            if index.fqn.startswith(name):
                with open(folder / "__0_9.distcp", "ab") as file:
                    info.relative_path, info.offset = "__0_9.distcp", file.tell()
                    info.length = file.write(attack.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(
        convert_to_hugging_face, copy / "megatron", "refused to unpickle .*mkdir", tmp_path=tmp_path
    )


def test_a_missing_or_truncated_part_of_a_checkpoint_is_named(copy, tmp_path):
    part = copy / "megatron/release/__0_0.distcp"
    os.truncate(part, part.stat().st_size // 2)
    refused(convert_to_hugging_face, copy / "megatron", "truncated", tmp_path=tmp_path)
    part.unlink()
    refused(
        convert_to_hugging_face, copy / "megatron", r"__0_0\.distcp is missing", tmp_path=tmp_path
    )


def test_a_checkpoint_whose_chunks_leave_a_gap_is_refused(copy, tmp_path):
    path = copy / "megatron/release/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    refused(convert_to_hugging_face, copy / "megatron", "its chunks hold 0", tmp_path=tmp_path)


def test_what_is_not_there_is_said(copy, tmp_path):
    refused(convert_to_megatron, copy, "config.json does not exist", tmp_path=tmp_path)
    refused(convert_to_hugging_face, copy / "hf", "no Megatron checkpoint", tmp_path=tmp_path)
    refused(
        convert_to_hugging_face,
        copy / "megatron",
        "has no iteration 7",
        tmp_path=tmp_path,
        iteration=7,
    )


def test_like_must_be_the_same_model(copy, tmp_path):
    change_config(copy / "hf", num_hidden_layers=5)
    refused(
        convert_to_hugging_face,
        copy / "megatron",
        r"layers 4 \(there 5\)",
        tmp_path=tmp_path,
        like=copy / "hf",
    )


def test_a_window_that_an_extension_makes_shorter_than_the_model_is_kept_or_dropped(tmp_path):
    hugging_face_model("mistral").save_pretrained(tmp_path / "hf")
    change_config(tmp_path / "hf", sliding_window=256)
    for number, (kept, options) in enumerate(
        [(True, {}), (False, {"drop_sliding_window": True}), (False, {"extend_to": None})]
    ):
        out = tmp_path / str(number)
        given = {"extend_to": 16384, "progress": False} | options
        done = convert_to_megatron(tmp_path / "hf", out, **given)
        assert ("--window-size 255,0" in done.flags) == kept
        convert_to_hugging_face(out, tmp_path / f"back{number}", progress=False)
        config = json.loads((tmp_path / f"back{number}/config.json").read_text())
        assert config["sliding_window"] == (256 if kept else None)


def test_a_trained_bias_is_not_lost_to_a_model_without_it(tmp_path):
    hugging_face_model("llama linear, all biases").save_pretrained(tmp_path / "hf")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", progress=False)
    change_config(tmp_path / "hf", mlp_bias=False)
    refused(
        convert_to_hugging_face,
        tmp_path / "megatron",
        r"linear_fc1\.bias .* was trained",
        tmp_path=tmp_path,
        like=tmp_path / "hf",
    )


def test_a_full_disk_leaves_nothing_and_says_where(copy, tmp_path, monkeypatch):
    from megatron_anchor.checkpoint import torch_dist_writer

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch_dist_writer.TorchDistWriter, "add_chunk", full)
    refused(
        convert_to_megatron,
        copy / "hf",
        "out cannot be written: No space left on device",
        tmp_path=tmp_path,
    )


def test_a_single_file_wins_over_an_index_as_in_transformers(copy, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    weights = {name: tensor + 1 for name, tensor in weights_of(copy / "hf").items()}
    save_file(weights, copy / "hf/model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(copy / "hf").state_dict()
    convert_to_megatron(copy / "hf", tmp_path / "m", progress=False)
    convert_to_hugging_face(tmp_path / "m", tmp_path / "back", progress=False)
    found = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("base", [5.5, 123456.5, float("inf"), float("nan"), -1.0, 0.5])
def test_a_base_that_megatron_cannot_be_given_is_refused(copy, tmp_path, base):
    refused(
        convert_to_megatron,
        copy / "hf",
        "--rotary-base",
        tmp_path=tmp_path,
        rotary_base=base,
    )
    if base > 1 and base < float("inf"):
        change_config(copy / "hf", rope_parameters={"rope_type": "default", "rope_theta": base})
        refused(convert_to_megatron, copy / "hf", "is a whole number", tmp_path=tmp_path)


def test_an_output_path_that_the_shell_would_split_is_refused(copy, tmp_path):
    with pytest.raises(UserError, match="cannot pass a path with spaces"):
        convert_to_megatron(copy / "hf", tmp_path / "my model", progress=False)
    assert not (tmp_path / "my model").exists()


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"step": 3}, r"step \(int\)"),
        ({"state_dict": {"model.norm.weight": torch.ones(3)}}, r"state_dict \(dict\)"),
        ({"model.norm.weight": None}, r"model.norm.weight \(NoneType\)"),
    ],
)
def test_an_entry_of_a_bin_file_that_is_no_tensor_is_named(copy, tmp_path, entries, named):
    weights = weights_of(copy / "hf")
    for path in (copy / "hf").glob("*.safetensors*"):
        path.unlink()
    torch.save(weights | entries, copy / "hf/pytorch_model.bin")
    refused(convert_to_megatron, copy / "hf", named, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"model.norm.weight": 7}), "model.norm.weight in 7"),
        (lambda m: m.update({"model.norm.weight": None}), "model.norm.weight in None"),
        (lambda m: m.update({"model.norm.weight": ["x"]}), "expected a file's name"),
        (lambda m: m.pop("model.norm.weight"), "model.norm.weight in no file, but model-0"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(copy, tmp_path, change, message):
    path = copy / "hf/model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    refused(convert_to_megatron, copy / "hf", message, tmp_path=tmp_path)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


DAMAGED = b"\x80\x02" + bytes(range(256))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (".metadata", pickle.dumps({"a": 1}), "metadata is no metadata .* but dict"),
        (".metadata", DAMAGED, "metadata is damaged"),
        (".metadata", b"ctorch.serialization\n_get_layout\n(S'os'\ntR.", "metadata is damaged"),
        ("common.pt", saved([1]), "common.pt holds a list"),
        ("common.pt", saved({"args": {"a": 1}}), "args is a dict"),
        ("common.pt", saved({"x": 1}), "args is a NoneType"),
        ("common.pt", DAMAGED, "common.pt is damaged"),
        ("common.pt", b"", "common.pt is damaged"),
        ("../latest_checkpointed_iteration.txt", b"\xff\xfe\x00", "expected 'release'"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_something_else_is_named(
    copy, tmp_path, file, content, message
):
    (copy / "megatron/release" / file).write_bytes(content)
    said = refused(convert_to_hugging_face, copy / "megatron", message, tmp_path=tmp_path)
    assert "weights_only" not in said


def test_damage_is_not_called_malice_and_torchs_advice_is_not_repeated(copy, tmp_path):
    for path in (copy / "hf").glob("*.safetensors*"):
        path.unlink()
    path = copy / "hf/pytorch_model.bin"
    torch.save({"model.norm.weight": Attack(tmp_path / "hit")}, path)
    malice = refused(convert_to_megatron, copy / "hf", "posix.mkdir", tmp_path=tmp_path)
    path.write_bytes(path.read_bytes()[:300])
    damage = refused(convert_to_megatron, copy / "hf", "is damaged", tmp_path=tmp_path)
    assert "trust" in malice
    assert "trust" not in damage
    assert "weights_only" not in malice + damage


def test_quantised_weights_are_refused(copy, tmp_path):
    change_config(copy / "hf", quantization_config={"quant_method": "gptq"})
    refused(convert_to_megatron, copy / "hf", "quantization_config", tmp_path=tmp_path)


@pytest.fixture
def run_of_two(original, tmp_path):
    """Two iterations of the same weights, and a way to change the second one's arguments."""
    from megatron_anchor.checkpoint.rows import Files
    from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint

    for i in (1, 2):
        shutil.copytree(original / "megatron/release", tmp_path / f"run/iter_{i:07d}")

    def change(**arguments):
        folder = tmp_path / "run/iter_0000002"
        with Files() as files:
            state = TorchDistCheckpoint(folder, files).common_state()
        vars(state["args"]).update(arguments)
        torch.save(state, folder / "common.pt")
        return tmp_path / "run"

    return change


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary_base": 20000}, "rotary_base 10000.0 and 20000.0"),
        ({"rope_parameters": '{"rope_type":"linear","factor":2.0}'}, "scaling {} and {'rope_type'"),
        ({"layernorm_epsilon": 1e-3}, "epsilon 1e-06 and 0.001"),
        ({"max_position_embeddings": 512}, "positions 256 and 512"),
    ],
)
def test_runs_with_other_settings_have_no_mean(run_of_two, tmp_path, arguments, message):
    refused(
        convert_to_hugging_face,
        run_of_two(**arguments),
        f"iter_0000001 and iter_0000002 were .*{message}",
        tmp_path=tmp_path,
        average=(1, 2),
    )


def test_iterations_with_other_tensors_have_no_mean(run_of_two, tmp_path):
    path = run_of_two() / "iter_0000002/.metadata"
    metadata = pickle.loads(path.read_bytes())
    key = "decoder.layers.mlp.linear_fc2.weight"
    metadata.state_dict_metadata[key].size = torch.Size([4, 64, 95])
    path.write_bytes(pickle.dumps(metadata))
    refused(
        convert_to_hugging_face,
        tmp_path / "run",
        rf"{key} is .*64, 96.* in iter_0000001, .*64, 95.* in iter_0000002",
        tmp_path=tmp_path,
        average=(1, 2),
    )


def test_the_folder_of_one_iteration_is_that_iteration(run_of_two, tmp_path):
    folder = run_of_two() / "iter_0000002"
    convert_to_hugging_face(folder, tmp_path / "out", iteration=2, progress=False)
    shutil.rmtree(tmp_path / "out")
    refused(
        convert_to_hugging_face,
        folder,
        "is the folder of one iteration, and not of 1",
        tmp_path=tmp_path,
        iteration=1,
    )


@pytest.mark.parametrize("there", [True, False])
def test_a_link_as_output_is_followed(copy, tmp_path, there):
    if there:
        (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    convert_to_megatron(copy / "hf", tmp_path / "link", progress=False)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target/megatron_args.txt").is_file()


def test_a_mount_point_is_refused_before_anything_is_written(copy):
    with pytest.raises(UserError, match="is a mount point"):
        convert_to_megatron(copy / "hf", "/proc", progress=False)


def test_a_folder_that_a_killed_run_left_is_mentioned(copy, tmp_path, caplog):
    (tmp_path / ".out.partial-1").mkdir()
    convert_to_megatron(copy / "hf", tmp_path / "out", progress=False)
    assert ".out.partial-1 was left" in caplog.text
    assert (tmp_path / ".out.partial-1").is_dir()


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_shard_size_that_is_none_is_refused(copy, tmp_path, size):
    from megatron_anchor.checkpoint.cli_to_hugging_face import main

    flags = ["--megatron", str(copy / "megatron"), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="--max-shard-size"):
        main([*flags, "--max-shard-size", size])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, expected at most 10000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings 1000000000000, expected"),
        ({"dtype": "evil; rm"}, "dtype 'evil; rm', expected one of auto, bfloat16"),
        ({"torch_dtype": 7}, "torch_dtype '7', expected one of"),
    ],
)
def test_values_that_no_model_has_are_refused_at_once(copy, tmp_path, change, said):
    change_config(copy / "hf", **change)
    refused(convert_to_megatron, copy / "hf", said, tmp_path=tmp_path)


def test_a_config_with_a_byte_order_mark_is_read(copy, tmp_path):
    path = copy / "hf/config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    convert_to_megatron(copy / "hf", tmp_path / "out", progress=False)


def test_a_circle_of_links_is_refused(copy, tmp_path):
    (copy / "hf/vocab.json").symlink_to("vocab.json")
    refused(convert_to_megatron, copy / "hf", "vocab.json leads nowhere", tmp_path=tmp_path)


def test_a_bad_byte_in_a_large_header_is_told_shortly(copy, tmp_path):
    path = sorted((copy / "hf").glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[20] = 0xFF
    path.write_bytes(data)
    said = refused(convert_to_megatron, copy / "hf", "header is malformed", tmp_path=tmp_path)
    assert len(said) < len(str(path)) + 200
    assert "byte 0xff at 12 is no UTF-8; fetch it again" in said


@pytest.mark.parametrize("gone", [True, False])
def test_a_tensor_of_all_experts_must_be_there_and_whole(gone, tmp_path):
    from safetensors.torch import load_file, save_file

    hugging_face_model("gpt-oss").save_pretrained(tmp_path / "hf")
    path, name = tmp_path / "hf/model.safetensors", "model.layers.1.mlp.experts.gate_up_proj"
    weights = load_file(path)
    tensor = weights.pop(name)
    if not gone:
        weights[name] = tensor[:3].contiguous()
    save_file(weights, path)
    said = f"lack {name}" if gone else f"{name} has shape .*expected 4 experts in front"
    refused(convert_to_megatron, tmp_path / "hf", said, tmp_path=tmp_path)
