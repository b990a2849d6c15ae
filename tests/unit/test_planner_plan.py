"""The answer as a whole: ranking, refusals with reasons, savings, and the command line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_anchor.command_line import run
from megatron_anchor.planner.cli import default_batch, length, main, parser
from megatron_anchor.planner.communication import communication_of
from megatron_anchor.planner.gpus import GIB, find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import Lengths, long_documents, slimpajama_like
from megatron_anchor.planner.memory import budget
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import Question, make_plan
from megatron_anchor.planner.report import work_of

PAPER = ["--model", "llama-2-7b", "--gpu", "A100-80GB", "--gpus", "8", "--seq-length", "65536"]


def question(name="llama-2-7b", gpu="A100-80GB", gpus=8, length=65536, batch=8, **more):
    lengths = more.pop("lengths", slimpajama_like(5000))
    return Question(name, known_shape(name), lengths, find_gpu(gpu), gpus, length, batch, **more)


def test_the_papers_setting_fits_and_saves_more_than_half():
    asked = question()
    plan = make_plan(asked)
    assert plan.best.memory.total <= budget(asked.gpu) < 80 * GIB
    assert all(c.memory.total <= budget(asked.gpu) for c in plan.choices)
    assert 0.5 < asked.saving(plan.best.layout) < 0.75
    # The paper's own layout: sequence parallelism over all GPUs, everything computed again.
    assert 0.5 < asked.saving(Layout(cp=8, recompute="full")) < 0.75


def test_savings_grow_with_the_length_and_shrink_with_long_documents():
    layout = Layout(cp=8, recompute="full")
    at = [question(length=length).saving(layout) for length in (16384, 65536, 131072)]
    assert at == sorted(at)
    assert question(lengths=long_documents(5000)).saving(layout) < at[1]
    whole = Lengths("one document", np.array([10**8]))
    assert question(lengths=whole).saving(layout) == pytest.approx(0, abs=0.01)


def test_every_layout_is_offered_or_refused_once_and_the_fastest_comes_first():
    plan = make_plan(question("llama-3-70b", "H100", 128, 131072))
    keys = [str(c.layout) for c in plan.choices] + [str(r.layout) for r in plan.refused]
    assert len(keys) == len(set(keys))
    days = [c.days for c in plan.choices]
    assert days == sorted(days)
    assert all(c.layout.gpus == 128 for c in plan.choices)
    kinds = {r.reasons[0].split(":")[0] for r in plan.refused}
    assert {"heads", "batch", "placement", "memory"} <= kinds


@pytest.mark.parametrize("gpus", [8, 1024, 16384])
def test_up_to_16384_gpus_days_stay_above_what_the_work_alone_takes(gpus):
    asked = question("llama-3-8b", "H100", gpus, batch=2048)
    best = make_plan(asked).best
    speed = gpus * asked.gpu.tflops * 1e12 * asked.assumed.linear
    work = work_of(asked, best, "anchor")
    alone = 1e9 * (work["parameter_flops"] + work["attention_flops"]) / speed / 86400
    assert alone <= best.days < 3 * alone


def test_a_question_without_an_answer_says_what_came_nearest():
    plan = make_plan(question(gpus=1))
    assert plan.choices == ()
    with pytest.raises(ValueError, match=r"TP1 PP1 CP1 DP1 comes nearest and needs \d+\.\d GiB"):
        _ = plan.best


def test_communication_is_counted_in_rings():
    shape, sizes = known_shape("llama-2-7b"), {"sequence_length": 1024, "global_batch": 1}
    assert communication_of(shape, Layout(), **sizes).total == 0
    ulysses = communication_of(shape, Layout(cp=2), **sizes)
    # A layer sends q, k, v and the output's half of a rank's 512 slots, forward and backward.
    assert ulysses.heads == 32 * 2 * (4 * 4096 * 512 * 2 / 2)
    ring = communication_of(shape, Layout(cp=2, cp_comm="p2p"), **sizes)
    assert ring.keys == 32 * 3 * (2 * 4096 * 512 * 2)
    tensor = communication_of(shape, Layout(tp=2), **sizes)
    assert tensor.tensor == 32 * 10 * (4096 * 1024 * 2 / 2)
    assert communication_of(shape, Layout(pp=2), **sizes).pipeline == 2 * 4096 * 1024 * 2


GIVEN_BY_HAND = {
    # GiB that a rank sends in one layer's forward pass, Llama-3-8B at 2^20 slots: query and output
    # 32 heads, keys and values 8 (or as many as ranks), 128 dimensions of 2 bytes.
    Layout(cp=32): 31 / 32 * 32768 * 128 * (2 * 32 + 2 * 32) * 2,
    Layout(cp=32, cp_comm="gather"): 31 * 32768 * 2 * 8 * 128 * 2,
    Layout(cp=32, cp_comm="a2a+gather", cp_heads=8): (
        7 / 8 * 32768 * 128 * (2 * 32 + 2 * 8) * 2 + 3 * 32768 * 2 * 8 * 128 * 2
    ),
    Layout(cp=64, cp_comm="a2a+gather", cp_heads=8): (
        7 / 8 * 16384 * 128 * (2 * 32 + 2 * 8) * 2 + 7 * 16384 * 2 * 8 * 128 * 2
    ),
}


@pytest.mark.parametrize(
    ("layout", "gib"), zip(GIVEN_BY_HAND, (0.97, 3.88, 0.92, 0.71), strict=True)
)
def test_a_million_tokens_are_sent_as_counted_by_hand(layout, gib):
    """Ulysses goes and comes back twice, gathered keys four times (the sums are float32)."""
    found = communication_of(
        known_shape("llama-3-8b"), layout, sequence_length=1 << 20, global_batch=1
    )
    forward = found.heads / 32 / 2 + found.keys / 32 / 4
    assert forward == GIVEN_BY_HAND[layout]
    assert forward / GIB == pytest.approx(gib, abs=0.005)


def test_a_million_tokens_on_64_gpus_have_a_sensible_plan():
    """Groups within heads and server, memory bounded, and 1.6 GiB of gathered keys at most."""
    asked = question("llama-3-8b", "H100", 64, 1 << 20, batch=4)
    plan = make_plan(asked)
    best = plan.best.layout
    assert best.cp_comm == "a2a+gather"
    assert best.tp * best.heads_ranks <= 8
    assert best.heads_ranks * best.keys_ranks == best.cp
    # Twelve bytes a parameter over 32 ranks, six on each: nothing of it depends on the split.
    states = 8.03e9 / best.tp * (6 + 12 / (best.cp * best.dp))
    assert plan.best.memory.states == pytest.approx(states, rel=0.02)
    ulysses = [c for c in plan.choices if c.layout.cp_comm == "a2a" and c.layout.tp == best.tp]
    assert all(c.days >= plan.best.days for c in ulysses)
    assert any("cannot be shared by 64 ranks" in r.reasons[0] for r in plan.refused)


def test_gathered_parts_cost_a_few_tiles_more_and_zigzag_pieces_many():
    """Of documents of about 1000 tokens at 131072 slots on 32 ranks."""
    asked = question("llama-3-8b", "H100", 32, 131072)
    whole = asked.work(Layout(cp=32)).tile_pairs
    chunks = asked.work(Layout(cp=32, cp_comm="gather")).tile_pairs
    ring = asked.work(Layout(cp=32, cp_comm="p2p")).tile_pairs
    assert 1 <= chunks / whole < 1.3
    assert ring / whole > 2


def test_the_command_line_prints_layouts_refusals_assumptions_and_the_command(capsys):
    assert main(PAPER) == 0
    text = capsys.readouterr().out
    assert re.search(r"anchor saves about 5\d% of full attention's time at TP\d", text)
    assert "fitting in 74.4 GiB per GPU: " in text
    assert "memory: needs 82." in text
    assert "assumed, not measured: 60% of 312 TFLOP/s" in text
    assert "-m megatron_anchor.pretrain_gpt" in text


def test_the_page_shows_what_the_command_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n(anchor saves.*?)```", page, re.DOTALL)[1].splitlines()
    assert main(PAPER) == 0
    printed = capsys.readouterr().out
    for line in shown:
        assert line.removesuffix("...").strip() in printed, line
    assert len(shown) > 8


def test_no_saving_is_claimed_where_there_is_none(capsys):
    assert main([*PAPER, "--attention-pattern", "full"]) == 0
    assert "\nfull at TP" in capsys.readouterr().out
    assert main([*PAPER[:-1], "64"]) == 0
    assert "anchor saves about 0% of" in capsys.readouterr().out


def test_one_layout_may_be_asked_for(capsys):
    assert main([*PAPER, "--cp", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (choice,) = answer["layouts"]
    assert (choice["layout"]["cp"], choice["layout"]["tp"]) == (8, 1)
    assert choice["memory"]["total"] < answer["memory_budget"]
    assert set(answer["patterns"]) == {"anchor", "intra-document", "intra-document-reset", "full"}


def test_a_refused_layout_ends_with_its_reason(capsys):
    assert run(main, [*PAPER, "--tp", "1"]) == 2
    assert "needs 82." in capsys.readouterr().err
    words = ["--model", "qwen2.5-7b", "--seq-length", "65536", "--cp", "8", "--cp-comm-type", "a2a"]
    assert run(main, words) == 2
    assert "28 query heads per TP rank cannot be shared by 8 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "slots"),
    [("65536", 65536), ("64K", 65536), ("128k", 131072), ("1M", 1 << 20), ("4K", 4096)],
)
def test_lengths_may_have_a_unit(text, slots):
    assert length(text) == slots


@pytest.mark.parametrize("text", ["64KB", "K", "", "1.5K", "64 000", "1G"])
def test_other_lengths_are_refused_with_an_example(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*PAPER[:-1], text])
    assert ended.value.code == 2
    assert "give slots such as 65536, 64K or 1M" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "batch"), [(1, 8), (8, 8), (64, 8), (256, 32), (1024, 128), (24, 12), (6, 12)]
)
def test_the_default_batch_grows_with_the_servers(gpus, batch):
    """The paper's 8 on 8 GPUs; with many, one per server, so that data parallelism has samples."""
    assert default_batch(gpus, 8) == batch


