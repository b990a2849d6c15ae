"""What a start makes of the checkpoint that it loads, through the program itself."""

from __future__ import annotations

import os
import pickle
import shutil
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.distributed import pretraining
from tests.distributed.pretraining import write_corpus
from tests.reliability.jobs import Ended, run, run_ranks_until_one_ends

DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    prefix = write_corpus(folder / "few", [30, 5, 90, 1] * 20)
    return f"--data-path {prefix} --data-cache-path {folder}/cache "


def without_model_flags() -> None:
    """Leave the description of the model to the arguments of the test."""
    pretraining.MODEL = f"--seq-length {pretraining.S} "


def as_stock_megatron() -> None:
    """Record what Megatron's own program would: none of our arguments."""
    from megatron.training import checkpointing as host

    from megatron_anchor.training.arguments import AnchorArguments

    generate = host.generate_state_dict

    def generate_state_dict(args: Namespace, *rest: object, **settings: object) -> dict:
        state = generate(args, *rest, **settings)
        ours = {field.name for field in fields(AnchorArguments)}
        state["args"] = Namespace(**{k: v for k, v in vars(args).items() if k not in ours})
        return state

    host.generate_state_dict = generate_state_dict


def losses(ended: Ended) -> list[float]:
    assert ended.exit_code == 0, ended.log[-3000:]
    return [loss for loss, _ in ended.curve.values()]


@pytest.fixture(scope="module")
def qwen_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model whose norms on queries and keys, and their epsilon, matter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_anchor.checkpoint.cli_to_megatron import main

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=pretraining.VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=pretraining.S,
            rms_norm_eps=1e-2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=0,
        )
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.2, 2)
    model.save_pretrained(folder / "hf")
    assert main(["--hf", str(folder / "hf"), "--out", str(folder / "megatron")]) == 0
    return folder / "megatron"


