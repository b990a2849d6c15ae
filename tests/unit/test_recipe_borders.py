"""What comes into a recipe from outside: trackers, files of flags, settings, signals, jobs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.test_recipes import recipe, training
from tests.unit.test_shell_words import HOSTILE, bash_words

ROOT = Path(__file__).parents[2]
RUN = Path("work/llama_2_7b_64k/65536-anchor-rope5000000")
TOUCH = ("TP[$(touch hit)]", "a[$(touch hit)]", "$(touch hit)", "`touch hit`", "x; touch hit")

few = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
values = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30
)


def with_hostile(test):
    for text in filter(None, HOSTILE):
        test = example(text)(test)
    return test


def track(folder: Path, text: str) -> None:
    (folder / RUN).mkdir(parents=True, exist_ok=True)
    (folder / RUN / "latest_checkpointed_iteration.txt").write_text(text)


@pytest.mark.parametrize("text", [*TOUCH, "", "release", "12 14", "-3", "1e3", "0x10", "9" * 30])
@pytest.mark.parametrize("dry", ["", "1"])
def test_a_tracker_is_a_number_or_refused(text, dry, tmp_path):
    training("llama_2_7b_64k", tmp_path)  # the file of flags is there
    track(tmp_path, text)
    corpus = tmp_path / "corpora/slimpajama-llama-2_text_document.idx"
    corpus.parent.mkdir()
    corpus.touch()
    said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, expect=1, DRY_RUN=dry)
    assert "expected the number of an iteration" in said
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("text", ["8", "08\n", " 12 "])
def test_a_tracker_with_a_number_is_read_as_decimal(text, tmp_path):
    track(tmp_path, text)
    settings = {"TRAIN_ITERS": text.strip().lstrip("0"), "SAVE_LAST": "1", "DRY_RUN": "1"}
    said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, **settings)
    assert f"has iteration {settings['TRAIN_ITERS']}\n" in said


@pytest.mark.parametrize(
    "line",
    [
        *TOUCH,
        "--lr",
        "--lr 1 --wd 2",
        "--lr $(touch hit)",
        "--lr 'a b'",
        '--x {"a":"b c"}',
        "--x *",
    ],
)
def test_a_line_of_flags_is_one_flag_with_one_value_or_refused(line, tmp_path):
    training("llama_2_7b_64k", tmp_path)
    path = tmp_path / "work/llama_2_7b_64k/65536-start/megatron_args.txt"
    path.write_text(f"--num-layers 32\n{line}\n--hidden-size 4096")
    if not line.startswith("--"):
        said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, expect=1, DRY_RUN="1")
        assert "expected a flag and its value on each line" in said
        assert not (tmp_path / "hit").exists()
        return
    said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, DRY_RUN="1")
    words = bash_words(f"words {said.splitlines()[1]}", tmp_path)
    at = words.index("megatron_anchor.pretrain_gpt") + 1
    flag, _, value = line.partition(" ")
    expected = f"{flag}={value}" if value else flag
    assert words[at : at + 3] == ["--num-layers=32", expected, "--hidden-size=4096"]
    assert not (tmp_path / "hit").exists()


@few
@with_hostile
@given(values)
def test_a_setting_is_a_word_of_the_commands_whatever_it_holds(tmp_path, text):
    """Folders and names; printed commands are those that run, read back by bash."""
    settings = {
        "RUN": f"runs/{text}",
        "CORPUS": f"corpora/{text}",
        "HF_MODEL": f"models/{text}",
        "DOMAIN_KEY": text,
        "GPU": text,
        "MASTER_ADDR": text,
    }
    said = recipe("llama_2_7b_64k", cwd=tmp_path, DRY_RUN="1", NNODES="2", **settings)
    commands = [line for line in said.splitlines() if not line.startswith("== ")]
    words = [word for line in commands for word in bash_words(f"words {line}", tmp_path)]
    prefix = f"corpora/{text}_text_document"
    for expected in (f"models/{text}", f"{settings['CORPUS']}", prefix, text):
        assert expected in words
    assert settings["RUN"] in words
    assert not list(tmp_path.iterdir())


@few
@with_hostile
@given(values)
def test_words_of_a_setting_are_quoted_as_in_a_shell(tmp_path, text):
    more = f"--lr 1e-5 --packing {shlex.quote(text)}\n--log-interval 7"
    said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, DRY_RUN="1", EXTRA_ARGS=more)
    words = bash_words(f"words {said.split(chr(10), 1)[1]}", tmp_path)
    assert words[-6:] == ["--lr", "1e-5", "--packing", text, "--log-interval", "7"]
    assert not list(tmp_path.iterdir())


def test_words_that_are_no_words_are_refused(tmp_path):
    said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, DRY_RUN="1", EXTRA_ARGS="--x 'a")
    assert "error: EXTRA_ARGS=" in said
    assert "cannot be read as words" in said


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        ("--seq-length 128", "SEQ_LENGTH"),
        ("--save=elsewhere", "RUN"),
        ("--attention-pattern full", "ATTENTION"),
        ("--tensor-model-parallel-size 4", "TP"),
        ("--train-samples 9", "TRAIN_ITERS"),
        ("--save-last-every 3", "SAVE_LAST_EVERY"),
    ],
)
def test_what_other_steps_read_from_a_setting_is_not_taken_from_more_arguments(
    more, setting, tmp_path
):
    said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, DRY_RUN="1", EXTRA_ARGS=more)
    flag = more.split("=")[0].split()[0]
    assert said == f"error: EXTRA_ARGS has {flag}: set {setting}, which other steps read, too\n"


@pytest.mark.parametrize("more", ["--train-iters 400", "--lr 1e-5 --train-iters=400 --seed 3"])
@pytest.mark.parametrize("toy", ["", "1"])
def test_training_is_finished_by_the_number_of_iterations_that_the_run_has(more, toy, tmp_path):
    """Killed at 17 of 400, it goes on; and the steps behind it take iteration 400."""
    folder = tmp_path / f"work/llama_2_7b_64k{'-toy' if toy else ''}/65536-anchor-rope5000000"
    folder.mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("17")
    given = {"EXTRA_ARGS": more, "TOY": toy, "DRY_RUN": "1"}
    said = recipe("llama_2_7b_64k", "train", "export", cwd=tmp_path, **given)
    assert "has iteration" not in said
    assert "--train-iters 400" in said
    assert "iter_0000400 --out" in said
    tracker.write_text("400")
    said = recipe("llama_2_7b_64k", "train", cwd=tmp_path, **given)
    assert "has iteration 400" in said


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("TRAIN_ITERS", "8", "--train-iters 8"),
        ("SEQ_LENGTH", "32768", "--seq-length 32768"),
        ("GLOBAL_BATCH_SIZE", "6", "--global-batch-size 6"),
        ("SAVE_INTERVAL", "4", "--save-interval 4"),
        ("SAVE_LAST", "3", "--save-last 3"),
        ("SAVE_LAST_EVERY", "2", "--save-last-every 2"),
        ("TP", "4", "--tensor-model-parallel-size 4"),
        ("CP", "1", "--context-parallel-size 1"),
        ("PP", "2", "--pipeline-model-parallel-size 2"),
        ("GPUS_PER_NODE", "8", "--nproc-per-node 8"),
        ("CORPUS", "mine", "--data-path mine_text_document"),
        ("RULER_TASKS", "vt", "--tasks vt"),
        ("RULER_LENGTHS", "2048 4096", "--seq-lengths 2048 4096 --num"),
        ("NUM_SAMPLES", "5", "--num-samples 5"),
    ],
)
def test_a_toy_run_keeps_what_is_set(setting, value, flag, tmp_path):
    toy = {"DRY_RUN": "1", "TOY": "1"}
    assert flag not in recipe("llama_2_7b_64k", cwd=tmp_path, **toy)
    assert flag in recipe("llama_2_7b_64k", cwd=tmp_path, **toy, **{setting: value})


def test_a_toy_run_refuses_what_it_cannot_do(tmp_path):
    said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, DRY_RUN="1", TOY="1", NNODES="2")
    assert said == "error: NNODES=2: TOY=1 runs in one place; leave NNODES out\n"
    said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, TOY="1", TRAIN_ITERS="3", SAVE_LAST="4")
    assert "TRAIN_ITERS=3 has no room for the last SAVE_LAST=4" in said
    said = recipe("llama_2_7b_64k", cwd=tmp_path, DRY_RUN="1", TOY="1", TRAIN_ITERS="1")
    assert "--save-last 1 " in said


PROGRAM = """\
#!{python}
# Stands for python. As torchrun it starts one rank in a session of its own, which trains by
# waiting, and saves when it is told to stop.
import os, pathlib, signal, subprocess, sys, time

