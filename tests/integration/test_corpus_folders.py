"""What an input folder holds is read or listed: datasets among files, metadata, own outputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.command_line import run as run_command
from megatron_anchor.corpus import (
    PreprocessConfig,
    TokenizerConfig,
    cli_preprocess,
    preprocess,
    read_manifest,
)
from megatron_anchor.corpus.folders import contents_of
from megatron_anchor.corpus.upsampling import make_document_list
from megatron_anchor.errors import UserError
from tests.corpus_fixtures import write_jsonl

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def run(prefix: Path, *inputs: Path | str, **config):
    config = {"tokenizer": BYTES, "workers": 1, "progress": False, **config}
    return preprocess(
        PreprocessConfig(input=tuple(map(str, inputs)), output_prefix=str(prefix), **config)
    )


def save_dataset(folder: Path, texts: list[str]) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": texts}).save_to_disk(folder)


def save_splits(folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    parts = {name: Dataset.from_dict({"text": [name] * 3}) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(folder)


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with documents in files and in a dataset two levels down."""
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", ["one", "two"])
    save_dataset(folder / "more" / "saved", ["three", "four", "five"])
    (folder / "z.txt").write_text("six")
    return folder


def test_a_saved_dataset_in_a_folder_is_read(data, tmp_path):
    summary = run(tmp_path / "out", data, on_error="skip")
    assert summary.documents == [6]
    assert not summary.rejected
    paths = [Path(source["path"]).name for source in _manifest(tmp_path).sources]
    assert paths == ["a.jsonl", "saved", "z.txt"]
    assert _manifest(tmp_path).passed_over == {}


def _manifest(tmp_path):
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    return manifest


def test_a_dataset_with_splits_gives_the_one_that_is_asked_for(data, tmp_path):
    save_splits(data / "splits")
    summary = run(tmp_path / "out", data)
    assert summary.documents == [9]
    assert _manifest(tmp_path).passed_over == {"another split than --hf-split": 1}
    assert any(f"{data}/splits/test" in note for note in summary.notes)


def own_outputs(folder: Path) -> None:
    """Everything that the corpus tools write, some of it by runs that did not end well."""
    source = write_jsonl(folder.parent / "other.jsonl", ["x", 7, "y"])
    run(folder / "c", source, on_error="skip")
    make_document_list(folder / "c_text_document", folder / "list.npy")
    (folder / "dead.partial").mkdir()
    for name in ("lock", "run.json", "state.json", "0.bin"):
        (folder / "dead.partial" / name).write_text("{}")