@pytest.fixture(scope="module")
def qwen_3_loss(qwen_3: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The first loss of a run with the flags of megatron_args.txt."""
    ended = run(
        f"{corpus} --train-iters 1 --pretrained-checkpoint {qwen_3} "
        + (qwen_3 / "megatron_args.txt").read_text(),
        log=tmp_path_factory.mktemp("log") / "log",
        before=without_model_flags,
    )
    assert "is changed:" not in ended.log
    [loss] = losses(ended)
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_converted_model_begins_with_one_loss_however_its_flags_come(
    ranks: int, qwen_3: Path, qwen_3_loss: float, corpus: str, tmp_path: Path
) -> None:
    arguments = f"{corpus} --train-iters 1 --pretrained-checkpoint {qwen_3} --use-checkpoint-args "
    if ranks == 1:
        found = [run(arguments, log=tmp_path / "log", before=without_model_flags)]
    else:
        arguments += f"--tensor-model-parallel-size {ranks} "
        log = tmp_path / "log"
        ended = run_ranks_until_one_ends(arguments, ranks, log=log, before=without_model_flags)
        found = list(ended.values())
    for ended in found:
        assert losses(ended) == pytest.approx([qwen_3_loss], abs=2e-6)
    assert "by --use-checkpoint-args: --anchor-token 1 --norm-epsilon 0.01 --qk-layernorm" in (
        found[0].log
    )


def test_flags_of_another_model_than_the_checkpoints_are_refused_with_both_values(
    qwen_3: Path, corpus: str, tmp_path: Path
) -> None:
    flags = (qwen_3 / "megatron_args.txt").read_text()
    wrong = flags.replace("--qk-layernorm\n", "").replace("--norm-epsilon 0.01\n", "")
    assert len(wrong) < len(flags)
    ended = run(
        f"{corpus} --train-iters 1 --pretrained-checkpoint {qwen_3} {wrong}",
        log=tmp_path / "log",
        before=without_model_flags,
    )
    assert ended.exit_code == 2
    assert "  - --norm-epsilon 1e-05 here, --norm-epsilon 0.01 there\n" in ended.log
    assert "  - no --qk-layernorm here, --qk-layernorm there\n" in ended.log
    assert "Traceback" not in ended.log


def test_a_meant_change_is_said_and_done(
    qwen_3: Path, qwen_3_loss: float, corpus: str, tmp_path: Path
) -> None:
    ended = run(
        f"{corpus} --train-iters 1 --pretrained-checkpoint {qwen_3} --use-checkpoint-args "
        "--rotary-base 50 --allow-model-change norm-epsilon --attention-pattern full",
        log=tmp_path / "log",
        before=without_model_flags,
    )
    [loss] = losses(ended)
    assert abs(loss - qwen_3_loss) > 1e-3
    assert "is changed: --rotary-base 1000000 -> --rotary-base 50\n" in ended.log


SAVED = "--train-iters 6 --exit-interval 3 --save-interval 3 --norm-epsilon 1e-4 "


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of six iterations, by the distributed optimizer, that can be loaded at one layout."""
    folder = tmp_path_factory.mktemp("saved")
    arguments = f"{corpus} {SAVED} --use-distributed-optimizer --save {folder} "
    losses(run(arguments, log=folder / "log"))
    return folder


def test_a_checkpoint_of_stock_megatron_is_compared_and_restored(
    corpus: str, tmp_path: Path
) -> None:
    arguments = f"{corpus} {SAVED} --save {tmp_path} --attention-pattern full "
    losses(run(arguments, log=tmp_path / "log", before=as_stock_megatron))
    going_on = f"{corpus} --train-iters 6 --load {tmp_path} --attention-pattern full "
    wrong = run(going_on, log=tmp_path / "wrong")
    assert wrong.exit_code == 2
    assert "--norm-epsilon 1e-05 here, --norm-epsilon 0.0001 there" in wrong.log
    by_hand = losses(run(f"{going_on} --norm-epsilon 1e-4", log=tmp_path / "by_hand"))
    restored = run(
        f"{going_on} --use-checkpoint-args", log=tmp_path / "restored", before=without_model_flags
    )
    assert losses(restored) == by_hand
    assert len(by_hand) == 3
    assert "records no --attention-pattern: from here on full" in restored.log


def refused(arguments: str, log: Path) -> str:
    ended = run(arguments, log=log)
    assert ended.exit_code == 2, ended.log[-3000:]
    assert "Traceback" not in ended.log
    return ended.log


def test_what_fits_one_layout_only_is_named_and_its_remedy_helps(
    saved: Path, corpus: str, tmp_path: Path
) -> None:
    going_on = f"{corpus} --train-iters 6 --norm-epsilon 1e-4 --use-distributed-optimizer "
    at_its_layout = losses(run(f"{going_on} --load {saved}", log=tmp_path / "same"))
    two = "--tensor-model-parallel-size 2 "
    ended = run_ranks_until_one_ends(
        f"{going_on} {two} --load {saved}", 2, log=tmp_path / "refused"
    )
    said = "".join(job.log for job in ended.values())
    assert {job.exit_code for job in ended.values()} == {2}
    assert "saved without --dist-ckpt-optim-fully-reshardable" in said
    assert "(--tensor-model-parallel-size 1 -> 2)" in said
    remedy = "--dist-ckpt-optim-fully-reshardable --ckpt-convert-format torch_dist"
    assert f"{remedy} --ckpt-convert-save DIR" in said
    converted = tmp_path / "converted"
    done = run(
        f"{going_on} {remedy} --ckpt-convert-save {converted} --load {saved}",
        log=tmp_path / "converting",
    )
    assert done.exit_code == 0, done.log[-3000:]
    ended = run_ranks_until_one_ends(
        f"{going_on} {two} --load {converted}/torch_dist", 2, log=tmp_path / "going_on"
    )
    for job in ended.values():
        assert losses(job) == pytest.approx(at_its_layout, abs=2e-6)


def test_a_changed_learning_rate_is_refused_and_its_remedies_help(
    saved: Path, corpus: str, tmp_path: Path
) -> None:
    going_on = f"{corpus} --train-iters 6 --norm-epsilon 1e-4 --use-distributed-optimizer "
    going_on += f"--load {saved} --lr 1e-3 "
    for more in ("", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        log = refused(going_on + more, tmp_path / f"refused{more}")
        assert "--lr 0.001: the checkpoint has 0.002, by which Megatron finds" in log
        assert "give --lr 0.002 again; or --no-load-optim keeps" in log
    ended = run(f"{going_on} --no-load-optim", log=tmp_path / "going_on")
    assert len(losses(ended)) == 3
    assert "learning rate: 1.000000E-03" in ended.log


def test_a_changed_schedule_is_refused_and_its_remedies_help(
    saved: Path, corpus: str, tmp_path: Path
) -> None:
    going_on = f"{corpus} --train-iters 8 --norm-epsilon 1e-4 --use-distributed-optimizer "
    going_on += f"--load {saved} --weight-decay 0.2 "
    log = refused(going_on, tmp_path / "refused")
    assert "lr_decay_steps 32 (in samples; from --train-iters" in log
    assert "the checkpoint's schedule has 24" in log
    assert "end_wd 0.2" in log
    for remedy in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert len(losses(run(going_on + remedy, log=tmp_path / remedy))) == 5


@pytest.mark.parametrize(
    "change", ["", "--use-distributed-optimizer --optimizer sgd", "--bf16"], ids=str.strip
)
def test_another_optimizer_is_refused_before_anything_is_built(
    change: str, saved: Path, corpus: str, tmp_path: Path
) -> None:
    log = refused(
        f"{corpus} --train-iters 6 --norm-epsilon 1e-4 --load {saved} {change}", tmp_path / "log"
    )
    assert "the checkpoint's optimizer states were saved with" in log
    assert "go on as it was saved; or --no-load-optim keeps" in log


class Trap:
    """A pickle of it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("place", [".metadata", "common.pt"])
@pytest.mark.parametrize("flag", ["", "--use-checkpoint-args"])
def test_nothing_in_a_checkpoint_is_executed(
    place: str, flag: str, saved: Path, corpus: str, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    [folder] = (tmp_path / "run").glob("iter_*")
    trap = Trap(tmp_path / "executed")
    if place == "common.pt":
        torch.save({"args": trap}, folder / place)
    else:
        (folder / place).write_bytes(pickle.dumps(trap))
    log = refused(
        f"{corpus} --train-iters 6 --norm-epsilon 1e-4 --load {tmp_path}/run {flag}",
        tmp_path / "log",
    )
    assert "refused to unpickle" in log
    assert not (tmp_path / "executed").exists()
