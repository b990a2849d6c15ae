"""Weights through the whole pipeline: read, resumed, sharded, merged, inspected, replaced."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.corpus import IndexedCorpus, PreprocessConfig, TokenizerConfig, preprocess
from megatron_anchor.corpus.cli_inspect import main as inspect
from megatron_anchor.corpus.cli_merge import main as merge
from megatron_anchor.corpus.cli_preprocess import main as tool
from megatron_anchor.corpus.inspection import inspect_corpus, weights_of_document
from megatron_anchor.corpus.merge import merge_corpora
from megatron_anchor.corpus.output import CorpusOutput
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.weights import TargetWeights
from tests.chat_fixtures import REWRITES, chat_tokenizer, talk, word_tokenizer, write_rows
from tests.corpus_fixtures import copied, corpus_files, texts
from tests.unit.packing_oracle import build_train
from tests.unit.test_corpus_chat import WORDS

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99, eod_id=98)


def chats(tmp_path: Path, count: int = 60) -> Path:
    """Real texts as conversations of one to four turns, some with literal control tokens."""
    chance, source = random.Random(3), texts()
    rows = []
    for number in range(count):
        turns = chance.randint(1, 4)
        contents = [chance.choice(source)[: chance.randint(1, 900)] for _ in range(2 * turns)]
        if number % 7 == 0:
            contents[0] += "<|im_end|>"
        system = "be brief" if number % 3 else None
        rows.append({"messages": talk(*contents, system=system), "d": f"d{number % 4}"})
    return write_rows(tmp_path / "chats.jsonl", rows)


def config(tmp_path: Path, name: str, source: Path, **changes) -> PreprocessConfig:
    plain = {
        "input": (str(source),),
        "output_prefix": str(tmp_path / name),
        "tokenizer": TokenizerConfig(tokenizer_model=str(chat_tokenizer())),
        "chat": True,
        "json_keys": ("messages",),
        "workers": 1,
        "progress": False,
    }
    return PreprocessConfig(**{**plain, **changes})


def weighted(tmp_path: Path, name: str, rows, **changes) -> Path:
    """A corpus of numbers with a weight of its own for each row."""
    source = write_rows(tmp_path / f"{name}.jsonl", rows)
    plain = {"chat": False, "json_keys": ("text",), "tokenizer": NUMBERS, "weight_key": "w"}
    preprocess(config(tmp_path, name, source, **{**plain, **changes}))
    return tmp_path / f"{name}_{changes.get('json_keys', ('text',))[0]}_document"


def documents(prefix: Path) -> list[tuple[list[int], list[float]]]:
    corpus = IndexedCorpus.open(prefix)
    return [
        (corpus.document(n).tolist(), weights_of_document(corpus, n).tolist())
        for n in range(len(corpus))
    ]


# --- the fact sheet's values through the tool -----------------------------------------------------


def test_the_command_writes_ids_and_weights_of_conversations(tmp_path, capsys):
    source = write_rows(tmp_path / "a.jsonl", [{"messages": talk("5 6", "7 8")}])
    flags = ["--chat", "--input", str(source), "--output-prefix", str(tmp_path / "a"), "--json"]
    flags += ["--tokenizer-model", str(word_tokenizer(WORDS)), "--workers", "1", "--append-eod"]
    assert tool(flags) == 0
    summary = json.loads(capsys.readouterr().out)
    prefix = tmp_path / "a_messages_document"
    assert summary["prefixes"] == [str(prefix)]
    assert summary["weighted_tokens"] == [3]
    assert summary["conversations"] == {"answers": 1, "conversations": 1}
    assert documents(prefix) == [([5, 6, 9, 7, 8, 9], [0, 0, 0, 1, 1, 1])]
    assert Path(f"{prefix}.weights.bin").read_bytes() == bytes([0, 0, 0, 1, 1, 1])


def test_a_conversation_is_packed_with_the_labels_and_the_mask_that_were_worked_by_hand(tmp_path):
    """From the command's files to a sample: anchor 1, and the eos is the pad."""
    tokenizer = TokenizerConfig(tokenizer_model=str(word_tokenizer(WORDS)))
    source = write_rows(tmp_path / "a.jsonl", [{"messages": talk("5 6", "7 8")}])
    preprocess(config(tmp_path, "a", source, tokenizer=tokenizer, append_eod=True))
    [sample] = build_train(str(tmp_path / "a_messages_document"), sequence_length=7)
    assert sample["labels"].tolist()[:6] == [5, 6, 9, 7, 8, 9]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_two_answers_have_two_stop_tokens_as_targets_in_a_sample(tmp_path):
    tokenizer = TokenizerConfig(tokenizer_model=str(word_tokenizer(WORDS)))
    source = write_rows(tmp_path / "a.jsonl", [{"messages": talk("2", "3", "4", "5", system="6")}])
    preprocess(config(tmp_path, "a", source, tokenizer=tokenizer))
    [sample] = build_train(str(tmp_path / "a_messages_document"), sequence_length=12)
    weights = [w for i, w in zip(sample["labels"], sample["loss_mask"], strict=True) if i == 9]
    assert [float(w) for w in weights] == [0, 0, 1, 0, 1]
    assert sample["loss_mask"].sum() == 4