def model(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"):
        (folder / name).write_text('{"text": "metadata"}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "model.safetensors").write_bytes(b"\x00" * 9)
    (folder / "model.safetensors.index.json").write_text('{"text": "metadata"}')
    (folder / "pytorch_model.bin").write_bytes(b"\x00" * 9)
    (folder / "megatron_args.txt").write_text("--bf16")


def training(folder: Path) -> None:
    cache = folder / "cache" / "PackedDataset_indices"
    cache.mkdir(parents=True)
    (cache / "0ab-PackedDataset-train-description.json").write_text("{}")
    (cache / "0ab-GPTDataset-train-description.txt").write_text("{}")
    np.save(cache / "0ab-offsets.npy", np.arange(3))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    np.savez(folder / "rank0.npz", tokens=np.arange(3))
    (folder / "rank0.json").write_text('{"text": "a batch"}')
    (folder / "samples").mkdir()
    (folder / "samples" / "m.jsonl").write_text('{"settings": {"seed": 1}}\n{"kind": "sample"}\n')
    (folder / "results.json").write_text('{\n "groups": {\n  "a": {}}}')


def metadata(folder: Path) -> None:
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.jsonl").write_text('{"text": "no"}')
    (folder / ".hidden.jsonl").write_text('{"text": "no"}')


def others(folder: Path) -> None:
    (folder / "table.csv").write_text("text\nno\n")
    (folder / "packed.jsonl.xz").write_bytes(b"")
    (folder / "README.md").write_text("no")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "y.jsonl").write_text('{"text": "no"}\n')
    (folder / "linked").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def inside_the_dataset(folder: Path) -> None:
    (folder / "more" / "saved" / "extra.jsonl").write_text('{"text": "no"}\n')
    (folder / "more" / "saved" / "cache-12.arrow").write_bytes(b"")


STRANGERS = [own_outputs, model, training, metadata, others, inside_the_dataset]


@pytest.mark.parametrize("make", STRANGERS)
def test_what_is_not_read_is_listed_and_counted_and_nothing_else_changes(data, tmp_path, make):
    before = {str(path) for path in data.rglob("*")}
    make(data)
    summary = run(tmp_path / "out", data)
    assert summary.documents == [6]
    counted = _manifest(tmp_path).passed_over
    assert sum(counted.values()) == len(contents_of(data, split="train").passed_over) > 0
    told = "\n".join(summary.notes)
    for path in sorted(map(str, set(data.rglob("*")) - set(map(Path, before)))):
        listed = path in told or any(str(parent) in told for parent in Path(path).parents)
        assert listed or Path(path).is_dir(), path


def test_everything_at_once_is_counted_by_reason(data, tmp_path, capsys):
    for make in STRANGERS:
        make(data)
    flags = ["--input", str(data), "--output-prefix", str(tmp_path / "out"), "--no-progress"]
    flags += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    assert run_command(cli_preprocess.main, flags) == 0
    printed = capsys.readouterr()
    assert "6 documents" in printed.out
    for why, count in _manifest(tmp_path).passed_over.items():
        assert count > 0
        assert f"note: not read ({why}): " in printed.err
    assert "table.csv" in printed.err
    assert "packed.jsonl.xz" in printed.err


def test_a_pattern_passes_the_same_files_over(data, tmp_path):
    for make in STRANGERS:
        make(data)
    summary = run(tmp_path / "out", f"{data}/**")
    assert summary.documents == [6 + 1], "a pattern follows links, as it does in a shell"
    summary = run(tmp_path / "out", f"{data}/*", overwrite=True)
    assert summary.documents == [3], "the dataset lies in a folder that the pattern only names"
    assert any(str(data / "more") in note for note in summary.notes)


@pytest.mark.parametrize(
    "name",
    [
        "c_text_document.manifest.json",
        "c_text_document.bin",
        "c_text_document.domains.npy",
        "c.rejected.jsonl",
        "list.json",
        "more/saved/dataset_info.json",
        "more/saved/state.json",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "rank0.json",
    ],
)
def test_naming_such_a_file_is_refused(data, tmp_path, name):
    for make in STRANGERS:
        make(data)
    with pytest.raises(UserError, match="holds no documents; leave it out"):
        run(tmp_path / "out", data / name)


def test_documents_that_look_a_little_like_outputs_are_read(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, row in {
        "train.manifest.json": {"text": "a", "format": "mine"},
        "rejected.jsonl": {"text": "a", "file": "f", "row": 1, "reason": "r"},
        "settings.jsonl": {"settings": "a", "text": "b"},
        "results.json": {"text": "a", "groups": {"x": 1}},
    }.items():
        (folder / name).write_text(json.dumps(row) + "\n")
    assert run(tmp_path / "out", folder).documents == [4]


def test_a_folder_without_documents_says_what_it_holds(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(UserError, match="it is empty"):
        run(tmp_path / "out", folder)
    (folder / "a.csv").write_text("text")
    with pytest.raises(UserError, match=r"no kind of file that is read\): .*a\.csv"):
        run(tmp_path / "out", folder)
    with pytest.raises(UserError, match=r"no kind of file that is read\): .*a\.csv"):
        run(tmp_path / "out", f"{folder}/*")
    (folder / "dataset_dict.json").write_text("no JSON")
    with pytest.raises(UserError, match="is no readable saved dataset"):
        run(tmp_path / "out", folder)


def test_a_format_that_is_given_serves_files_whose_names_do_not_tell(tmp_path):
    (tmp_path / "a.log").write_text('{"text": "one"}\n')
    (tmp_path / "a.bin").write_bytes(b"\x00")
    summary = run(tmp_path / "out", f"{tmp_path}/a.*", input_format="jsonl")
    assert summary.documents == [1]
    assert any("a.bin" in note for note in summary.notes)
