"""Hugging Face -> Megatron -> Hugging Face: every bit comes back."""

import json

import pytest
import torch

from megatron_anchor.checkpoint import families, torch_dist_writer
from megatron_anchor.checkpoint.rows import Files, read_tensor
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import convert_to_megatron
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint, iteration_folder
from tests.conversion_models import MODELS, hugging_face_model, weights_of

QUIET = {"progress": False}


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    hugging_face_model("llama", dtype=torch.bfloat16).save_pretrained(folder / "hf")
    convert_to_megatron(folder / "hf", folder / "megatron", **QUIET)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_family_comes_back_bit_for_bit(name, tmp_path):
    model = hugging_face_model(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    convert_to_hugging_face(
        tmp_path / "megatron",
        tmp_path / "back",
        like=tmp_path / "hf",
        shard_bytes=100_000,
        **QUIET,
    )
    assert_same_bits(weights_of(tmp_path / "hf"), weights_of(tmp_path / "back"))
    back = type(model).from_pretrained(tmp_path / "back", dtype="auto")
    assert_same_bits(model.state_dict(), back.state_dict())
    for key in (*MODELS[name][1], "rope_parameters", "vocab_size", "rms_norm_eps"):
        assert getattr(back.config, key) == getattr(model.config, key), key


def test_the_index_leads_to_every_tensor(tmp_path):
    model = hugging_face_model("qwen3")
    model.save_pretrained(tmp_path / "hf")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    done = convert_to_hugging_face(
        tmp_path / "megatron", tmp_path / "back", shard_bytes=100_000, **QUIET
    )
    assert len(done.files) > 3
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    weights = weights_of(tmp_path / "back")
    assert set(index["weight_map"]) == set(weights)
    assert set(index["weight_map"].values()) == set(done.files)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in weights.values())


def test_without_like_the_family_is_known_by_its_weights(tmp_path, llama):
    convert_to_hugging_face(llama / "megatron", tmp_path / "back", **QUIET)
    assert_same_bits(weights_of(llama / "hf"), weights_of(tmp_path / "back"))


def test_another_dtype_is_torchs_own_conversion(tmp_path, llama):
    convert_to_megatron(llama / "hf", tmp_path / "megatron", dtype=torch.float32, **QUIET)
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "wide", **QUIET)
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "half", dtype=torch.float16, **QUIET)
    given = weights_of(llama / "hf")
    assert_same_bits({k: v.float() for k, v in given.items()}, weights_of(tmp_path / "wide"))
    assert_same_bits({k: v.float().half() for k, v in given.items()}, weights_of(tmp_path / "half"))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"


def test_an_average_is_the_mean_in_float64(tmp_path):
    seeds = (1, 2, 3)
    for seed in seeds:
        hugging_face_model("qwen2", seed=seed).save_pretrained(tmp_path / f"hf{seed}")
        convert_to_megatron(tmp_path / f"hf{seed}", tmp_path / f"m{seed}", **QUIET)
        folder = tmp_path / "run" / f"iter_{seed:07d}"
        folder.parent.mkdir(exist_ok=True)
        (tmp_path / f"m{seed}" / "release").rename(folder)
    convert_to_hugging_face(tmp_path / "run", tmp_path / "mean", average=seeds, **QUIET)
    given = [weights_of(tmp_path / f"hf{seed}") for seed in seeds]
    mean = {k: torch.stack([g[k].double() for g in given]).mean(0).float() for k in given[0]}
    found = weights_of(tmp_path / "mean")
    for name, tensor in mean.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9)


def test_pickled_weights_are_read_as_well(tmp_path, llama):
    weights = weights_of(llama / "hf")
    source = tmp_path / "hf"
    source.mkdir()
    names = sorted(weights)
    halves = {"pytorch_model-00001-of-00002.bin": names[::2]}
    halves["pytorch_model-00002-of-00002.bin"] = names[1::2]
    for file, tensors in halves.items():
        torch.save({name: weights[name] for name in tensors}, source / file)
    index = {"weight_map": {name: file for file, tensors in halves.items() for name in tensors}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "config.json").write_bytes((llama / "hf" / "config.json").read_bytes())
    convert_to_megatron(source, tmp_path / "megatron", **QUIET)
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "back", **QUIET)
    assert_same_bits(weights, weights_of(tmp_path / "back"))