def test_rows_of_megatron_s_sft_files_become_a_document_each_conversation(tmp_path):
    packed = [*talk("1", "2", system="0"), *talk("3", "4", "5", "6", system="0")]
    rows = [{"messages": packed}, {"messages": talk("7", "8")}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    tokenizer = TokenizerConfig(tokenizer_model=str(word_tokenizer(WORDS)))
    summary = preprocess(config(tmp_path, "a", source, tokenizer=tokenizer))
    assert summary.conversations == {"answers": 4, "conversations": 3, "rows_of_several": 1}
    assert documents(tmp_path / "a_messages_document") == [
        ([0, 9, 1, 9, 2, 9], [0, 0, 0, 0, 1, 1]),
        ([0, 9, 3, 9, 4, 9, 5, 9, 6, 9], [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]),
        ([7, 9, 8, 9], [0, 0, 1, 1]),
    ]


def test_bad_rows_are_refused_or_listed_whole(tmp_path):
    rows = [
        {"messages": talk("a", "b")},
        {"messages": talk("a")},
        {"messages": talk("a", "b") + talk("c", system="s")},  # its first conversation is good
        {"text": "x"},
        {"messages": talk(*"cdef")},
    ]
    source = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"a\.jsonl:2: no assistant turn: 'messages': messages 1"):
        preprocess(config(tmp_path, "a", source))
    summary = preprocess(config(tmp_path, "a", source, on_error="skip", overwrite=True))
    assert summary.documents == [2]
    assert summary.rejected == {"missing key": 1, "no assistant turn": 2}
    assert summary.rows_read == 5
    tokenizer = TokenizerConfig(tokenizer_model=str(chat_tokenizer(REWRITES)))
    changes = {"tokenizer": tokenizer, "on_error": "skip"}
    summary = preprocess(config(tmp_path, "b", source, **changes))
    assert summary.rejected["history is rewritten"] == 1
    listed = [json.loads(line) for line in (tmp_path / "b.rejected.jsonl").open()]
    assert json.loads(listed[-1]["raw"]) == rows[-1]


@pytest.mark.parametrize("kind", ["parquet", "dataset", "json", "gz"])
def test_conversations_of_every_kind_of_input(tmp_path, kind):
    import gzip

    source = chats(tmp_path, 20)
    rows = [json.loads(line) for line in source.open()]
    preprocess(config(tmp_path, "plain", source))
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        other = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist(rows), other)
    elif kind == "dataset":
        from datasets import Dataset

        other = tmp_path / "saved"
        Dataset.from_list(rows).save_to_disk(other)
    elif kind == "json":
        other = tmp_path / "x.json"
        other.write_text(json.dumps(rows))
    else:
        other = tmp_path / "x.jsonl.gz"
        other.write_bytes(gzip.compress(source.read_bytes()))
    preprocess(config(tmp_path, "other", other))
    ours, theirs = (corpus_files(tmp_path / name) for name in ("plain", "other"))
    for ending in ("bin", "idx", "weights.bin", "weights.json"):
        assert ours[f"_messages_document.{ending}"] == theirs[f"_messages_document.{ending}"]


# --- weights that rows bring ---------------------------------------------------------------------