def test_256_gpus_get_a_batch_that_their_servers_can_share(capsys):
    words = ["--model", "llama-3-8b", "--gpu", "H100", "--gpus", "256", "--seq-length", "64K"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["global_batch"] == 32
    assert main([*words, "--global-batch-size", "8", "--json"]) == 0
    small = json.loads(capsys.readouterr().out)
    best, starved = (a["layouts"][0]["days_per_billion_tokens"] for a in (answer, small))
    assert best < starved


def test_the_papers_days_stand_beside_the_planners_with_the_reason(capsys):
    assert main(PAPER) == 0
    text = capsys.readouterr().out
    assert "about 4.5 days with full attention and 2 with anchor; here 0.8 and 0.4" in text
    assert "theirs are 9 to 10% MFU; 50 to 54% are assumed" in text
    assert main([*PAPER, "--gpu", "H100"]) == 0
    assert "the paper reports" not in capsys.readouterr().out


def test_the_efficiencies_that_the_text_gives_for_the_papers_program_give_its_days(capsys):
    flags = ["--linear-efficiency", "0.11", "--attention-efficiency", "0.1", "--json"]
    assert main([*PAPER, *flags]) == 0
    patterns = json.loads(capsys.readouterr().out)["patterns"]
    for name, days in {"full": 4.5, "anchor": 2.0}.items():
        low, high = patterns[name]["days_range"]
        assert low < days < high * 1.05, "given efficiencies have a range of 0.9 to 1.1"


def test_days_are_a_range_and_speeds_have_two_digits(capsys):
    assert main(PAPER) == 0
    row = re.search(r"^  anchor +.*$", capsys.readouterr().out, re.M)[0].split()
    assert row[4:] == ["16", "4000", "54%", "0.33", "to", "0.61"]
    assert main([*PAPER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["patterns"]["anchor"]
    low, high = found["days_range"]
    days = found["days_per_billion_tokens"]
    assert (low, high) == (days / 1.1, days / 0.6)
    assert found["mfu"] == pytest.approx(0.54, abs=0.005)


def test_a_model_with_experts_may_be_asked_about_by_name(capsys):
    words = ["--model", "Qwen/Qwen3-30B-A3B", "--gpu", "H100", "--gpus", "64"]
    assert main([*words, "--seq-length", "64K", "--cp", "8", "--ep", "16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (choice,) = answer["layouts"]
    assert choice["layout"]["ep"] == 16
    assert answer["active_parameters"] == 3353032704
    assert "--expert-model-parallel-size 16" in answer["command"]


def test_predictors_need_documents_that_are_kept_apart(capsys):
    words = ["--model", "deepseek-v3", "--seq-length", "64K", "--attention-pattern", "full"]
    assert run(main, words) == 2
    assert (
        "--attention-pattern full: deepseek-v3 has multi-token prediction"
        in capsys.readouterr().err
    )


def test_a_model_that_the_converter_does_not_read_is_said_to_need_a_checkpoint(monkeypatch, capsys):
    from megatron_anchor.planner import launch

    monkeypatch.setattr(launch, "FAMILIES", {})
    assert main(PAPER) == 0
    assert "the converter does not read LlamaForCausalLM yet" in capsys.readouterr().out


BAD = {
    "--gpus 12": "--gpus 12: servers hold 8 A100-80GB; give a multiple of 8, such as 8",
    "--gpus 0": "--gpus 0: expected 1 or more",
    "--gpu A100-800GB": "--gpu A100-800GB: did you mean A100-80GB?",
    "--seq-length 1": "--seq-length 1: expected 2 or more",
    "--global-batch-size -3": "--global-batch-size -3: expected 1 or more",
    "--corpus nowhere": "nowhere.bin does not exist",
    "--length-table pile": "--length-table pile: known are slimpajama-like",
    "--tp 3": "--gpus 8 is no multiple of TP 3 x PP 1 x CP 1 = 3",
    "--cp 0": "--cp 0: expected 1 or more",
    "--memory-gib -1": "--memory-gib -1: expected more than 0",
    "--linear-efficiency 1.5": "--linear-efficiency 1.5: expected a share",
    "--train-tokens 0": "--train-tokens 0: expected more than 0",
    "--train-tokens inf": "--train-tokens inf: expected a finite number",
    "--peak-tflops nan": "--peak-tflops nan: expected a finite number",
    "--link-efficiency nan": "--link-efficiency nan: expected a share",
    "--model llama": "--model llama: did you mean llama-2-7b or",
    "--ep 2": "EP 2 is for models with experts",
    "--ep 0": "--ep 0: expected 1 or more",
}


@pytest.mark.parametrize("flags", BAD)
def test_wrong_values_are_named_with_their_flag_and_the_remedy(flags, capsys):
    assert run(main, [*PAPER, *flags.split()]) == 2
    assert BAD[flags] in capsys.readouterr().err


def test_help_has_a_worked_example_that_parses():
    text = parser().format_help()
    example = re.search(r"plan_training.py (--model llama-2-7b.*?)\nwith", text, re.DOTALL)
    parser().parse_args(example[1].replace("\\\n", " ").split())


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*PAPER, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
