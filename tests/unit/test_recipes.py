"""Every recipe of examples/ and every arm: DRY_RUN=1 prints the commands, real parsers read them.

Nothing is trained here: the arguments are those for GPUs at the models' real sizes.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_anchor import compat
from megatron_anchor.attention.backends import Hardware
from megatron_anchor.checkpoint.megatron_args import argument_values, flag_lines
from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.launch import RECOMPUTE_FLAGS
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.lengths import slimpajama_like
from megatron_anchor.planner.models import known_shape
from megatron_anchor.planner.plan import Question, automatic, make_plan
from megatron_anchor.training import validation
from megatron_anchor.training.arguments import add_anchor_arguments, rope_scaling

ROOT = Path(__file__).parents[2]
RECIPES = {
    "llama_2_7b_64k": ("llama-2-7b", 65536, 5e6),
    "llama_2_7b_128k": ("llama-2-7b", 131072, 1e7),
    "llama_3_8b_128k": ("llama-3-8b", 131072, 1e7),
    "mistral_7b_v0.3_128k": ("mistral-7b-v0.3", 131072, 1e7),
    "qwen_1.5_1.8b_128k": ("qwen1.5-1.8b", 131072, 1e7),
}
"""Recipe to the planner's name of its model, and the paper's length and RoPE base (Table 1)."""

TOOLS = {
    "convert_hf_to_megatron.py": "megatron_anchor.checkpoint.cli_to_megatron",
    "convert_megatron_to_hf.py": "megatron_anchor.checkpoint.cli_to_hugging_face",
    "verify_conversion.py": "megatron_anchor.checkpoint.cli_verify",
    "preprocess_data.py": "megatron_anchor.corpus.cli_preprocess",
    "upsample_long_documents.py": "megatron_anchor.corpus.cli_upsample",
    "plan_training.py": "megatron_anchor.planner.cli",
    "evaluate_long_context.py": "megatron_anchor.evaluation.cli",
}
"""Tool to the module whose parser() reads its arguments."""

ARMS = [
    {"ATTENTION": "full"},
    {"ATTENTION": "intra-document"},
    {"ATTENTION": "intra-document-reset"},
    {"ATTENTION": "anchor-masked"},
    {"DOMAIN_TAGS": "1"},
    {"INTERLEAVE": "1"},
    {"LOSS_WEIGHTING": "effective-context", "GROW_FROM": "4096"},
    {"ATTENTION": "intra-document", "INTERLEAVE": "1"},
    {"UPSAMPLE": "1", "MIXTURE": "RedPajamaC4=0.2,RedPajamaCommonCrawl=0.8"},
    *(
        {"ROPE_SCALING": kind, "ROPE_BASE": base}
        for kind in ("none", "ntk", "yarn")
        for base in ("10000", "1000000", "10000000")
    ),
    *(
        {"SEQ_LENGTH": "32768", "ROPE_BASE": base}
        for base in ("500", "10000", "200000", "600000", "900000", "5000000", "1000000000")
    ),
]
"""Tables 5 and 2 to 4."""


def recipe(name, *steps, cwd, expect=0, **settings):
    """Run a recipe with these settings and no others; give what it printed."""
    known = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PYTHONPATH")}
    done = subprocess.run(
        [ROOT / f"examples/{name}.sh", *steps],
        cwd=cwd,
        env=known | {"PYTHON": sys.executable} | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stderr


def commands(name, cwd, *steps, **settings):
    """The commands of a dry run: a list of {program: words behind it}, in their order."""
    found = []
    for line in recipe(name, *steps, cwd=cwd, DRY_RUN="1", **settings).splitlines():
        if line.startswith("== "):
            continue
        words = shlex.split(line)
        assert words[0] == sys.executable
        if words[1] == "-m":
            at = words.index("megatron_anchor.pretrain_gpt")
            found.append(("train", words[1:at], words[at + 1 :]))
        else:
            found.append((Path(words[1]).name, [], words[2:]))
    return found


def training(name, cwd, **settings):
    """torchrun's words and the program's, after a conversion of the real model's shape."""
    planned, length, base = RECIPES[name]
    model = known_shape(planned).model
    start = Path(cwd, "work", name, f"{settings.get('SEQ_LENGTH', length)}-start")
    start.mkdir(parents=True, exist_ok=True)
    values = argument_values(
        model,
        dtype=torch.bfloat16,
        tokenizer=str(start / "hugging_face"),
        anchor=1,
        target="transformer_engine",
    )
    values |= {"rotary_base": int(base), "max_position_embeddings": length}  # --extend-to
    (start / "megatron_args.txt").write_text("\n".join(flag_lines(values)) + "\n")
    ((_, launcher, words),) = commands(name, cwd, "train", **settings)
    return launcher, words