def test_weights_of_documents_and_of_tokens(tmp_path):
    rows = [{"text": "1 2 3", "w": 0.5}, {"text": "4 5", "w": [0, 2]}, {"text": "6", "w": 1}]
    prefix = weighted(tmp_path, "a", rows, append_eod=True)
    assert documents(prefix) == [
        ([1, 2, 3, 98], [0.5] * 4),
        ([4, 5, 98], [0, 2, 2]),
        ([6, 98], [1, 1]),
    ]
    assert TargetWeights.open(prefix).manifest.weight_sum == 8.0


def test_weights_of_pretokenized_rows_are_cut_with_their_spans(tmp_path):
    spans = [{"source": "a", "start": 0, "end": 2}, {"source": "b", "start": 2, "end": 3}]
    rows = [
        {"input_ids": [1, 2, 3], "source": spans, "w": [1, 0, 3]},
        {"input_ids": [4], "source": None, "w": 2},
    ]
    changes = {"json_keys": ("input_ids",), "pretokenized": True}
    prefix = weighted(tmp_path, "a", rows, **changes)
    assert documents(prefix) == [([1, 2], [1, 0]), ([3], [3]), ([4], [2])]


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_the_dtype_is_what_is_asked_for(tmp_path, dtype):
    prefix = weighted(tmp_path, "a", [{"text": "1 2", "w": [3, 1]}], weight_dtype=dtype)
    path = Path(f"{prefix}.weights.bin")
    assert np.fromfile(path, dtype=dtype).tolist() == [3, 1]
    assert TargetWeights.open(prefix).manifest.dtype == dtype


