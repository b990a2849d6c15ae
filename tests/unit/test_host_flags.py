"""Every argument of the pinned Megatron's parser has a row, and does what the row says."""

import copy
import runpy
import sys
from pathlib import Path

import pytest

from megatron_anchor import compat
from megatron_anchor.training import host_flags
from megatron_anchor.training.arguments import adapted_defaults, add_anchor_arguments
from megatron_anchor.training.validation import refusals, require_supported

ROOT = Path(__file__).parents[2]
GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --position-embedding-type rope "
    "--eval-interval 10 --train-iters 4 --lr 1e-3"
)
FLAGS = compat.host_flags()
SWITCHED = {name: s for s, names in host_flags.READ_WITH.items() for name in names.split()}
PINNED = pytest.mark.skipif(
    not compat.host_version().startswith("0.19."),
    reason="rows are held against the pinned Megatron; others' additions are refused when set",
)
NEEDY = {*host_flags.NEEDS_ITS_LAYERS, *host_flags.NEEDS_TRANSFORMER_ENGINE}


@pytest.fixture(scope="module")
def good():
    """Arguments that nothing is wrong with, from the real parser; copy before changing them."""
    from megatron.training.arguments import parse_args

    argv = sys.argv
    sys.argv = ["pretrain_gpt", *GOOD.split()]
    try:
        args = parse_args(add_anchor_arguments)
    finally:
        sys.argv = argv
    assert refusals(args) == [] == host_flags.without_effect(args)
    return args


@pytest.fixture(scope="module")
def actions():
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(add_help=False))
    return {action.dest: action for action in parser._actions}


def other_value(action):
    """A value of an argument's own type that is not its default."""
    default = adapted_defaults().get(action.dest, action.default)
    if action.nargs == 0 or isinstance(default, bool):
        return not default
    if action.choices:
        value = next(choice for choice in action.choices if choice != default)
    else:
        value = {int: 3, float: 0.5}.get(action.type, "x")
        value = value + 1 if value == default else value
    return [value] if action.nargs in ("+", "*") else value


@PINNED
def test_no_argument_lacks_a_row_and_no_row_is_stale():
    assert set(FLAGS) - set(host_flags.ROWS) == set(), "say what becomes of these"
    assert set(host_flags.ROWS) - set(FLAGS) - set(host_flags.OPTIONAL) == set(), "Megatron lost"
    assert len(FLAGS) == 806


def test_all_three_kinds_of_row_are_there_and_say_why():
    verdicts = [row.verdict for row in host_flags.ROWS.values()]
    assert set(verdicts) == {"carried", "refused", "without effect"}
    assert all(row.text.strip() for row in host_flags.ROWS.values())
    for name, text in host_flags.REFUSED.items():
        assert ";" in text or "use " in text or "pass " in text or "is that mask" in text, name


def test_parts_of_a_row_belong_to_an_argument_that_may_be_used(actions):
    for name, values in host_flags.REFUSED_VALUES.items():
        assert host_flags.ROWS[name].verdict != "refused", name
        if actions[name].choices:
            known = {getattr(choice, "name", choice) for choice in actions[name].choices}
            assert set(values) <= known, name
    for name in (*host_flags.NEEDS_ITS_LAYERS, *host_flags.NEEDS_TRANSFORMER_ENGINE):
        assert host_flags.ROWS[name].verdict == "carried", name
    assert set(host_flags.HARMLESS) <= set(host_flags.REFUSED)


@pytest.mark.parametrize("name", sorted(set(host_flags.REFUSED) - set(host_flags.OPTIONAL)))
def test_a_refused_argument_ends_with_its_flag_and_reason(name, good, actions):
    args = copy.copy(good)
    setattr(args, name, other_value(actions[name]))
    with pytest.raises(ValueError, match="cannot run with these arguments") as raised:
        require_supported(args)
    lines = [line for line in str(raised.value).splitlines() if FLAGS[name].names[0] in line]
    assert any(host_flags.REFUSED[name] in line for line in lines), str(raised.value)


def test_an_argument_without_effect_is_named_once_and_runs(good, actions, capsys):
    for name, row in host_flags.ROWS.items():
        if row.verdict != "without effect":
            continue
        args = copy.copy(good)
        value = other_value(actions[name])
        if value in list(host_flags.REFUSED_VALUES.get(name, ())):
            continue
        setattr(args, name, value)
        [said] = host_flags.without_effect(args)
        assert said.startswith(FLAGS[name].names[0]), name
        assert said.endswith(f": {row.text}")
        assert host_flags.refusals(args) == []
    args.rank = 1
    require_supported(args)
    assert capsys.readouterr().out == "", "once a run, and not on every rank"
    args.rank = 0
    require_supported(args)
    assert said in capsys.readouterr().out


