"""Scores, averages over checkpoints, records that survive a crash, questions from files."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.errors import UserError
from megatron_anchor.evaluation.checkpoints import Checkpoint, find_checkpoints
from megatron_anchor.evaluation.evaluate import Evaluated
from megatron_anchor.evaluation.harness import HarnessJob, harness_names, run_harness
from megatron_anchor.evaluation.models import Placement
from megatron_anchor.evaluation.pictures import draw_all
from megatron_anchor.evaluation.published import RULER_TASKS, averages, comparability
from megatron_anchor.evaluation.question_files import read_questions
from megatron_anchor.evaluation.records import Records
from megatron_anchor.evaluation.report import as_markdown
from megatron_anchor.evaluation.scoring import any_found, share_found
from megatron_anchor.evaluation.summary import read_results, summarize, write_results
from megatron_anchor.evaluation.tasks import TASKS

TEXT = st.text("abcxyzABCXYZ019", min_size=1, max_size=8)


@settings(max_examples=50)
@given(answers=st.lists(TEXT, min_size=1, max_size=5), before=TEXT, after=TEXT)
def test_right_answers_are_found_and_wrong_ones_are_not(answers, before, after):
    told = f"{before} {', '.join(answers)} {after}"
    assert share_found(told, answers) == share_found(told.upper(), answers) == 1
    assert any_found(f"{before} {answers[-1]}.", answers) == 1
    assert share_found("-", answers) == any_found("-", answers) == 0


def test_scores_are_shares_of_the_answers_as_in_ruler():
    assert share_found(" 1234567 and 7654321.", ["1234567", "7654321", "1111111", "2222222"]) == 0.5
    assert any_found("It is Paris, I think", ["London", "PARIS"]) == 1
    assert share_found(" 1234568", ["1234567"]) == 0
    assert share_found("a\x00b", ["ab"]) == 0  # control characters part words


def evaluated(name, scores, *, label="g", seed=42, lengths=(4096, 8192), nats=(), depths=()):
    """Results of a checkpoint: `scores` by task, then length, a list."""
    settings = {
        **{"tasks": list(scores), "seq_lengths": list(lengths), "seed": seed, "engine": "hf"},
        **{"num_samples": 2, "depths": list(depths), "texts": ["t"] if nats else []},
    }
    records = {}
    for task, rows in scores.items():
        for length, found in zip(lengths, rows, strict=True):
            for index, score in enumerate(found):
                depth = depths[index % len(depths)] if depths else None
                fields = {"task": task, "length": length, "index": index, "depth": depth}
                records["sample", task, length, index] = {
                    **{"kind": "sample", "score": score},
                    **fields,
                }
    for number, sums in enumerate(nats):
        record = {"text": "t", "window": number, "nats": sums, "tokens": [1, 2, 4][: len(sums)]}
        records["window", "t", number] = {"kind": "window", **record}
    return Evaluated(Checkpoint(label, name, Path(name)), settings, records)


def test_checkpoints_are_averaged_with_their_spread():
    one = evaluated("a", {"vt": [[1.0, 0.0], [0.2, 0.2]], "cwe": [[1, 1], [0, 0]]})
    two = evaluated("b", {"vt": [[1.0, 1.0], [0.0, 0.0]], "cwe": [[0, 1], [0, 0]]})
    group = summarize([one, two])["groups"]["g"]
    cell = group["scores"]["vt"]["4096"]
    assert cell["checkpoints"] == [50, 100]
    assert (cell["mean"], cell["min"], cell["max"]) == (75, 50, 100)
    assert cell["std"] == pytest.approx(statistics.stdev([50, 100]))
    assert group["mean"]["4096"]["checkpoints"] == [75, 75]
    assert group["mean"]["8192"]["checkpoints"] == [10, 0]
    told = as_markdown(summarize([one, two]))
    assert "75.0 +- 35.4 (50.0 to 100.0)" in told
    assert "mean of 2 tasks" in told


def test_one_checkpoint_has_the_error_of_its_samples_and_no_spread():
    group = summarize([evaluated("a", {"vt": [[1.0, 0.0], [1, 1]]})])["groups"]["g"]
    cell = group["scores"]["vt"]["4096"]
    assert cell["std"] is None
    assert cell["stderr"] == pytest.approx(statistics.stdev([100, 0]) / 2**0.5)


def test_perplexity_is_the_mean_over_tokens_of_all_windows():
    group = summarize([evaluated("a", {}, nats=[[3.0, 2.0, 4.0], [1.0, 2.0]])])["groups"]["g"]
    rows = group["perplexity"]
    assert [row["from"] for row in rows] == [1, 2, 4, 1]
    assert [row["loss"]["mean"] for row in rows[:3]] == [2.0, 1.0, 1.0]
    assert rows[-1]["loss"]["mean"] == pytest.approx(12 / 10)
    assert rows[-1]["tokens"] == 10


NAMES = list(TASKS)


@pytest.mark.parametrize(
    ("engine", "tasks", "said"),
    [
        ("hf", NAMES[:11], "11 tasks; RULER's average is over 13 (missing: qa_squad, qa_hotpot)"),
        (
            "hf",
            NAMES[:12],
            "12 tasks; RULER's average is over 13 (missing: one of the two qa tasks",
        ),
        ("hf", [*NAMES[:11], *NAMES[12:]], "13 tasks, which are RULER's 13, at one length."),
        ("hf", NAMES, "14 tasks; RULER's average is over 13, without qa, so the two differ."),
        ("hf", ["vt"], "1 task; RULER's average is over 13 (missing: niah_single_1"),
        ("lm-eval", harness_names(NAMES), "13 tasks, which are RULER's 13, at one length."),
        ("lm-eval", ["ruler_vt"], "1 task; RULER's average is over 13"),
    ],
)
def test_the_mean_says_what_it_is_of_wherever_it_is_shown(tmp_path, engine, tasks, said):
    found = evaluated("a", {task: [[1.0, 0.0], [1, 1]] for task in tasks})
    found.settings["engine"] = engine
    results = summarize([found])
    assert said in results["groups"]["g"]["mean_note"]
    told = as_markdown(results)
    assert f"mean of {len(tasks)} task" in told
    assert said in told
    assert ("haystacks are this project's" in told) == (engine == "hf")
    assert ("harness_score" in told) == ("ruler_qa_squad" in tasks)
    write_results(tmp_path / "results.json", results)
    assert said in json.loads((tmp_path / "results.json").read_text())["groups"]["g"]["mean_note"]
    for group in (saved := json.loads((tmp_path / "results.json").read_text()))["groups"].values():
        for name in ("mean_note", "score_notes", "averages", "comparable"):
            del group[name]
    write_results(tmp_path / "results.json", saved)  # as earlier versions wrote them
    assert said in as_markdown(read_results([(None, tmp_path)]))


def test_averages_over_lengths_are_ruler_s():
    """RULER, table 3: weights 1, 2, 3 of 6, from the shortest and from the longest length."""
    means = {"8192": {"mean": 60.0}, "4096": {"mean": 90.0}, "16384": {"mean": 30.0}}
    found = averages(means)
    assert found == {
        "avg": 60,
        "wavg_inc": pytest.approx((90 * 1 + 60 * 2 + 30 * 3) / 6),
        "wavg_dec": pytest.approx((90 * 3 + 60 * 2 + 30 * 1) / 6),
    }
    assert averages({"4096": {"mean": 90.0}}) is None


def test_averages_stand_below_the_table():
    found = evaluated("a", {"vt": [[1.0, 1.0], [0.0, 1.0]]})
    told = as_markdown(summarize([found]))
    assert (
        "Over 4K, 8K: Avg 75.0; wAvg 66.7 with weights 1 to 2 (the longest counts most), 83.3"
        in (told)
    )


PUBLISHED = {
    "engine": "lm-eval",
    "tasks": harness_names(NAMES),
    "seq_lengths": [4096, 8192, 16384, 32768, 65536, 131072],
    "num_samples": 500,
    "seed": 42,
    "depths": [],
}


def test_scores_made_as_published_ones_are_comparable():
    assert comparability(PUBLISHED).startswith("Comparable with published tables: yes. ")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine": "hf"}, "no, because prompts, word lists and haystacks are this project's"),
        ({"tasks": ["ruler_vt"]}, "no, because 12 of the 13 tasks are missing"),
        ({"tasks": [*PUBLISHED["tasks"], "qa"]}, "because the mean has tasks that RULER's has not"),
        ({"num_samples": 100}, "no, because --num-samples is 100, RULER's is 500."),
        ({"seed": 1}, "no, because --seed is 1, RULER's is 42."),
        ({"seq_lengths": [4096]}, "--seq-lengths is 4096, RULER's is 4096 8192 16384 32768 65536"),
        ({"depths": [0.5]}, "--depths puts the needle where RULER has it at random"),
    ],
)
def test_each_departure_from_published_settings_is_named(changed, reason):
    assert reason in comparability(PUBLISHED | changed)


def test_tasks_are_ruler_s_thirteen():
    assert len(RULER_TASKS) == len(set(RULER_TASKS)) == 13
    assert {name.removeprefix("ruler_") for name in harness_names(NAMES)} == set(RULER_TASKS)


def ruler_part(prediction, references):
    """RULER's string_match_part for one sample (scripts/eval/synthetic/constants.py)."""
    return max(1.0 if r.lower() in prediction.lower() else 0.0 for r in references)