@pytest.fixture
def accepted(monkeypatch):
    """Parse and validate as the program does on 8 A100 with Transformer Engine and flash-attn."""
    hardware = Hardware(
        capability=(8, 0), packages={"transformer-engine": "2.20.2", "flash-attn": "2.8.3"}
    )
    monkeypatch.setattr(validation, "this_hardware", lambda: hardware)
    monkeypatch.setattr(compat, "have_transformer_engine", lambda: True)
    device = SimpleNamespace(major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the recipe exports it

    def accepted(words, *, gpus=8):
        from megatron.training.argument_utils import core_transformer_config_from_args
        from megatron.training.arguments import parse_args, validate_args

        monkeypatch.setenv("WORLD_SIZE", str(gpus))
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *words])
        args = parse_args(add_anchor_arguments)
        assert validation.refusals(args) == []
        validate_args(args)  # Megatron's own
        core_transformer_config_from_args(args)
        return args

    return accepted


def test_every_script_of_the_examples_is_a_recipe_that_is_tested_here():
    scripts = {path.stem for path in (ROOT / "examples").glob("*.sh")}
    assert scripts == {*RECIPES, "slurm"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_program_accepts_the_real_arguments_of_a_recipe(name, tmp_path, accepted):
    planned, length, base = RECIPES[name]
    launcher, words = training(name, tmp_path)
    args = accepted(words)
    assert launcher[launcher.index("--nproc-per-node") + 1] == "8"
    shape = known_shape(planned).model
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    assert (args.num_layers, args.hidden_size, groups) == (shape.layers, shape.hidden, shape.groups)
    assert args.seq_length == length <= args.max_position_embeddings
    assert args.rotary_base == base
    assert not rope_scaling(args)
    table_1 = {
        "optimizer": "adam",
        "lr": 2e-5,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "train_iters": 2000,
        "global_batch_size": 8,
        "attention_pattern": "anchor",
        "anchor_token": "eos" if "qwen" in name else "bos",
    }
    assert {key: getattr(args, key) for key in table_1} == table_1
    assert args.bf16
    assert args.use_distributed_optimizer
    assert args.overlap_param_gather
    assert args.transformer_impl == "transformer_engine"
    assert args.add_qkv_bias == ("qwen" in name)
    assert (args.save_last, args.save_last_every) == (5, 10)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: " ".join(arm.values())[:40])
def test_the_program_accepts_every_arm(arm, tmp_path, accepted):
    _, words = training("llama_2_7b_64k", tmp_path, **arm)
    args = accepted(words)
    assert args.attention_pattern == arm.get("ATTENTION", "anchor")
    assert args.seq_length == int(arm.get("SEQ_LENGTH", 65536))
    assert args.domain_tags == ("DOMAIN_TAGS" in arm)
    assert args.interleave_chunks == ("INTERLEAVE" in arm)
    assert args.loss_weighting == arm.get("LOSS_WEIGHTING", "uniform")
    assert bool(args.document_length_schedule) == ("GROW_FROM" in arm)
    assert bool(args.document_list) == ("UPSAMPLE" in arm)
    if arm.get("ROPE_SCALING") != "ntk":
        assert args.rotary_base == int(arm.get("ROPE_BASE", 5_000_000))
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    assert rope_scaling(args) == (scaling if arm.get("ROPE_SCALING") == "yarn" else {})


@pytest.mark.parametrize("base", [10_000, 1_000_000])
def test_ntk_is_the_base_that_transformers_computes_for_16_times_the_length(base, tmp_path):
    """Its dynamic scaling with factor 1 is the NTK-aware one by length / old length."""
    from megatron_anchor.attention.rope import RotarySettings, inverse_frequencies

    _, words = training("llama_2_7b_64k", tmp_path, ROPE_SCALING="ntk", ROPE_BASE=str(base))
    at = len(words) - 1 - words[::-1].index("--rotary-base")
    theirs, _ = inverse_frequencies(
        RotarySettings(
            head_dim=128,
            base=base,
            scaling={"rope_type": "dynamic", "factor": 1.0},
            max_position_embeddings=4096,
        ),
        seq_length=65536,
    )
    ours, _ = inverse_frequencies(RotarySettings(head_dim=128, base=float(words[at + 1])))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    plain, _ = inverse_frequencies(RotarySettings(head_dim=128, base=base))
    assert not torch.allclose(plain, theirs, rtol=1e-2)


