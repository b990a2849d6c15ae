"""Which checkpoint a start loads, and whether a run can go on from it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_anchor import compat
from megatron_anchor.training import resumed_run
from megatron_anchor.training.saved_checkpoints import refusals as cannot_be_loaded
from megatron_anchor.training.stored_run import NON_PERSISTENT, StoredRun, stored_run

RUN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "data_parallel_size": 8,
    "context_parallel_size": 1,
    "overlap_grad_reduce": False,
    "ddp_bucket_size": None,
    "ddp_num_buckets": None,
    "num_experts": None,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "params_dtype": torch.bfloat16,
    "transformer_impl": "local",
    "lr": 1e-3,
    "min_lr": 0.0,
    "decoupled_lr": None,
    "vocab_file": None,
    "data_parallel_random_init": False,
    "phase_transition_iterations": None,
    "global_batch_size": 8,
    "max_position_embeddings": 64,
    "no_load_optim": False,
    "override_opt_param_scheduler": True,
    "use_checkpoint_opt_param_scheduler": False,
}


def reasons(folder: Path, *, weights_only: bool = False, kind: str = "dp_reshardable", **ours: Any):
    """Reasons against a run that differs in `ours` from the one that wrote the checkpoint."""
    stored = StoredRun(folder=folder, flag="load", weights_only=weights_only)
    state = {"args": Namespace(**RUN), "content_metadata": {"distrib_optim_sharding_type": kind}}
    vars(stored)["state"] = state
    return list(resumed_run.refusals(Namespace(**{**RUN, **ours}), stored))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 1 -> 2"),
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 2 -> 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual pipeline stages None -> 2"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl local -> transformer_en"),
    ],
)
def test_buffers_fit_one_layout_only(change: dict, words: str, tmp_path: Path) -> None:
    [reason] = reasons(tmp_path, **change)
    assert words in reason
    assert "--ckpt-convert-format torch_dist" in reason
    assert not reasons(tmp_path, kind="fully_reshardable", **change)
    assert not reasons(tmp_path, no_load_optim=True, **change)
    assert not reasons(tmp_path, weights_only=True, **change)


def test_other_ranks_that_share_samples_read_the_same_buffers(tmp_path: Path) -> None:
    same = {"data_parallel_size": 4, "context_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert not reasons(tmp_path, **same)


@pytest.mark.parametrize(
    ("change", "parameters", "fits"),
    [
        ({"overlap_grad_reduce": True}, 39_000_000, True),
        ({"overlap_grad_reduce": True}, 41_000_000, False),
        ({"overlap_grad_reduce": True, "data_parallel_size": 64}, 41_000_000, True),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 1000}, 1001, False),
        ({"overlap_grad_reduce": True, "ddp_num_buckets": 5}, 1001, False),
        ({"ddp_bucket_size": 1000, "ddp_num_buckets": 5}, 1001, True),
    ],
)
def test_buckets_matter_where_a_buffer_is_larger_than_one(
    change: dict, parameters: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
    half = SimpleNamespace(size=torch.Size([parameters // 2]))
    rest = SimpleNamespace(size=torch.Size([parameters - parameters // 2]))
    entries = {f"{name}.bucket_idx_0.param": half, f"{name}.bucket_idx_1.param": rest}
    entries |= {f"{name}.bucket_idx_0.exp_avg": half, "embedding.weight": rest}
    metadata = SimpleNamespace(state_dict_metadata=entries)
    monkeypatch.setattr(resumed_run, "load_metadata", lambda _: metadata)
    found = reasons(tmp_path, **change)
    assert bool(found) is not fits
    assert fits or "buckets of at most" in found[0]


def test_buckets_are_as_large_as_the_host_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.training import training as host

    for size, ranks in ((None, 8), (None, 64), (123, 8)):
        config = DistributedDataParallelConfig(bucket_size=size, overlap_grad_reduce=True)
        monkeypatch.setattr(host, "get_pg_size", lambda _, ranks=ranks: ranks)
        theirs = host.resolve_ddp_bucket_size(config, None, True, 10**9)
        changed = {
            "overlap_grad_reduce": True,
            "ddp_bucket_size": size,
            "data_parallel_size": ranks,
        }
        assert resumed_run._bucket_size(Namespace(**{**RUN, **changed})) == theirs


@pytest.mark.parametrize("name", ["lr", "min_lr", "decoupled_lr"])
def test_a_rate_that_finds_no_group_of_parameters_is_refused(name: str, tmp_path: Path) -> None:
    [reason] = reasons(tmp_path, **{name: 0.5})
    assert reason.startswith(f"--{name.replace('_', '-')} 0.5: the checkpoint has {RUN[name]}")
    assert not reasons(tmp_path, no_load_optim=True, **{name: 0.5})


def test_every_key_by_which_the_host_finds_a_group_is_compared() -> None:
    """A later host may add one."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    from_rates = {"max_lr", "min_lr", "is_decoupled_lr"}
    constant = {"start_wd", "end_wd", "wd_mult", "optimizer", "lr_mult", "is_expert_parallel"}
    assert set(param_group_identifier_keys) == from_rates | constant