@settings(max_examples=200)
@given(st.lists(st.text("aAbBßẞİi \n"), min_size=1, max_size=4), st.text("aAbBßẞİi \n\x01"))
def test_a_question_is_scored_as_ruler_scores_it(references, prediction):
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()
    assert any_found(prediction, references) == ruler_part(cleaned, references)


def test_the_harness_samples_of_qa_are_scored_again(monkeypatch):
    def simple_evaluate(model, tasks, **_):
        def sample(number, outputs, said, score):
            doc = {"max_length": 4096, "outputs": outputs}
            return {"doc": doc, "doc_id": number, "filtered_resps": [said], "4096": score}

        names = ["Paris", "Paris, France", "the capital of France"]
        rows = [sample(0, names, " It is PARIS.", 1 / 3), sample(1, names, "Rome", 0.0)]
        return {"samples": {tasks[0]: rows}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    placement = Placement("cpu", "float32")
    job = HarnessJob(Path("m"), Path("t"), [4096], 2, 42, 1, placement)
    for task, scores in (("ruler_qa_squad", [1.0, 0.0]), ("ruler_vt", [1 / 3, 0.0])):
        found = list(run_harness(None, job, task))
        assert [record["score"] for record in found] == scores
        assert [record["harness_score"] for record in found] == [1 / 3, 0.0]


def test_saved_results_of_two_runs_stand_on_the_same_axes(tmp_path):
    full = {"vt": [[0.5, 0.5], [0, 0]], "cwe": [[1, 1], [0, 1]]}
    more = {"vt": [[1, 1], [0.5, 1]], "cwe": [[1, 1], [1, 1]]}
    for name, scores, seed in (("a", full, 1), ("b", more, 2)):
        (tmp_path / name).mkdir()
        found = evaluated(name, scores, seed=seed, nats=[[1.0, 2.0]], depths=[0.0, 1.0])
        write_results(tmp_path / name / "results.json", summarize([found]))
    given = [("full", tmp_path / "a"), ("anchor", tmp_path / "b")]
    results = read_results(given)
    assert list(results["groups"]) == ["full", "anchor"]
    told = as_markdown(results)
    assert "anchor - full" in told
    assert "+75.0" in told
    assert "not asked the same: seed is 1 and 2" in told
    assert "misleads" in told
    pictures = draw_all(tmp_path, results)
    assert {p.name for p in pictures} == {
        *("heatmap.png", "curves.png", "depths.png", "perplexity.png")
    }
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="LABEL=DIR"):
        read_results([(None, tmp_path / "a"), (None, tmp_path / "b")])
    (tmp_path / "a/results.json").write_text('{"groups": {"g": {"scores": {}}}}')
    with pytest.raises(UserError, match=r"results\.json is damaged"):
        read_results(given)