def test_the_scaling_that_a_model_has_passes_the_shell_in_one_word(tmp_path, accepted):
    training("llama_2_7b_64k", tmp_path)
    path = tmp_path / "work/llama_2_7b_64k/65536-start/megatron_args.txt"
    own = '{"rope_type":"linear","factor":2.0}'
    path.write_text(path.read_text() + f"--rope-parameters {own}\n")
    ((_, _, words),) = commands("llama_2_7b_64k", tmp_path, "train")
    assert rope_scaling(accepted(words)) == {"rope_type": "linear", "factor": 2.0}


def test_arms_never_share_a_folder(tmp_path):
    def save(arm):
        words = training("llama_2_7b_64k", tmp_path, **arm)[1]
        return words[words.index("--save") + 1]

    folders = [save(arm) for arm in [{}, *ARMS]]
    assert len(set(folders)) == len(folders)


def test_upsampled_documents_are_never_those_of_another_mixture_or_length_of_training(tmp_path):
    one, two = "RedPajamaC4=0.2,RedPajamaBook=0.8", "RedPajamaC4=0.3,RedPajamaBook=0.7"
    settings = [{}, {"MIXTURE": one}, {"MIXTURE": two}, {"TRAIN_ITERS": "1000"}]
    lists, folders = set(), []
    for more in settings:
        words = training("llama_2_7b_64k", tmp_path, UPSAMPLE="1", **more)[1]
        lists.add(words[words.index("--document-list") + 1])
        folders.append(words[words.index("--save") + 1])
    assert len(lists) == len(settings)
    assert len(set(folders[:3])) == 3


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: " ".join(arm.values())[:40])
def test_the_tools_accept_every_arm(arm, tmp_path):
    for program, _, words in commands("llama_2_7b_64k", tmp_path, **arm):
        if program in TOOLS:
            importlib.import_module(TOOLS[program]).parser().parse_args(words)


def test_a_switch_is_on_with_1_and_off_with_0_or_nothing(tmp_path):
    switches = ("DOMAIN_TAGS", "INTERLEAVE", "UPSAMPLE", "TOY")
    plain = recipe("llama_2_7b_64k", cwd=tmp_path, DRY_RUN="1")
    for off in ("0", ""):
        settings = dict.fromkeys(switches, off)
        assert recipe("llama_2_7b_64k", cwd=tmp_path, DRY_RUN="1", **settings) == plain
    for name in switches:
        assert recipe("llama_2_7b_64k", cwd=tmp_path, **{"DRY_RUN": "1", name: "1"}) != plain
        said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, **{name: "true"})
        assert said == f"error: {name}=true: expected 1 or 0\n"


def test_yarns_factor_is_the_growth_of_the_context_to_the_last_digit(tmp_path):
    words = training("llama_2_7b_64k", tmp_path, ROPE_SCALING="yarn", SEQ_LENGTH="10240")[1]
    scaling = json.loads(words[words.index("--rope-parameters") + 1])
    assert scaling["factor"] == 10240 / 4096


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_tools_accept_every_other_command(name, tool, tmp_path):
    if not (ROOT / "tools" / tool).is_file():
        pytest.skip(f"tools/{tool} is not there")
    more = {"VERIFY_ARGS": "--no-logits", "EVALUATE_ARGS": "--allow-longer"}
    found = commands(name, tmp_path, UPSAMPLE="1", PERPLEXITY_TEXT="book.txt", **more)
    calls = [words for program, _, words in found if program == tool]
    assert calls, "no step runs it"
    parser = importlib.import_module(TOOLS[tool]).parser()
    parsed = [parser.parse_args(words) for words in calls]
    if tool == "convert_hf_to_megatron.py":
        assert parsed[0].extend_to == RECIPES[name][1]
    if tool == "evaluate_long_context.py":
        assert len(parsed[0].checkpoints) == 5
        assert parsed[0].checkpoints[-1].endswith("iter_0002000")
        assert max(parsed[0].seq_lengths) == RECIPES[name][1]