if sys.argv[1:3] == ["-m", "torch.distributed.run"]:
    sys.exit(subprocess.call([__file__, "rank", *sys.argv[1:]], start_new_session=True))
if sys.argv[1] != "rank":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
launcher = os.getppid()
run = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
run.mkdir(parents=True, exist_ok=True)


def save(*_):
    (run / "latest_checkpointed_iteration.txt").write_text("{saved}")
    sys.exit()


signal.signal(signal.SIGTERM, save)
pathlib.Path("command").write_text(" ".join(sys.argv))
pathlib.Path("begun").touch()
deadline = time.monotonic() + {seconds}
while time.monotonic() < deadline:
    if os.getppid() != launcher:
        sys.exit()
    time.sleep(0.05)
save()
"""


@pytest.fixture
def training_job(tmp_path):
    """Start the step train with a program that only counts, in a process group of its own."""
    training("llama_2_7b_64k", tmp_path)
    corpus = tmp_path / "corpora/slimpajama-llama-2_text_document.idx"
    corpus.parent.mkdir()
    corpus.touch()
    started = []

    def start(*, saved, seconds=60, **given):
        program = tmp_path / "python.sh"
        program.write_text(PROGRAM.format(python=sys.executable, saved=saved, seconds=seconds))
        program.chmod(0o755)
        known = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PYTHONPATH")}
        job = subprocess.Popen(
            [ROOT / "examples/llama_2_7b_64k.sh", "train"],
            cwd=tmp_path,
            env=known | {"PYTHON": str(program)} | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(job)
        while not (tmp_path / "begun").exists() and job.poll() is None:
            time.sleep(0.05)
        return job

    yield start
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize("send", [os.killpg, os.kill])
def test_a_job_that_is_told_to_end_saves_and_says_that_it_goes_on(training_job, tmp_path, send):
    """All processes of the job get the signal, or the recipe's shell alone: Slurm does both."""
    job = training_job(saved=120, SAVE_ON_TERM="1")
    send(job.pid, signal.SIGTERM)
    said, _ = job.communicate(timeout=30)
    assert job.returncode == 75, said
    assert "has iteration 120 of 2000: start this again to go on" in said
    command = (tmp_path / "command").read_text()
    assert " --exit-signal-handler " in command
    assert " --signals-to-handle SIGINT,SIGHUP,SIGQUIT " in command