def test_buffers_of_old_checkpoints_are_named_and_left_out(tmp_path, llama):
    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**weights_of(llama / "hf"), buffer: torch.ones(4)}, source / "model.safetensors")
    (source / "config.json").write_bytes((llama / "hf" / "config.json").read_bytes())
    done = convert_to_megatron(source, tmp_path / "megatron", **QUIET)
    assert list(done.not_carried) == [buffer]


@pytest.mark.parametrize("form", ["layers one by one", "local names"])
def test_other_forms_of_a_checkpoint_are_read_too(form, tmp_path, llama):
    """Runs with unequal layers store each for itself; another layer spec names norms otherwise."""
    original = iteration_folder(llama / "megatron")
    with Files() as files, torch_dist_writer.TorchDistWriter(tmp_path / "m") as writer:
        checkpoint = TorchDistCheckpoint(original, files)
        for rule in families.FAMILIES["LlamaForCausalLM"].rules:
            if rule.keys[0] not in checkpoint.tensors():
                continue
            shape, dtype = checkpoint.tensors()[rule.keys[0]]
            name = rule.alias if form == "local names" and rule.alias else rule.megatron
            for index in range(shape[0] if rule.axes else 1):
                place = (index,) if rule.axes else ()
                tensor = read_tensor(checkpoint.rows(rule.keys[0], place))
                one_by_one = form == "layers one by one"
                key = name.replace("{layer}", str(index)) if one_by_one else families.stacked(name)
                writer.add_chunk(
                    key,
                    [tensor.view(torch.uint8).numpy()],
                    index=() if one_by_one else place,
                    stack=() if one_by_one else shape[: len(place)],
                    shape=tensor.shape,
                    dtype=dtype,
                )
        writer.add_object("common_state", checkpoint.common_state())
        writer.finish()
        keys = TorchDistCheckpoint(tmp_path / "m", files).tensors()
    expected = "decoder.layers.3.mlp.linear_fc2.weight"
    assert (
        expected if form == "layers one by one" else "decoder.layers.input_layernorm.weight"
    ) in keys
    convert_to_hugging_face(tmp_path / "m", tmp_path / "back", **QUIET)
    assert_same_bits(weights_of(llama / "hf"), weights_of(tmp_path / "back"))


def test_a_chunk_is_what_torch_save_would_have_written(llama):
    """Megatron and torch read the archives by torch.load; the tensors are the rows' bits."""
    from torch.distributed.checkpoint import FileSystemReader

    folder = iteration_folder(llama / "megatron")
    metadata = FileSystemReader(folder).read_metadata()
    seen = 0
    with Files() as files:
        checkpoint = TorchDistCheckpoint(folder, files)
        for index, info in metadata.storage_data.items():
            if index.offset is None:
                continue
            data = (folder / info.relative_path).read_bytes()[info.offset :][: info.length]
            (folder.parent / "chunk.pt").write_bytes(data)
            tensor = torch.load(folder.parent / "chunk.pt", weights_only=True)
            shape, _ = checkpoint.tensors()[index.fqn]
            axes = len(shape) - (1 if "norm" in index.fqn else 2)
            rows = checkpoint.rows(index.fqn, tuple(index.offset)[:axes])
            assert torch.equal(tensor.view(rows.shape), read_tensor(rows))
            seen += 1
    assert seen == 3 + 6 * 4


