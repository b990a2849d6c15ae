"""Weights, splits and files of the data arguments, refused before a corpus is opened."""

import json
from argparse import Namespace

import pytest

from megatron_anchor.training.data_arguments import refusals, require_corpora

ALL = ("data", "train_data", "valid_data", "test_data", "data_args", "per_split_data_args")


def data(**given):
    """Megatron's data arguments; evaluation is off."""
    values = {f"{name}_path": None for name in ALL}
    values |= {"split": None, "eval_iters": 0, "full_validation": False, "skip_train": False}
    return Namespace(**(values | {"rank": 0, "tensor_model_parallel_size": 1} | given))


def reasons(**given):
    return list(refusals(data(**given)))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf", "1e400", "0.0"])
@pytest.mark.parametrize(
    "flag", ["data_path", "train_data_path", "valid_data_path", "a_file", "json"]
)
def test_a_weight_that_is_no_number_above_0_is_refused_wherever_it_comes_from(
    weight, flag, tmp_path
):
    entries = ["1", "a", weight, "b"]
    file = tmp_path / "blend"
    if flag == "a_file":
        file.write_text("\n".join(entries))
        given = {"data_args_path": str(file), "split": "9,1,0"}
    elif flag == "json":
        file.write_text(json.dumps({"train": entries, "valid": "1 a", "test": None}))
        given = {"per_split_data_args_path": str(file)}
    else:
        given = {flag: entries}
    [reason] = reasons(**given)
    assert f"gives the weight {weight}: expected a number above 0" in reason
    assert reason.startswith(f"--{next(iter(given)).replace('_', '-')}")
    if file.exists():
        file.write_text(file.read_text().replace(weight, "2"))
        assert reasons(**given) == []


def test_good_blends_are_not_refused(tmp_path):
    assert reasons() == []
    assert reasons(data_path=["a"]) == []
    assert reasons(data_path=["a", "b"]) == []
    assert reasons(data_path=["0.3", "a", "0.7", "b"], split="98,2,0", eval_iters=1) == []
    assert reasons(data_path=["a", "b", "c"], split="1", eval_iters=0) == []
    assert reasons(train_data_path=["a"], valid_data_path=["b"], eval_iters=5) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_path": ["1", "a", "b", "c"]}, "a weight to some corpora and none to others: 'b'"),
        ({"data_args_path": "/nowhere/x", "split": "1,0,0"}, "cannot be read: No such file"),
        ({"per_split_data_args_path": "/nowhere/x"}, "cannot be read: No such file"),
        ({"data_path": ["a"], "split": "0,1,0"}, "--split 0,1,0 gives the training split nothing"),
        ({"data_path": ["a"], "split": "0,0,0"}, "--split 0,0,0: expected up to three numbers"),
        ({"data_path": ["a"], "split": "x"}, "--split x: expected up to three numbers"),
        (
            {"train_data_path": ["a"], "split": "9,1,0"},
            "leave it out where every split has corpora",
        ),
    ],
)
def test_what_megatron_would_assert_later_is_said(given, message):
    assert any(message in reason for reason in reasons(**given)), reasons(**given)


def test_a_file_of_corpora_needs_a_split_of_its_own(tmp_path):
    file = tmp_path / "blend"
    file.write_text("a b")
    assert reasons(data_args_path=str(file)) == [
        "--data-args-path needs --split, for instance --split 99,1,0"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"train": ["a"]}', "must be a JSON object with a list of corpora, or null, for each of"),
        ('{"train": 3, "valid": null, "test": null}', "train is 3, expected a list of corpora"),
    ],
)
def test_a_file_of_splits_that_is_none_is_refused(content, message, tmp_path):
    file = tmp_path / "splits.json"
    file.write_text(content)
    [reason] = reasons(per_split_data_args_path=str(file))
    assert message in reason
    assert str(file) in reason


EVALUATED = {"eval_iters": 3}, {"full_validation": True}


@pytest.mark.parametrize("on", EVALUATED)
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"data_path": ["a"], "split": "100,0,0"}, "--split 100,0,0 leaves it none"),
        ({"data_path": ["a"], "split": "100"}, "--split 100 leaves it none"),
        ({"data_path": ["a"], "split": "1,0,1"}, "--split 1,0,1 leaves it none"),
        ({"train_data_path": ["a"]}, "--train-data-path names none"),
    ],
)
def test_evaluation_needs_documents(given, why, on):
    [reason] = reasons(**given, **on)
    assert why in reason
    assert "pass --eval-iters 0, or give it documents" in reason
    assert reasons(**given) == [], "nothing is evaluated"


def test_megatrons_default_split_has_validation_documents():
    assert reasons(data_path=["a"], eval_iters=100) == []


def test_all_missing_corpora_are_named_at_once(tmp_path):
    for name in ("a.bin", "a.idx", "b.bin"):
        (tmp_path / name).touch()
    blend = [f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/c", "s3://bucket/d"]
    with pytest.raises(ValueError, match="name each corpus without") as raised:
        require_corpora(data(train_data_path=blend[:2], valid_data_path=blend[2:]))
    lines = str(raised.value).splitlines()[1:]
    assert lines == [f"  - {tmp_path}/{name}" for name in ("b.idx", "c.bin", "c.idx")]
    require_corpora(data(data_path=blend[:1]))
    # Ranks that open no corpus need not see it.
    require_corpora(data(data_path=blend, rank=1, tensor_model_parallel_size=2))