def test_precision_matters_to_the_plain_optimizer_alone(tmp_path: Path) -> None:
    assert not reasons(tmp_path, params_dtype=torch.float32)
    found = reasons(tmp_path, params_dtype=torch.float32, use_distributed_optimizer=False)
    assert [reason.split(", which")[0].rsplit(" ", 2)[1] for reason in found] == [
        "--use-distributed-optimizer",
        "precision",
    ]


@pytest.mark.parametrize(("theirs", "ours", "fits"), [(1, 2, False), (4, 1, False), (2, 4, True)])
def test_experts_have_a_second_optimizer_from_two_ranks_on(
    theirs: int, ours: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUN, "expert_model_parallel_size", theirs)
    monkeypatch.setitem(RUN, "num_experts", 8)
    found = reasons(tmp_path, kind="fully_reshardable", expert_model_parallel_size=ours)
    assert bool(found) is not fits
    assert fits or f"--expert-model-parallel-size {theirs} -> {ours}" in found[0]


def test_what_the_host_asserts_when_it_goes_on_is_said_before(tmp_path: Path) -> None:
    longer = {"max_position_embeddings": 128}
    assert not reasons(tmp_path, **longer)
    [reason] = reasons(tmp_path, vocab_file="vocab.json", **longer)
    assert "--max-position-embeddings 128: Megatron goes on with" in reason
    assert not reasons(tmp_path, weights_only=True, vocab_file="vocab.json", **longer)
    assert reasons(tmp_path, phase_transition_iterations=[3], global_batch_size=16)


def test_files_of_each_rank_fit_their_layout_only(tmp_path: Path) -> None:
    rank = tmp_path / "mp_rank_00_000"
    rank.mkdir()
    (rank / "model_optim_rng.pt").touch()
    found = reasons(tmp_path, kind="", weights_only=True, tensor_model_parallel_size=2)
    assert "--ckpt-format torch loads at its own layout only" in found[0]


def loading(**changed: Any) -> Namespace:
    settings = {
        "load": None,
        "pretrained_checkpoint": None,
        "finetune": False,
        "ckpt_step": None,
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
    }
    return Namespace(**{**settings, **{k: v and str(v) for k, v in changed.items()}})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run at iteration 8, a converted model, an empty folder, a newer non-persistent state."""
    for folder, tracked, names in (
        ("run", "8", ("iter_0000004", "iter_0000008")),
        ("converted", "release", ("release",)),
        (f"run/{NON_PERSISTENT}", "9", ("iter_0000009",)),
        ("empty", None, ()),
    ):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "metadata.json").write_text("{}")
        (tmp_path / folder).mkdir(exist_ok=True)
        if tracked:
            (tmp_path / folder / compat.TRACKER).write_text(tracked)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "folder", "weights_only"),
    [
        ({"load": "run"}, "run/iter_0000008", False),
        ({"load": "run", "finetune": True}, "run/iter_0000008", True),
        ({"load": "run", "pretrained_checkpoint": "converted"}, "run/iter_0000008", False),
        ({"load": "empty", "pretrained_checkpoint": "converted"}, "converted/release", True),
        ({"pretrained_checkpoint": "run"}, "run/iter_0000008", True),
        ({"load": "converted"}, "converted/release", True),
        ({"load": "run", "ckpt_step": 4}, "run/iter_0000004", False),
        (
            {"load": "run", "non_persistent_ckpt_type": "global"},
            f"run/{NON_PERSISTENT}/iter_0000009",
            False,
        ),
        ({"load": "empty"}, None, False),
        ({"load": "run", "non_persistent_ckpt_type": "local"}, None, False),
        ({}, None, False),
    ],
)
def test_the_checkpoint_is_the_one_that_megatron_takes(
    arguments: dict, folder: str | None, weights_only: bool, runs: Path
) -> None:
    args = loading(**arguments)
    args.ckpt_step = arguments.get("ckpt_step")
    for name in ("load", "pretrained_checkpoint"):
        if value := getattr(args, name):
            setattr(args, name, str(runs / value))
    assert not list(cannot_be_loaded(args))
    found = stored_run(args)
    if folder is None:
        assert found is None
        return
    assert found is not None
    assert (found.folder, bool(found.weights_only)) == (runs / folder, weights_only)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"load": "run/iter_0000004"},
            r"is the folder of one iteration: give --load .*/run --ckpt-step 4$",
        ),
        ({"load": "converted/release"}, r"is the folder of one iteration: give --load .*verted$"),
        ({"load": "run", "ckpt_step": 5}, r"--ckpt-step 5: .* \(whole are: 4, 8\)"),
    ],
)
def test_what_would_begin_with_random_weights_or_a_traceback_is_refused(
    arguments: dict, message: str, runs: Path
) -> None:
    args = loading()
    for name, value in arguments.items():
        setattr(args, name, value if name == "ckpt_step" else str(runs / value))
    [reason] = cannot_be_loaded(args)
    with pytest.raises(ValueError, match=message):
        raise ValueError(reason)


@pytest.mark.parametrize("load", [None, "empty"])
def test_a_pretrained_model_that_is_not_there_is_refused(load: str | None, runs: Path) -> None:
    args = loading(load=load and runs / load, pretrained_checkpoint=runs / "empty")
    with pytest.raises(ValueError, match=r"--pretrained-checkpoint .*empty: there is no latest_ch"):
        stored_run(args)
    args.pretrained_checkpoint = "s3://bucket/model"
    assert stored_run(args) is None
