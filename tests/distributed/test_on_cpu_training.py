"""Megatron's own loop, model and attention, launched by torchrun through `on_cpu`.

This file is also the program that is launched: a GPT on mock data, with nothing of this project in
it. Curves are read from TensorBoard, where Megatron writes them in float32.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretraining import read_scalars
from tests.distributed.ranks import run_ranks

ARGUMENTS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64 "
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-3 --lr-decay-style constant --train-iters 4 --eval-interval 9 --eval-iters 0 "
    "--log-interval 1 --tensorboard-log-interval 1 --distributed-timeout-minutes 3 "
    "--save-interval 2 "
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    "--transformer-impl local --no-rope-fusion --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion "
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 "
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 "
)
SCALARS = ("lm loss", "grad-norm")
ROOT = Path(__file__).parents[2]


def pretrain() -> None:
    """The program: what upstream's pretrain_gpt.py does, for mock data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training import pretrain as megatron_pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    def datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
        args = get_args()
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            tokenizer=build_tokenizer(args),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            split="1,0,0",
        )
        return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
        loss_mask = batch["loss_mask"].flatten()
        out = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
        )

        def loss_of(losses: Any) -> Any:
            total = (losses.float().flatten() * loss_mask).sum()
            count = loss_mask.sum().int()
            report = torch.stack((total.detach(), count.float()))
            return total, count, {"lm loss": report}

        return out, loss_of

    import torch

    datasets.is_distributed = True
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    megatron_pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


def run(folder: Path, arguments: str, *, ranks: int) -> dict[str, dict[int, float]]:
    """Train on forked ranks and read {scalar: {iteration: value}}."""
    run_ranks(run_program, ranks, f"{arguments} --tensorboard-dir {folder}")
    return read_scalars(folder)


def run_program(arguments: str) -> None:
    """Run the program in this process with a command line."""
    multiprocessing.set_start_method("fork", force=True)  # as in a process that a shell started
    sys.argv = [__file__, *(ARGUMENTS + arguments).split()]
    pretrain()


def launch(folder: Path, arguments: str, *, ranks: int) -> dict[str, dict[int, float]]:
    """Train as a user would, from a shell, and read {scalar: {iteration: value}}."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "megatron_anchor.on_cpu", __file__]
    done = subprocess.run(
        [*command, *(ARGUMENTS + arguments).split(), "--tensorboard-dir", str(folder)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, "\n".join(
        line for line in done.stderr.splitlines() if line.startswith("[rank0]")
    )
    return read_scalars(folder)


def go_back_to(iteration: int, checkpoint: Path) -> None:
    """Make an earlier iteration of a checkpoint folder the one that is resumed."""
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_a_one_process_run_continues_at_tp2_pp2_on_the_same_curve(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    whole = run(tmp_path / "one", f"{NO_DROPOUT} --save {checkpoint}", ranks=1)
    go_back_to(2, checkpoint)
    resumed = launch(
        tmp_path / "four",
        f"{NO_DROPOUT} --load {checkpoint} "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ranks=4,
    )
    for name in SCALARS:
        assert list(resumed[name]) == [3, 4]
        for iteration, value in resumed[name].items():
            assert value == pytest.approx(whole[name][iteration], rel=1e-5)
    assert whole["lm loss"][4] < whole["lm loss"][1] - 0.05, "the curve must move"


def test_experts_with_dropout_and_async_save_resume_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    arguments = f"{EXPERTS} --bf16 --hidden-dropout 0.2 --num-workers 2 "
    whole = run(
        tmp_path / "whole",
        f"{arguments} --save {checkpoint} "
        "--async-save --use-persistent-ckpt-worker --async-strategy mcore",
        ranks=2,
    )
    go_back_to(2, checkpoint)
    resumed = run(tmp_path / "resumed", f"{arguments} --load {checkpoint}", ranks=2)
    for name in SCALARS:
        assert resumed[name] == {iteration: whole[name][iteration] for iteration in (3, 4)}


if __name__ == "__main__":
    pretrain()