def test_the_filling_of_the_vocabulary_is_zero(llama):
    with Files() as files:
        checkpoint = TorchDistCheckpoint(iteration_folder(llama / "megatron"), files)
        embedding = read_tensor(checkpoint.rows("embedding.word_embeddings.weight", ()))
    assert embedding.shape[0] == 256
    assert embedding[:131].abs().sum() > 0
    assert embedding[131:].abs().sum() == 0


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "qwen3 moe"])
def test_the_layer_spec_of_transformer_engine_gets_its_names_and_states(name, tmp_path):
    """Its separate norms ask for states, and the norm in front of experts has its own name."""
    from torch.distributed.checkpoint import FileSystemReader

    hugging_face_model(name).save_pretrained(tmp_path / "hf")
    convert_to_megatron(
        tmp_path / "hf", tmp_path / "megatron", target="transformer_engine", **QUIET
    )
    names = FileSystemReader(tmp_path / "megatron/release").read_metadata().state_dict_metadata
    assert "decoder.final_layernorm._extra_state/shard_0_1" in names
    assert ("decoder.layers.self_attention.q_layernorm._extra_state/shard_3_4" in names) == (
        "qwen3" in name
    )
    assert ("decoder.layers.pre_mlp_layernorm.weight" in names) == (name != "qwen3")
    assert ("decoder.layers.mlp.linear_fc1.layer_norm_weight" in names) == (name == "qwen3")
    experts = "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.3_4.4"
    assert (experts in names) == (name != "qwen3")
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "back", **QUIET)
    assert_same_bits(weights_of(tmp_path / "hf"), weights_of(tmp_path / "back"))


def test_both_ways_of_opening_an_archive_find_the_same_places(tmp_path, monkeypatch):
    from megatron_anchor.checkpoint import archives

    torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5).half()}, tmp_path / "x.bin")
    quick = archives.pickled_extents(tmp_path / "x.bin")
    monkeypatch.setattr(archives, "_meta_tensors_know_their_place", lambda: False)
    assert archives.pickled_extents(tmp_path / "x.bin") == quick
    data = (tmp_path / "x.bin").read_bytes()
    assert torch.frombuffer(bytearray(data[quick["a"].offset :][:24]), dtype=torch.float32)[5] == 5


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3 moe"])
def test_what_like_says_of_things_without_effect_is_kept(name, tmp_path):
    hugging_face_model(name).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    if name == "llama":
        config["head_dim"] = None
    if name == "qwen2":
        config["max_window_layers"] = 2
    path.write_text(json.dumps(config))
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    convert_to_hugging_face(tmp_path / "megatron", tmp_path / "back", **QUIET)
    back = json.loads((tmp_path / "back/config.json").read_text())
    for key in ("head_dim", "intermediate_size", "max_window_layers"):
        assert back.get(key, "none") == config.get(key, "none"), key


def test_a_moved_conversion_stays_its_family_and_the_note_names_what_is_gone(tmp_path):
    from tokenizers import Tokenizer, models

    hugging_face_model("mistral").save_pretrained(tmp_path / "hf")
    words = {f"t{i}": i for i in range(131)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "hf/additional_chat_templates").mkdir()
    (tmp_path / "hf/additional_chat_templates/tool.jinja").write_text("x")
    (tmp_path / "hf/tekken.json").write_text("{}")
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **QUIET)
    (tmp_path / "megatron").rename(tmp_path / "moved")
    done = convert_to_hugging_face(tmp_path / "moved", tmp_path / "back", **QUIET)
    assert done.model.family == "MistralForCausalLM"
    assert f"{tmp_path / 'megatron/hugging_face'} is no longer there" in done.notes[0]
    for name in ("tokenizer.json", "tekken.json", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "back" / name).is_file()
    path = tmp_path / "moved/hugging_face/config.json"
    path.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    done = convert_to_hugging_face(tmp_path / "moved", tmp_path / "other", **QUIET)
    assert "unknown architecture 'GPT2LMHeadModel'" in done.notes[2]
    assert (tmp_path / "other/tokenizer.json").is_file()
    path.unlink()
    done = convert_to_hugging_face(tmp_path / "moved", tmp_path / "plain", **QUIET)
    assert "is no longer there" in done.notes[0]
    assert "exported as LlamaForCausalLM" in done.notes[1]