WRONG = {
    "missing": ({"text": "1"}, {}, "missing key: no 'w'"),
    "text": ({"text": "1", "w": "1"}, {}, "holds '1' at place 0, which is no number"),
    "boolean": ({"text": "1", "w": True}, {}, "True at place 0, which is no number"),
    "null": ({"text": "1", "w": [None]}, {}, "None at place 0"),
    "negative": ({"text": "1 2", "w": [1, -2]}, {}, "holds -2 at place 1, expected 0 to 1024"),
    "NaN": ({"text": "1", "w": float("nan")}, {}, "holds nan at place 0, expected"),
    "huge": ({"text": "1", "w": 10**30}, {}, "expected 0 to 1024; only ratios matter"),
    "short": ({"text": "1 2", "w": [1]}, {}, "has 1 weights, and the document 2 tokens"),
    "empty": ({"text": "1 2", "w": []}, {}, "has 0 weights"),
    "sequences": ({"text": ["1", "2"], "w": [1, 1]}, {}, "the document has 2 sequences"),
    "fraction": ({"text": "1", "w": 0.5}, {"weight_dtype": "uint8"}, "0.5, which uint8 cannot"),
    "over 255": ({"text": "1", "w": 256}, {"weight_dtype": "uint8"}, "256, which uint8 cannot"),
    "tiny": ({"text": "1", "w": 1e-9}, {"weight_dtype": "float16"}, "1e-09, which float16 cannot"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_with_wrong_weights_are_bad_rows(tmp_path, case):
    row, changes, message = WRONG[case]
    good = {"text": "7", "w": 1}
    with pytest.raises(UserError, match=message) as caught:
        weighted(tmp_path, "a", [good, row], **changes)
    assert "a.jsonl:2: " in str(caught.value)
    prefix = weighted(tmp_path, "b", [good, row, good], on_error="skip", **changes)
    assert [ids for ids, _ in documents(prefix)] == [[7], [7]]


def test_several_keys_have_weights_each_and_number_weights_go_to_sentences(tmp_path):
    rows = [{"text": "1 2", "more": "3", "w": 2}, {"text": "", "more": "4", "w": 3}]
    weighted(tmp_path, "a", rows, json_keys=("text", "more"))
    assert documents(tmp_path / "a_text_document") == [([1, 2], [2, 2]), ([], [])]
    assert documents(tmp_path / "a_more_document") == [([3], [2]), ([4], [3])]


def test_a_corpus_of_which_nothing_is_learned_is_refused(tmp_path):
    with pytest.raises(UserError, match="all 3 tokens of 'text' have the weight 0"):
        weighted(tmp_path, "a", [{"text": "1 2", "w": 0}, {"text": "3", "w": [0]}])
    assert not list(tmp_path.glob("a_*"))
    assert not (tmp_path / "a.partial").exists()


FLAGS = {
    ("--chat", "--pretokenized"): "--chat does not go with --pretokenized: a row holds messages",
    ("--chat", "--split-sentences"): "--chat does not go with --split-sentences",
    ("--chat", "--weight-key", "w"): "--chat does not go with --weight-key: the answers weigh 1",
    ("--chat", "--engine", "gigatoken"): "does not say where in a text",
    ("--chat", "--json-keys", "a", "b"): "one key, not of a, b",
    (
        "--chat",
        "--max-conversation-tokens",
        "0",
    ): "--max-conversation-tokens 0: expected at least 1",
}


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags):
    words = ["--input", "x.jsonl", "--output-prefix", str(tmp_path / "a"), *flags]
    with pytest.raises(UserError, match=FLAGS[flags]):
        tool([*words, "--tokenizer-type", "ByteLevelTokenizer"])


def test_flags_without_effect_are_told(tmp_path):
    changes = {"weight_key": None, "weight_dtype": "uint8", "max_conversation_tokens": 7}
    source = write_rows(tmp_path / "a.jsonl", [{"text": "1"}])
    plain = {"chat": False, "json_keys": ("text",), "tokenizer": NUMBERS}
    notes = preprocess(config(tmp_path, "a", source, **plain, **changes)).notes
    assert "--weight-dtype has no effect without --weight-key" in notes
    assert "--max-conversation-tokens has no effect without --chat" in notes


# --- kills, workers, shards, merges ---------------------------------------------------------------


def test_kill_9_then_resume_gives_the_same_bytes(tmp_path):
    source = chats(tmp_path, 300)
    preprocess(config(tmp_path, "whole", source, append_eod=True))
    expected = corpus_files(tmp_path / "whole")
    flags = ["--chat", "--input", str(source), "--tokenizer-model", str(chat_tokenizer())]
    flags += ["--output-prefix", str(tmp_path / "out"), "--append-eod", "--workers", "1"]
    flags += ["--chunk-kb", "4", "--checkpoint-seconds", "0", "--no-progress"]
    chance, kills = random.Random(5), 0
    for attempt in range(8):
        more = ["--resume"] if (tmp_path / "out.partial").exists() else []
        process = subprocess.Popen([sys.executable, str(TOOL), *flags, *more])
        state = tmp_path / "out.partial" / "state.json"
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None:
            if state.exists() and state.stat().st_mtime_ns != before:
                break  # it writes now
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        if attempt < 3:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
    assert process.returncode == 0
    assert kills >= 2, "the run was never killed at work, so this test proved nothing"
    assert corpus_files(tmp_path / "out") == expected


def test_stopped_after_any_chunk_the_weights_are_cut_back(tmp_path, monkeypatch):
    source = chats(tmp_path, 40)
    preprocess(config(tmp_path, "whole", source))
    append, count = CorpusOutput.append, 0

    def stop_soon(self, *arguments, **keywords):
        nonlocal count
        append(self, *arguments, **keywords)
        count += 1
        if count % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(CorpusOutput, "append", stop_soon)
    changes = {"chunk_kb": 4, "checkpoint_seconds": 1e9}  # no checkpoint but the first: all is cut
    with pytest.raises(KeyboardInterrupt):
        preprocess(config(tmp_path, "out", source, **changes))
    assert (tmp_path / "out.partial" / "0.weights.bin").stat().st_size
    monkeypatch.setattr(CorpusOutput, "append", append)
    preprocess(config(tmp_path, "out", source, resume=True))
    assert corpus_files(tmp_path / "out") == corpus_files(tmp_path / "whole")
    again = preprocess(config(tmp_path, "out", source, resume=True))
    assert again.notes == ["the corpus was finished already; nothing was done"]
    assert again.weighted_tokens[0] > 0
    Path(f"{tmp_path}/out_messages_document.weights.bin").unlink()
    with pytest.raises(UserError, match=r"weights\.bin is missing beside what was finished"):
        preprocess(config(tmp_path, "out", source, resume=True))


@pytest.mark.parametrize("change", [{"workers": 2}, {"chunk_kb": 4}], ids=str)
def test_workers_and_chunks_change_no_byte(tmp_path, change):
    source = chats(tmp_path, 40)
    preprocess(config(tmp_path, "a", source))
    (tmp_path / "b").mkdir()
    preprocess(config(tmp_path / "b", "a", source, **change))
    assert corpus_files(tmp_path / "a") == corpus_files(tmp_path / "b" / "a")


def test_another_template_is_another_run(tmp_path):
    from tests.chat_fixtures import LLAMA

    source = chats(tmp_path, 5)
    preprocess(config(tmp_path, "a", source))
    file = tmp_path / "llama.jinja"
    file.write_text(LLAMA)
    preprocess(config(tmp_path, "b", source, chat_template=str(file)))
    with pytest.raises(UserError, match=r"made otherwise.*conversations template"):
        preprocess(config(tmp_path, "a", source, chat_template=str(file), resume=True))
    parts = [tmp_path / f"{name}_messages_document" for name in "ab"]
    with pytest.raises(UserError, match="has conversations "):
        merge_corpora(parts, tmp_path / "all", progress=False)


def test_shards_merged_are_the_bytes_of_one_run(tmp_path):
    source = chats(tmp_path, 30)
    changes = {"domain_key": "d"}
    preprocess(config(tmp_path, "whole", source, **changes))
    for number in range(3):
        preprocess(config(tmp_path, f"part{number}", source, shard=f"{number}/3", **changes))
    flags = ["--input", str(tmp_path / "part*_messages_document"), "--no-progress"]
    assert merge([*flags, "--output-prefix", str(tmp_path / "all")]) == 0
    whole, merged = (
        corpus_files(tmp_path / "whole_messages_document"),
        corpus_files(tmp_path / "all"),
    )
    assert merged == whole
    assert inspect([str(tmp_path / "all")]) == 0


def test_empty_shards_merge_too(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"messages": talk("a", "b")}])
    preprocess(config(tmp_path, "whole", source))
    for number in range(3):
        preprocess(config(tmp_path, f"part{number}", source, shard=f"{number}/3"))
    parts = [tmp_path / f"part{number}_messages_document" for number in range(3)]
    merge_corpora(parts, tmp_path / "all", progress=False)
    assert corpus_files(tmp_path / "all") == corpus_files(tmp_path / "whole_messages_document")