def test_steps_come_in_an_order_in_which_each_finds_what_it_needs(tmp_path):
    found = [tool for tool, _, _ in commands("llama_2_7b_64k", tmp_path, UPSAMPLE="1")]
    assert [name for name, _ in itertools.groupby(found)] == [
        "convert_hf_to_megatron.py",
        "verify_conversion.py",
        "preprocess_data.py",
        "upsample_long_documents.py",
        "plan_training.py",
        "train",
        "convert_megatron_to_hf.py",
        "verify_conversion.py",
        "evaluate_long_context.py",
    ]


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_planner_shows_that_the_layout_fits(name, gpu, tmp_path, accepted):
    """And that the scripts and docs/recipes.md say what the planner says."""
    planned, length, _ = RECIPES[name]
    args = accepted(training(name, tmp_path)[1])
    layout = Layout(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        dp=args.data_parallel_size,
    )
    layout = automatic(layout, known_shape(planned), find_gpu(gpu))
    asked = Question(planned, known_shape(planned), slimpajama_like(), find_gpu(gpu), 8, length, 8)
    plan = make_plan(asked, only=layout)
    (choice,) = plan.choices
    memory = choice.memory.total / 2**30
    script = (ROOT / f"examples/{name}.sh").read_text()
    assert f"the planner: {memory:.1f} of 74.4 GiB" in script
    flags = " ".join(RECOMPUTE_FLAGS[choice.layout.recompute]).split()
    words = training(name, tmp_path)[1]
    assert [word for word in words if word.startswith("--recompute")] == [
        word for word in flags if word.startswith("--recompute")
    ]
    page = (ROOT / "docs/recipes.md").read_text()
    (row,) = re.findall(rf"^\| `examples/{re.escape(name)}\.sh` \|.*\d GiB.*$", page, re.M)
    assert f"| {memory:.1f} GiB |" in row
    assert f"| {choice.time.total * args.train_iters / 3600:.1f} h |" in row


def test_two_nodes_get_their_rendezvous(tmp_path, accepted):
    launcher, words = training(
        "llama_3_8b_128k", tmp_path, NNODES="2", NODE_RANK="1", MASTER_ADDR="node7"
    )
    line = " ".join(launcher)
    assert "--nnodes 2 --node-rank 1 --master-addr node7 --master-port 29500" in line
    assert "--standalone" not in line
    assert accepted(words, gpus=16).data_parallel_size == 2


def test_more_arguments_win_over_the_recipes(tmp_path, accepted):
    _, words = training("llama_2_7b_64k", tmp_path, EXTRA_ARGS="--lr 1e-5 --packing best-fit")
    args = accepted(words)
    assert (args.lr, args.packing) == (1e-5, "best-fit")