def test_a_carried_argument_is_not_spoken_of(good, actions):
    for name, row in host_flags.ROWS.items():
        if row.verdict != "carried" or name in NEEDY or name in SWITCHED or name not in actions:
            continue
        args = copy.copy(good)
        value = other_value(actions[name])
        if value in list(host_flags.REFUSED_VALUES.get(name, ())):
            continue
        setattr(args, name, value)
        assert host_flags.refusals(args) == [] == host_flags.without_effect(args), name


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_read_with_a_switch_only_is_named_without_it(name, good, actions):
    args = copy.copy(good)
    setattr(args, name, other_value(actions[name]))
    [said] = host_flags.without_effect(args)
    switch = FLAGS[SWITCHED[name]].names[0]
    assert said.endswith(f": read with {switch} only")
    setattr(args, SWITCHED[name], 1)
    assert host_flags.without_effect(args) == []


@pytest.mark.parametrize("name", host_flags.REFUSED_VALUES)
def test_a_refused_value_is_named_with_its_flag(name, good, actions):
    for value, reason in host_flags.REFUSED_VALUES[name].items():
        args = copy.copy(good)
        choices = {getattr(c, "name", c): c for c in actions[name].choices or ()}
        given = choices.get(value, value)
        setattr(args, name, [given] if actions[name].nargs == "+" else given)
        assert f"{FLAGS[name].names[0]} {value}: {reason}" in host_flags.refusals(args)


@pytest.mark.parametrize("name", host_flags.NEEDS_ITS_LAYERS)
def test_what_needs_transformer_engines_layers_says_so(name, good, actions):
    args = copy.copy(good)
    setattr(args, name, other_value(actions[name]))
    args.transformer_impl = "local"
    [reason] = host_flags.refusals(args)
    assert "it needs --transformer-impl transformer_engine" in reason
    args.transformer_impl = "transformer_engine"
    assert host_flags.refusals(args) == []


@pytest.mark.parametrize("name", host_flags.NEEDS_TRANSFORMER_ENGINE)
def test_what_needs_transformer_engine_says_so(name, good, actions, monkeypatch):
    args = copy.copy(good)
    setattr(args, name, other_value(actions[name]))
    for there in (False, True):
        monkeypatch.setattr(compat, "have_transformer_engine", lambda there=there: there)
        found = host_flags.refusals(args)
        assert ("Transformer Engine is not installed" in str(found)) == (not there), found


def test_a_flag_that_a_newer_megatron_added_is_refused_where_it_is_set(good, monkeypatch):
    new = compat.HostFlag(("--twist-attention",), None, "transformer configuration")
    monkeypatch.setattr(compat, "host_flags", lambda: FLAGS | {"twist_attention": new})
    args = copy.copy(good)
    args.twist_attention = None
    assert refusals(args) == []
    args.twist_attention = 3
    [reason] = refusals(args)
    assert reason.startswith("--twist-attention 3: megatron_anchor knows nothing of this argument")


def test_a_value_as_good_as_the_default_is_not_refused(good):
    args = copy.copy(good)
    args.tensor_parallel_num_weight_shards, args.tensor_model_parallel_size = 2, 2
    args.decoder_seq_length = 64
    assert host_flags.refusals(args) == []
    args.decoder_seq_length = 32
    assert "--decoder-seq-length 32" in str(host_flags.refusals(args))


OF_THE_PIN = pytest.mark.skipif(
    f"megatron-core=={compat.host_version()}\n"
    not in (ROOT / "requirements" / "constraints.txt").read_text(),
    reason="the page is of the pinned Megatron",
)


@OF_THE_PIN
def test_the_page_is_what_the_table_says():
    writer = runpy.run_path(str(ROOT / "docs" / "write_host_flags.py"))
    assert (ROOT / "docs" / "host-flags.md").read_text() == writer["page"](), (
        "run python docs/write_host_flags.py"
    )


@OF_THE_PIN
def test_the_page_names_every_flag_of_megatron():
    text = (ROOT / "docs" / "host-flags.md").read_text()
    for flag in FLAGS.values():
        assert all(f"`{name}`" in text for name in flag.names), flag


def test_validated_arguments_are_not_judged_again(good):
    """Megatron's validation changes values: dtypes for names, lists for texts."""
    args = copy.copy(good)
    args.params_dtype = args.megatron_fsdp_main_grads_dtype = object()
    assert refusals(args) == []