SAMPLE = {"kind": "sample", "task": "vt", "length": 4096, "index": 0, "score": 1.0}


def test_finished_samples_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "r.jsonl"
    with Records(path, {"seed": 1}, resume=True) as records:
        records.add([SAMPLE, {**SAMPLE, "index": 1}])
    whole = path.read_bytes()
    for cut in range(1, len(whole) - whole.rfind(b"\n", 0, -1)):
        path.write_bytes(whole[:-cut])
        with Records(path, {"seed": 1}, resume=True) as records:
            kept = list(records.found)
            assert kept == [("sample", "vt", 4096, 0)]
            records.add([{**SAMPLE, "index": 1}])
        assert path.read_bytes() == whole


def test_results_of_other_settings_are_refused_with_what_differs(tmp_path):
    path = tmp_path / "r.jsonl"
    Records(path, {"seed": 1, "seq_lengths": [4096]}, resume=True).__exit__(None, None, None)
    with pytest.raises(UserError, match=r"seed 1 -> 2; seq_lengths \[4096\] -> \[8192\]"):
        Records(path, {"seed": 2, "seq_lengths": [8192]}, resume=True)
    with Records(path, {"seed": 1, "seq_lengths": [4096]}, resume=False) as records:
        records.add([SAMPLE])
        with pytest.raises(UserError, match="being written by another"):
            Records(path, {"seed": 1, "seq_lengths": [4096]}, resume=True)
    with pytest.raises(UserError, match=r"--no-resume: .* has 1 results"):
        Records(path, {"seed": 1, "seq_lengths": [4096]}, resume=False)