@pytest.mark.parametrize(
    ("steps", "settings", "message"),
    [
        (["trian"], {}, "error: unknown step trian: expected some of: .* train "),
        ([], {"ATTENTION": "anchr"}, "error: ATTENTION=anchr: expected one of: anchor intra-"),
        ([], {"ROPE_SCALING": "dynamic"}, "error: ROPE_SCALING=dynamic: expected one of: none ntk"),
        ([], {"RECOMPUTE": "all"}, "error: RECOMPUTE=all: expected one of: none mlp full"),
        ([], {"SEQ_LENGTH": "64K"}, "error: SEQ_LENGTH=64K: expected a whole number, 1 or more"),
        ([], {"SEQ_LENGTH": "seq"}, "error: SEQ_LENGTH=seq: expected a whole number"),
        ([], {"ROPE_BASE": "5e6"}, "error: ROPE_BASE=5e6: expected a whole number"),
        ([], {"TP": "0"}, "error: TP=0: expected a whole number, 1 or more"),
        ([], {"TRAIN_ITERS": "1.5"}, "error: TRAIN_ITERS=1.5: expected a whole number"),
        ([], {"SAVE_LAST_EVERY": "0"}, "error: SAVE_LAST_EVERY=0: expected a whole number"),
        ([], {"TRAIN_ITERS": "20"}, "error: TRAIN_ITERS=20 has no room for the last SAVE_LAST=5"),
        ([], {"MIXTURE": "a=1"}, "error: MIXTURE=a=1: only UPSAMPLE=1 draws documents by it"),
        ([], {"DOMAIN_TAGS": "1", "DOMAIN_KEY": ""}, "error: DOMAIN_KEY is empty: DOMAIN_TAGS and"),
        (
            [],
            {"ROPE_SCALING": "ntk", "SEQ_LENGTH": "4096"},
            "error: SEQ_LENGTH=4096: ROPE_SCALING=ntk is for more than 4096",
        ),
        (["convert"], {"HF_MODEL": "nowhere"}, "error: nowhere/config.json does not exist: HF_MOD"),
        (["train"], {}, "error: work/.*/megatron_args.txt does not exist: run the step convert"),
        (["plan"], {}, r"error: corpora/.*_text_document.idx does not exist: run the step prepro"),
        (
            ["export"],
            {},
            "error: work/.*/iter_0002000 does not exist: run the step train to its end",
        ),
        (["verify"], {}, "error: work/.*-hf-2000/config.json does not exist: run the step export"),
        (["evaluate"], {}, "error: work/.*/iter_0001960 does not exist: train with SAVE_LAST=5"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_the_remedy(steps, settings, message, tmp_path):
    said = recipe("llama_2_7b_64k", *steps, cwd=tmp_path, expect=1, **settings)
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir()), "something was written"


def test_help_names_every_step_and_setting(tmp_path):
    said = recipe("llama_2_7b_64k", "--help", cwd=tmp_path)
    source = "".join(
        (ROOT / "examples" / file).read_text() for file in ("recipe/run.sh", "llama_2_7b_64k.sh")
    )
    settings = set(re.findall(r"\b([A-Z][A-Z_]+)=\$\{\1:?-", source))
    assert len(settings) > 20
    missing = {name for name in settings if name not in said}
    assert missing == {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}  # examples/slurm.sh sets them


def test_a_slurm_job_trains_on_all_nodes_and_does_the_rest_on_the_first(tmp_path):
    programs = {
        "scontrol": "printf 'node3\\nnode4\\n'",
        "srun": 'shift $(($# - 5)); for node in 0 1; do SLURM_NODEID=$node "$@"; done',
        "recipe.sh": '[[ $1 == --steps ]] && printf "plan\\ntrain\\nexport\\n" || echo '
        '"$1 ${NODE_RANK:-first} $NNODES $MASTER_ADDR:$MASTER_PORT $GPUS_PER_NODE"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_ID": "70123",
        "SLURM_GPUS_ON_NODE": "8",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    run = [ROOT / "examples/slurm.sh", tmp_path / "recipe.sh"]
    said = subprocess.check_output(run, env=slurm, text=True)
    where = "2 node3:20123 8"
    assert said.splitlines() == [
        f"plan first {where}",
        f"train 0 {where}",
        f"train 1 {where}",
        f"export first {where}",
    ]
    said = subprocess.check_output([*run, "export"], env=slurm, text=True)
    assert said.splitlines() == [f"export first {where}"]
    wrong = [ROOT / "examples/slurm.sh", ROOT / "examples/llama_2_7b_64k.sh"]
    done = subprocess.run(wrong, env=slurm | {"ATTENTION": "anchr"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ATTENTION=anchr: expected one of" in done.stderr


def test_every_step_of_a_slurm_job_runs_in_the_container_that_is_named(tmp_path):
    """The stand-in for srun with pyxis says what it was asked for, and runs the rest."""
    programs = {
        "scontrol": "echo node3",
        "srun": "options=(); while [[ $1 == --* ]]; do case $1 in --kill-* | --no-*) "
        'options+=("$1"); shift;; *) options+=("$1 $2"); shift 2;; esac; done\n'
        'printf "%s\\n" "${options[@]}" >>options; SLURM_NODEID=0 INSIDE=yes "$@"',
        "recipe.sh": '[[ $INSIDE ]] || exit 9\n[[ $1 == --steps ]] && printf "plan\\ntrain\\n" || '
        'echo "$1 ${DRY_RUN-}"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node3",
        "SLURM_JOB_ID": "70123",
        "CONTAINER": "/images/one.sqsh",
        "CONTAINER_MOUNTS": "/data:/data",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    run = [ROOT / "examples/slurm.sh", tmp_path / "recipe.sh"]
    said = subprocess.check_output(run, env=slurm, text=True, cwd=tmp_path)
    assert [line.strip() for line in said.splitlines()] == ["plan", "train"]
    options = (tmp_path / "options").read_text().splitlines()
    calls = 4  # the steps' names, the dry run, plan, train
    assert options.count("--container-image /images/one.sqsh") == calls
    assert options.count(f"--container-mounts {tmp_path}:{tmp_path},/data:/data") == calls
    assert options.count(f"--container-workdir {tmp_path}") == calls
    assert options.count("--no-container-mount-home") == calls


def test_a_slurm_job_begins_nothing_when_one_of_its_steps_is_unknown(tmp_path):
    script, recipe = ROOT / "examples/slurm.sh", ROOT / "examples/llama_2_7b_64k.sh"
    begun = tmp_path / "begun"
    (tmp_path / "scontrol").write_text(f"#!/usr/bin/env bash\ntouch {begun}\n")
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = [script, recipe, "train", "exprot"]
    done = subprocess.run(run, env=slurm, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: unknown step exprot" in done.stderr
    assert not begun.exists()
    done = subprocess.run([script, recipe], env={"PATH": slurm["PATH"]}, capture_output=True)
    assert done.returncode == 1
    assert b"this is no Slurm job: start it with sbatch" in done.stderr