def test_shards_of_zeros_are_refused_when_they_are_joined(tmp_path):
    rows = [{"text": "1", "w": 0}, {"text": "2", "w": 0}]
    parts = [weighted(tmp_path, f"p{n}", rows, shard=f"{n}/2") for n in range(2)]
    assert [TargetWeights.open(part).manifest.weighted_tokens for part in parts] == [0, 0]
    with pytest.raises(UserError, match="weights are 0, so there is nothing to learn"):
        merge_corpora(parts[:1], tmp_path / "all", allow_missing_shards=True, progress=False)
    assert not list(tmp_path.glob("all*"))


def test_parts_with_and_without_weights_are_not_merged(tmp_path):
    rows = [{"text": "1 2", "w": 2}]
    a = weighted(tmp_path, "a", rows)
    b = weighted(tmp_path, "b", rows, weight_key=None)
    c = weighted(tmp_path, "c", rows, weight_dtype="float16")
    for pair in ([a, b], [b, a]):
        with pytest.raises(UserError, match=r"b_text_document\.weights\.bin does not exist.*move"):
            merge_corpora(pair, tmp_path / "all", progress=False)
    with pytest.raises(UserError, match=r"has weights of the dtype float32, .*float16"):
        merge_corpora([a, c], tmp_path / "all", progress=False)
    merge_corpora([a, copied(a)], tmp_path / "all", progress=False)
    assert documents(tmp_path / "all") == documents(a) * 2
    with pytest.raises(UserError, match="exists; choose another output prefix or --overwrite"):
        merge_corpora([b, copied(b)], tmp_path / "all", progress=False)
    merge_corpora([b, copied(b)], tmp_path / "all", overwrite=True, progress=False)
    assert TargetWeights.open(tmp_path / "all") is None


