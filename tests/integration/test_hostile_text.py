"""Files named and filled by an attacker: no command lets a control character through."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_anchor.console import main as console
from megatron_anchor.corpus import PreprocessConfig, TokenizerConfig, preprocess
from tests.conversion_models import hugging_face_model

ESCAPES = "\x1b]0;t\x07\x1b[2J\x9b1m\x7f\x85"
BIDI = "\u202e\u2066\u200f\u061c"
HOSTILE = f"a{ESCAPES}\nerror: FORGED\r\n\u2028{BIDI}z"
NAME = HOSTILE.replace("/", "")
BYTES = ("--tokenizer-type", "ByteLevelTokenizer")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shown(capsys):
    """Runs a command; gives what it printed, which has nothing but printable characters."""

    def run(*words: str | Path, code: int | None, blocks: bool = False) -> str:
        try:
            ended = console(list(map(str, words)))
        except SystemExit as stop:  # argparse
            ended = stop.code
        captured = capsys.readouterr()
        told = captured.out + captured.err
        assert code in (ended, None), told
        wrong = {c for c in told if not c.isprintable()} - {"\n"} - ({"\t"} if blocks else set())
        assert not wrong, f"{wrong} in {told!r}"
        forged = [line for line in told.split("\n") if line.startswith("error: FORGED")]
        assert bool(forged) == blocks, told
        return told

    return run


def rows(path: str, *values: dict) -> str:
    Path(path).write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def corpus(prefix: str = NAME, **more) -> str:
    source = rows(f"{prefix}.jsonl", *({"text": HOSTILE, "d": f"{HOSTILE}{n}"} for n in range(3)))
    tokenizer = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
    config = {"tokenizer": tokenizer, "domain_key": "d", "append_eod": True, "workers": 1, **more}
    preprocess(PreprocessConfig(input=(source,), output_prefix=prefix, progress=False, **config))
    return f"{prefix}_text_document"


def preprocess_words(source: str, *more: str) -> list[str]:
    words = ["preprocess", "--input", source, "--output-prefix", f"out{NAME}", "--workers", "1"]
    return [*words, *BYTES, "--no-progress", *more]  # the bar moves the cursor by itself


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ({"text": [HOSTILE, {HOSTILE: 1}]}, ()),
        ({HOSTILE: "x"}, ()),
        ({"text": "x", "d": {HOSTILE: HOSTILE}}, ("--domain-key", "d")),
        ({"text": "x"}, ("--domain-key", HOSTILE)),
        ({"text": "x", "source": HOSTILE}, ("--pretokenized", "--json-keys", "text")),
        ({"text": [1], "source": [{"end": HOSTILE}]}, ("--pretokenized", "--json-keys", "text")),
    ],
)
def test_bad_rows_are_shown_escaped(shown, row, more):
    source = rows(f"{NAME}.jsonl", row, {"text": "good", "d": HOSTILE})
    told = shown(*preprocess_words(source, *more), code=2)
    assert r"\x1b" in told
    assert r"\u202e" in told


@pytest.mark.parametrize("more", [("--json",), ()])
def test_preprocessing_shows_names_escaped(shown, more):
    folder = Path(f"folder{NAME}")
    folder.mkdir()
    rows(str(folder / f"{NAME}.jsonl"), {"text": HOSTILE, "d": HOSTILE}, {"text": 7})
    (folder / f"{NAME}.csv").touch()
    words = preprocess_words(str(folder), "--domain-key", "d", "--on-error", "skip", *more)
    told = shown(*words, code=0)
    assert r"\x1b" in told or r"\u001b" in told
    assert (".csv" in told) or "csv" in json.loads(told)["notes"][0]
    told = shown(*words, code=2)
    assert "exists; choose another" in told


def test_inputs_that_are_not_there_are_shown_escaped(shown):
    for source in (NAME, f"{NAME}*.jsonl", f"{NAME}/x.jsonl"):
        assert r"\x1b" in shown(*preprocess_words(source), code=2)
    Path(f"{NAME}.odd").touch()
    shown(*preprocess_words(f"{NAME}.odd"), code=2)
    Path("x.gz").write_bytes(b"")
    shown("preprocess", "--no-such-flag", NAME, code=2)
    shown(*preprocess_words("x.gz", "--shard", HOSTILE), code=2)
    shown(*preprocess_words("x.gz", "--workers", HOSTILE), code=2)


@pytest.mark.parametrize("name", ["tokenizer.json", "t.model", "t.tiktoken", "folder"])
def test_tokenizer_files_are_shown_escaped(shown, name):
    source = rows("in.jsonl", {"text": "x"})
    path = Path(NAME + name)
    if name == "folder":
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps({"model": {HOSTILE: HOSTILE}}))
    else:
        path.write_text(HOSTILE + "\n" + json.dumps({"model": HOSTILE}))
    words = ["preprocess", "--input", source, "--output-prefix", "out", "--no-progress"]
    kind = {"t.tiktoken": ("--tokenizer-type", "TikTokenizer")}.get(name, ())
    assert r"\x1b" in shown(*words, "--tokenizer-model", path, *kind, code=2)


def test_inspection_shows_domains_names_and_texts_escaped(shown):
    prefix = corpus()
    told = shown("inspect-corpus", prefix, code=0)
    assert told.count(r"error: FORGED\r\n") == 4, "the corpus and three domains"
    told = shown("inspect-corpus", prefix, "--json", code=0)
    assert json.loads(told)["domains"][1]["name"].startswith(HOSTILE)
    told = shown("inspect-corpus", prefix, "--document", "0", *BYTES, code=0, blocks=True)
    assert r"\x1b]0;t\x07" in told
    shown("inspect-corpus", prefix, "--document", "0", *BYTES, "--json", code=0)
    assert r"\x1b" in shown("inspect-corpus", prefix, "--document", "99", *BYTES, code=2)
    assert r"\x1b" in shown("inspect-corpus", f"none{prefix}", code=2)
    manifest = Path(f"{prefix}.manifest.json")
    content = json.loads(manifest.read_text())
    content["tokenizer"] |= {"path": HOSTILE, "fingerprint": HOSTILE}
    content["domains"][0]["documents"] = 7
    manifest.write_text(json.dumps(content))
    assert "PROBLEM: " in shown("inspect-corpus", prefix, *BYTES, code=1)
    assert r"\x1b" in shown("inspect-corpus", prefix, "--document", "0", code=2)
    manifest.write_text(json.dumps({HOSTILE: 1, "format": HOSTILE}))
    assert r"\x1b" in shown("inspect-corpus", prefix, code=2)


def test_merging_and_upsampling_show_names_escaped(shown):
    one, other = corpus(), corpus(f"b{NAME}", append_eod=False)
    like = corpus(f"c{NAME}")
    shown("merge", "--input", one, like, "--output-prefix", f"all{NAME}", "--no-progress", code=0)
    shown("merge", "--input", one, "--output-prefix", f"x{NAME}", "--json", code=0)
    for wrong in ([one, other], [one, one], [f"none{NAME}"], [f"none{NAME}*"]):
        told = shown("merge", "--input", *wrong, "--output-prefix", "y", code=2)
        assert r"\x1b" in told
    lists = f"list{NAME}.npy"
    told = shown("upsample", one, "--output", lists, code=0)
    assert told.count("FORGED") == 7, "three domains twice, and the list"
    shown("upsample", one, "--output", lists, "--overwrite", "--json", code=0)
    for more in (["--output", lists], ["--output", f"m{NAME}.npy", "--mixture", f"{HOSTILE}=1"]):
        assert r"\x1b" in shown("upsample", one, *more, code=2)


def test_packing_shows_names_and_texts_escaped(shown):
    prefix = corpus()
    words = ["inspect-packing", prefix, "--seq-length", "32", "--anchor-token-id", "256"]
    assert r"\x1b" in shown(*words, code=0)
    assert r"\x9b" in shown(*words, "--sample", "0", *BYTES, code=0)
    shown(*words, "--sample", "0", *BYTES, "--json", code=0)
    assert r"\x1b" in shown(*words[:1], f"none{prefix}", *words[2:], code=2)
    assert r"\x1b" in shown(*words, "--document-list", f"none{NAME}.npy", code=2)


def test_saved_results_are_shown_escaped(shown):
    cell = {"mean": 1.0, "std": None, "min": 1.0, "max": 1.0, "checkpoints": [1.0], "samples": 1}
    group = {
        **{"checkpoints": [HOSTILE], "sources": [HOSTILE], "scores": {HOSTILE: {"4096": cell}}},
        **{"mean": {"4096": cell}, "depths": {"50": {"4096": cell}}, "perplexity": None},
    }
    settings = {"tasks": [HOSTILE], "seq_lengths": [4096], "seed": 1, "engine": HOSTILE}
    for name, seed in (("one", 1), ("two", 2)):
        group["settings"] = [{**settings, "seed": seed, "haystack": f"{HOSTILE}{seed}"}]
        Path(name).mkdir()
        groups = {f"{HOSTILE}{name}": group}
        Path(name, "results.json").write_text(json.dumps({"groups": groups}))
    words = ["evaluate", "--plot", "one", "two", "--output-dir", f"out{NAME}"]
    told = shown(*words, code=0)
    assert r"\x1b" in told
    assert "not asked the same" in told
    written = Path(f"out{NAME}", "results.md").read_text()
    assert not [c for c in written if not c.isprintable() and c != "\n"]
    shown(*words, "--json", code=0)
    for damaged in (HOSTILE, {**group, "depths": {HOSTILE: {"4096": cell}}}):
        Path("one", "results.json").write_text(json.dumps({"groups": {HOSTILE: damaged}}))
        shown(*words, code=2)


def test_evaluation_shows_names_and_questions_escaped(shown):
    Path(NAME).mkdir()
    Path(f"{NAME}.json").write_text(json.dumps({"question": HOSTILE, "answers": [7]}))
    words = ["evaluate", "--output-dir", "out", "--checkpoints"]
    for more in (
        [NAME],
        [f"{HOSTILE}=x"],
        [f"none{NAME}"],
        [NAME, "--tasks", HOSTILE],
        [NAME, "--qa-file", f"{NAME}.json"],
        [NAME, "--haystack", f"{NAME}.json"],
        [NAME, "--first-token", HOSTILE],
    ):
        assert r"\x1b" in shown(*words, *more, code=2)
    Path(NAME, "config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    shown(*words, NAME, code=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / NAME
    hugging_face_model("llama").save_pretrained(folder)
    return folder


def test_conversion_shows_names_escaped(shown, model):
    run, back = "run", f"back{NAME}"
    refused = ["--hf", model, "--out", f"run{NAME}"]  # its name goes into a file of flags
    assert r"\x1b" in shown("convert", "to-megatron", *refused, code=2)
    shown("convert", "to-megatron", "--hf", model, "--out", run, "--no-progress", code=0)
    words = ["convert", "to-hf", "--megatron", run, "--out", back, "--no-progress"]
    assert r"\x1b" in shown(*words, "--like", model, code=0)
    shown("convert", "to-hf", "--megatron", run, "--out", f"{back}2", "--json", code=0)
    shown("convert", "verify", "--hf", model, "--megatron", run, "--no-logits", code=0)
    for words in (
        ["to-megatron", "--hf", f"none{NAME}", "--out", "x"],
        ["to-hf", "--megatron", f"none{NAME}", "--out", "x"],
        ["verify", "--hf", f"none{NAME}", "--megatron", run, "--no-logits"],
    ):
        assert r"\x1b" in shown("convert", *words, code=2)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": HOSTILE},
        {"hidden_act": HOSTILE},
        {"architectures": [HOSTILE]},
        {"hidden_size": HOSTILE},
        {"rope_scaling": {"rope_type": HOSTILE, "factor": 2.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_configs_are_shown_escaped(shown, model, change):
    copy = Path(f"copy{NAME}")
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    words = ["convert", "to-megatron", "--hf", copy, "--out", "x", "--no-progress"]
    shown(*words, code=None)
    shown("plan", "--model", copy, "--seq-length", "128", code=None)


def test_tensor_names_are_shown_escaped(shown, model):
    from safetensors.torch import load_file, save_file

    copy = Path(f"copy{NAME}")
    copy.mkdir()
    (copy / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = load_file(model / "model.safetensors")
    weights[HOSTILE] = weights["model.norm.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert r"\x1b" in shown("convert", "to-megatron", "--hf", copy, "--out", "x", code=2)


def test_planning_and_measuring_show_names_escaped(shown, model):
    words = ["plan", "--model", model, "--corpus", corpus(), "--seq-length", "128", "--gpus", "1"]
    plain = shown(*words, "--json", code=0)
    assert json.loads(plain)
    for flags in (["plan", "--model", f"none{NAME}", "--seq-length", "1"],):
        assert r"\x1b" in shown(*flags, code=2)
    assert r"\x1b" in shown("measure-drift", "--hf", f"none{NAME}", code=2)
    assert r"\x1b" in shown(HOSTILE, code=2)


def test_a_bad_batch_is_shown_escaped(capsys, monkeypatch):
    from megatron_anchor.training import bad_batch

    class Record:
        def in_words(self, most: int) -> str:
            return f"sample 1 of {NAME}: {HOSTILE}"

    monkeypatch.setattr(bad_batch.mpu, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(bad_batch.torch.distributed, "get_rank", lambda: 0)
    args = Namespace(curr_iteration=0, dump_bad_batch=None)
    monkeypatch.setattr(bad_batch, "get_args", lambda: args)
    monkeypatch.setattr(bad_batch, "_records", lambda _: [Record()])
    monkeypatch.setattr(bad_batch._watch, "origins", [bad_batch.torch.zeros(1, 2)])
    bad_batch.report(HOSTILE, fatal=True, raises=False)
    told = capsys.readouterr().err
    assert r"\x1b" in told
    assert not [c for c in told if not c.isprintable() and c != "\n"]
    assert not [line for line in told.split("\n") if line.startswith("error: FORGED")]