def test_the_status_of_a_job_that_ended_stands_when_a_late_signal_comes():
    late = """\
import os, runpy, signal, sys

forward = runpy.run_path(sys.argv[1])["main"]
status = forward([sys.executable, "-c", "raise SystemExit(5)"])
os.kill(os.getpid(), signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
sys.exit(status)
"""
    command = [sys.executable, "-c", late, ROOT / "examples/recipe/forward_term.py"]
    assert subprocess.run(command, check=False).returncode == 5


LAUNCHER = """\
import subprocess, sys

rank = subprocess.Popen([sys.executable, "rank.py"], start_new_session=True)
sys.exit(rank.wait())
"""
RANK = """\
import pathlib, signal, time

time.sleep(1)  # no handler yet: Megatron installs its own while it starts
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
deadline = time.monotonic() + 20
while not told and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(1.5)  # saving
pathlib.Path("told").write_text(str(len(told)))
"""


def test_a_rank_gets_the_signal_once_and_not_before_it_handles_it(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    forward = [sys.executable, ROOT / "examples/recipe/forward_term.py"]
    job = subprocess.Popen([*forward, sys.executable, "launcher.py"], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while len(psutil.Process(job.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(2):
        job.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert job.wait(60) == 0
    assert (tmp_path / "told").read_text() == "1"


@pytest.mark.parametrize("name", ["my work", "w*k", "w[1]"])
def test_a_folder_that_flags_cannot_name_is_refused_before_anything_runs(tmp_path, name):
    for work in (name, str(tmp_path / name / "x")):
        said = recipe("llama_2_7b_64k", cwd=tmp_path, expect=1, DRY_RUN="1", WORK=work)
        assert "has a space or a wildcard: set WORK to another" in said
    (tmp_path / name).mkdir()
    said = recipe("llama_2_7b_64k", cwd=tmp_path / name, expect=1, DRY_RUN="1")
    assert "has a space or a wildcard" in said


def test_a_training_that_ends_early_and_saved_nothing_is_no_success(training_job, tmp_path):
    track(tmp_path, "5")
    said, _ = (job := training_job(saved=5, seconds=0)).communicate(timeout=30)
    assert job.returncode == 1
    assert "error: no checkpoint was saved since the start" in said
    said, _ = (job := training_job(saved=2000, seconds=0)).communicate(timeout=30)
    assert job.returncode == 0, said
    assert "--exit-signal-handler" not in (tmp_path / "command").read_text()


def test_a_second_job_on_a_run_waits_for_the_first_and_not_for_its_remains(training_job, tmp_path):
    first = training_job(saved=3)
    said, _ = (second := training_job(saved=4, seconds=0)).communicate(timeout=30)
    assert second.returncode == 1
    assert f"another job is at it (process {first.pid} on " in said
    assert "wait for its end, or give this one a RUN and EXPORT of its own" in said
    for word in ("--resume", "--overwrite"):
        assert word not in said
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 20
    while True:  # the last process of the first job goes
        said, _ = (third := training_job(saved=2000, seconds=0)).communicate(timeout=30)
        if third.returncode == 0 or time.monotonic() > deadline:
            break
    assert third.returncode == 0, said


SLURM = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_ID": "70123",
}


@pytest.fixture
def slurm_job(tmp_path):
    """Run examples/slurm.sh with stand-ins; the recipe ends its training with a status."""

    def run(status, *steps):
        programs = {
            "scontrol": 'echo "scontrol $*" >>calls; echo node3; echo node4',
            "srun": 'shift $(($# - 5)); for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done',
            "recipe.sh": '[[ $1 == --steps ]] && printf "train\\nexport\\n" && exit\n'
            f'[[ -n ${{DRY_RUN:-}} ]] && exit\necho "$1 $SAVE_ON_TERM" >>calls\n'
            f"[[ $1 != train ]] || exit {status}",
        }
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        environment = SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            [ROOT / "examples/slurm.sh", tmp_path / "recipe.sh", *steps],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("status", "ends_with", "calls"),
    [
        (0, 0, ["train 1", "train 1", "export 1"]),
        (75, 0, ["train 1", "scontrol requeue 70123"]),
        (3, 3, ["train 1"]),
    ],
)
def test_a_job_whose_training_was_asked_to_stop_is_queued_again(
    status, ends_with, calls, slurm_job
):
    code, called = slurm_job(status)
    assert called[1:] == calls
    assert called[0].startswith("scontrol show hostnames")
    assert code == ends_with


def test_slurm_is_asked_for_a_signal_long_before_the_end():
    text = (ROOT / "examples/slurm.sh").read_text()
    assert "\n#SBATCH --requeue\n" in text
    [line] = [line for line in text.splitlines() if line.startswith("#SBATCH --signal=")]
    name, seconds = line.split("=")[1].split("@")
    assert name == "TERM", "Megatron's --exit-signal, and what a preemption sends"
    assert int(seconds) >= 120


def test_a_job_number_that_is_none_ends_the_job(tmp_path, slurm_job, monkeypatch):
    monkeypatch.setitem(SLURM, "SLURM_JOB_ID", "x[$(touch hit)]")
    code, _ = slurm_job(0)
    assert code == 1
    assert not (tmp_path / "hit").exists()