def test_weights_of_several_origins_say_so(tmp_path):
    a = weighted(tmp_path, "a", [{"text": "1", "w": 2}])
    b = weighted(tmp_path, "b", [{"text": "1", "v": 3}], weight_key="v")
    merge_corpora([a, b], tmp_path / "all", progress=False)
    origins = TargetWeights.open(tmp_path / "all").manifest.made_from["merged"]
    assert [origin["weight_key"] for origin in origins] == ["w", "v"]


def test_a_corpus_without_weights_replaces_one_with_them(tmp_path):
    rows = [{"text": "1 2", "w": 2}]
    prefix = weighted(tmp_path, "a", rows)
    assert TargetWeights.open(prefix) is not None
    weighted(tmp_path, "a", rows, weight_key=None, overwrite=True)
    assert TargetWeights.open(prefix) is None
    assert not list(tmp_path.glob("*.weights.*"))


def test_files_of_weights_are_no_input(tmp_path):
    weighted(tmp_path, "a", [{"text": "1", "w": 2}])
    summary = preprocess(
        config(tmp_path, "b", tmp_path, chat=False, json_keys=("text",), tokenizer=NUMBERS)
    )
    assert summary.rows_read == 1
    assert any(".weights.json" in note for note in summary.notes)


# --- looking, and what does not belong together ---------------------------------------------------


def test_inspection_counts_what_is_learned_and_marks_it(tmp_path, capsys):
    rows = [{"messages": talk("a question", "an answer")}, {"messages": talk("b", "c", "d", "e")}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    preprocess(config(tmp_path, "a", source))
    prefix = str(tmp_path / "a_messages_document")
    learned = inspect_corpus(prefix).learned
    corpus = IndexedCorpus.open(prefix)
    expected = sum(sum(weights) for _, weights in documents(Path(prefix)))
    assert learned.weighted_tokens == learned.weight_sum == expected
    assert learned.share == expected / len(corpus.tokens)
    assert learned.documents == 2
    assert learned.conversations == {"answers": 3, "conversations": 2}
    assert inspect([prefix]) == 0
    out = capsys.readouterr().out
    assert f"{int(expected)} tokens are learned ({learned.share:.1%}), in 2 documents" in out
    assert inspect([prefix, "--document", "0", "--tokenizer-model", str(chat_tokenizer())]) == 0
    out = capsys.readouterr().out
    assert "a question<|im_end|>\n<|im_start|>assistant\n\u27e6an answer<|im_end|>\u27e7\n" in out
    more = ["--document", "1", "--json", "--tokenizer-model", str(chat_tokenizer())]
    assert inspect([prefix, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["weights"]) == len(found["tokens"])


def test_a_weight_other_than_one_is_shown(tmp_path, capsys):
    prefix = weighted(tmp_path, "a", [{"text": "1 2 3", "w": [0, 0.5, 1]}])
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
    assert inspect([str(prefix), "--document", "0", *flags]) == 0
    assert "1\u27e60.5: 2\u27e7\u27e63\u27e7" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["weights", "tokens", "json", "no json", "no numbers", "short"])
def test_weights_that_do_not_belong_to_their_corpus_are_told(tmp_path, capsys, damage):
    prefix = weighted(tmp_path, "a", [{"text": "1 2 3", "w": [0, 0.5, 1]}])
    numbers, described = Path(f"{prefix}.weights.bin"), Path(f"{prefix}.weights.json")
    if damage == "weights":
        numbers.write_bytes(np.array([1, 1, 1], dtype="<f4").tobytes())
    elif damage == "short":
        numbers.write_bytes(numbers.read_bytes()[:-4])
    elif damage == "tokens":
        other = weighted(tmp_path, "b", [{"text": "3 2 1", "w": 1}])
        shutil.copy(f"{other}.bin", f"{prefix}.bin")
    elif damage == "json":
        content = json.loads(described.read_text())
        described.write_text(json.dumps({**content, "weighted_tokens": 3}))
    else:
        (described if damage == "no json" else numbers).unlink()
    assert inspect([str(prefix)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM" in out
    assert "weights" in out
    if damage != "json":
        with pytest.raises(UserError, match="weights"):
            merge_corpora([prefix], tmp_path / "all", progress=False)