@pytest.mark.parametrize(
    ("line", "what"),
    [(b"{torn", "Expecting"), (b"[1]", "an object"), (b'{"kind": "sample"}', "no result")],
)
def test_a_damaged_line_is_named(tmp_path, line, what):
    path = tmp_path / "r.jsonl"
    with Records(path, {}, resume=True) as records:
        records.add([SAMPLE])
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(SAMPLE).encode() + b"\n")
    with pytest.raises(UserError, match=rf"r\.jsonl, line 3: damaged \(.*{what}"):
        Records(path, {}, resume=True)


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Place {i}\n is big.",
                    "qas": [
                        {"question": "Where?", "answers": [{"text": "there"}, {"text": "there"}]},
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for i in range(2)
            ]
        }
    ]
}
HOTPOT = [
    {"question": "Who?", "answer": "she", "context": [[f"T{i}", ["One. ", "Two."]], ["U", ["3"]]]}
    for i in range(2)
]
LINES = [{"question": "Who?", "answers": ["a", "b"], "documents": [f"d{i}"]} for i in range(2)]


@pytest.mark.parametrize(
    ("content", "answers", "documents"),
    [
        (json.dumps(SQUAD), ("there",), ("Place 0 is big.",)),
        (json.dumps(HOTPOT), ("she",), ("T0: One. Two.", "U: 3")),
        ("\n".join(map(json.dumps, LINES)), ("a", "b"), ("d0",)),
    ],
)
def test_questions_are_read_from_three_kinds_of_files(tmp_path, content, answers, documents):
    (tmp_path / "q").write_text(content)
    first, *others = read_questions(tmp_path / "q")
    assert (first.answers, first.documents) == (answers, documents)
    assert len(others) == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"question": "a", "answer": "b", "context": "c"}\n{"question"', "line 2: no JSON"),
        ('{"question": "a", "answers": [], "context": "c"}\n{}', r"line 1: answers is \[\]"),
        ("[1, 2]", "AttributeError|TypeError"),
        ('{"data": [{"paragraphs": 3}]}', "TypeError"),
        ('{"question": "a", "answer": "b", "context": "c"}', "at least two"),
        (
            '[{"question": "a", "answer": "", "context": [["t", ["x"]]]}]',
            r"entry 0: answer is ''",
        ),
        (
            '[{"question": "a", "answer": 7, "context": [["t", ["x"]]]}]',
            "entry 0: answer is 7",
        ),
        (
            json.dumps(SQUAD).replace('"there"', '" "'),
            r"question .*: answers is \[' '",
        ),
        ("", "0 question"),
    ],
)
def test_a_bad_question_file_is_refused_with_the_place(tmp_path, content, what):
    (tmp_path / "q").write_text(content)
    with pytest.raises(UserError, match=f"--qa-file .*({what})"):
        read_questions(tmp_path / "q")


def test_checkpoints_have_labels_and_names_of_their_own(tmp_path):
    for path in ("run/a", "other/a", "run/b"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
    (tmp_path / "meg/iter_0000500").mkdir(parents=True)
    (tmp_path / "meg/iter_0000500/metadata.json").write_text("{}")
    (tmp_path / "meg/latest_checkpointed_iteration.txt").write_text("500")
    run = tmp_path / "run"
    found = find_checkpoints([f"{run}/a", f"{run}/b"])
    assert [(c.label, c.name) for c in found] == [("run", "a"), ("run", "b")]
    found = find_checkpoints([f"x={run}/a", f"y={tmp_path}/other/a", f"y={tmp_path}/meg"])
    assert [c.label for c in found] == ["x", "y", "y"]
    assert [c.name for c in found][:2] == ["run-a", "other-a"]
    assert found[2].name.endswith("meg-iter_0000500")
    assert [c.is_megatron for c in found] == [False, False, True]
    for words, what in (
        ([f"{run}/c"], "no such folder"),
        ([str(run)], "neither a Hugging Face model"),
        ([f"{run}/a", f"{run}/../run/a"], "twice"),
        ([f"/=={run}/a"], "a label has letters"),
    ):
        with pytest.raises(UserError, match=what):
            find_checkpoints(words)
