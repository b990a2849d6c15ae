"""Every replacement is installed, serves its purpose, and is needed: leaving it out fails.

What `enable()` does lasts for a process, so the checks run in children: this file, run as a
program, forks one child per row, leaves that row out and tries what the row is for.
"""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_anchor.on_cpu.installer import Installer, Place
from megatron_anchor.on_cpu.rows import ROWS
from megatron_anchor.on_cpu.settings import SETTINGS
from megatron_anchor.patches import owner_of

ROOT = Path(__file__).parents[2]
TARGETS = [row.target for row in ROWS]
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

# ------------------------------------------------------------------ what each row is for: probes

LIKE = torch.ones(2, 2)
FACTORY_ARGUMENTS: dict[str, tuple] = {
    "arange": (3,),
    "as_tensor": ([1.0],),
    "asarray": ([1.0],),
    "empty": (3,),
    "empty_like": (LIKE,),
    "empty_strided": ((2, 2), (2, 1)),
    "eye": (3,),
    "full": ((2,), 1.0),
    "full_like": (LIKE, 1.0),
    "linspace": (0, 1, 3),
    "logspace": (0, 1, 3),
    "normal": (0.0, 1.0, (2,)),
    "ones": (3,),
    "ones_like": (LIKE,),
    "rand": (3,),
    "rand_like": (LIKE,),
    "randint": (3, (2,)),
    "randint_like": (LIKE, 3),
    "randn": (3,),
    "randn_like": (LIKE,),
    "randperm": (3,),
    "scalar_tensor": (1.0,),
    "tensor": ([1.0],),
    "tril_indices": (2, 2),
    "triu_indices": (2, 2),
    "zeros": (3,),
    "zeros_like": (LIKE,),
    "new_empty": (3,),
    "new_empty_strided": ((2, 2), (2, 1)),
    "new_full": ((2,), 1.0),
    "new_ones": (3,),
    "new_tensor": ([1.0],),
    "new_zeros": (3,),
}


def makes_cpu_tensors(name: str) -> None:
    """The factory takes every spelling of a CUDA device."""
    owner = LIKE if name.startswith("new_") else torch
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 1)):
        made = getattr(owner, name)(*FACTORY_ARGUMENTS[name], device=device)
        assert made.device.type == "cpu"


def empty_takes_pinned_memory() -> None:
    makes_cpu_tensors("empty")
    assert torch.empty(2, pin_memory=True).device.type == "cpu"


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(2, device=x.device)


def zeros_can_be_scripted() -> None:
    makes_cpu_tensors("zeros")
    assert torch.jit.script(_scripted)(torch.ones(2)).tolist() == [1.0, 1.0]


def to_cuda_is_no_copy_and_to_cpu_is_one() -> None:
    tensor = torch.ones(2)
    assert tensor.to("cuda:0") is tensor
    assert tensor.to(device=torch.device("cuda"), dtype=torch.float64).dtype == torch.float64
    assert tensor.to(0, torch.float16).dtype == torch.float16
    assert tensor.to(torch.device("cpu")) is tensor
    snapshot = tensor.to("cpu", non_blocking=True)
    tensor.zero_()
    assert snapshot.tolist() == [1.0, 1.0]
    layer = torch.nn.Linear(2, 2).to("cuda")
    assert layer.weight.device.type == "cpu"


def cpu_is_a_copy() -> None:
    tensor = torch.ones(2, requires_grad=True)
    snapshot = tensor.cpu()
    with torch.no_grad():
        tensor.zero_()
    assert snapshot.tolist() == [1.0, 1.0]
    snapshot.sum().backward()
    assert tensor.grad.tolist() == [1.0, 1.0]


def cuda_keeps_tensors_and_modules() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    assert layer.cuda(0).weight is weight


def types_are_named_cuda() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(1).type(torch.cuda.LongTensor).dtype == torch.int64
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def device_contexts_mean_the_cpu() -> None:
    with torch.device("cuda"):
        assert torch.ones(1).device.type == "cpu"
    with torch.device("meta"):
        assert torch.ones(1).device.type == "meta"
    torch.set_default_device("cuda")
    assert torch.ones(1).device.type == "cpu"


def autocast_casts() -> None:
    with warnings.catch_warnings(action="error"):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with torch.autocast("cuda"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def load_puts_gpu_tensors_on_the_cpu() -> None:
    with tempfile.TemporaryFile() as file:
        torch.save(torch.ones(2), file)
        for location in (None, "cuda:0", torch.device("cuda")):
            file.seek(0)
            assert torch.load(file, location, weights_only=True).device.type == "cpu"


def count_is_one_device_per_local_process() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    assert torch.cuda.device_count() == 4


def set_device_is_remembered() -> None:
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == 3
    torch.cuda.set_device(torch.device("cuda", 2))
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1


def device_block_ends() -> None:
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
    assert torch.cuda.current_device() == 0
    assert isinstance(torch.cuda.device(0), torch.cuda.device)


def properties_look_like_a_gpu() -> None:
    assert torch.cuda.get_device_properties(0).major == 10
    assert torch.cuda.get_device_capability() == (10, 0)
    assert torch.cuda.get_device_name() == "CPU in place of a GPU"


def generator_is_the_cpu_one() -> None:
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(7)
        first = torch.rand(3, device="cuda")
        seed(7)
        state = torch.cuda.get_rng_state()
        assert torch.equal(torch.rand(3, device="cuda"), first)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), first)


def accelerator_is_none() -> None:
    assert torch.accelerator.current_accelerator() is None
    assert not torch.accelerator.is_available()
    parameter = torch.ones(1, requires_grad=True)
    parameter.sum().backward()
    torch.optim.Adam([parameter]).step()


def events_measure_wall_time() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record(torch.cuda.current_stream())
    end.wait()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="not recorded"):
        start.elapsed_time(torch.cuda.Event())


def streams_are_done() -> None:
    stream = torch.cuda.Stream(device=0, priority=torch.cuda.Stream.priority_range()[1])
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(stream.record_event())
    stream.synchronize()
    assert stream.query()
    with stream, torch.cuda.stream(stream):
        assert torch.ones(1, device="cuda").item() == 1


def loader_pins_nothing() -> None:
    loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
    with warnings.catch_warnings(action="error"):
        assert [int(batch) for batch in loader] == [1, 2]


def loader_leaves_the_generator() -> None:
    state = torch.get_rng_state()
    assert len(list(torch.utils.data.DataLoader([1, 2]))) == 2
    assert torch.equal(torch.get_rng_state(), state)


def _child_has_cuda() -> None:
    assert torch.cuda.is_available()


def spawned_processes_are_enabled() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_child_has_cuda)
    process.start()
    process.join()
    assert process.exitcode == 0


def process_group_is_gloo() -> None:
    torch.distributed.init_process_group(
        "nccl",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    assert torch.distributed.get_backend() == "gloo"


def groups_are_gloo() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    group = torch.distributed.new_group([0], backend="nccl", device_id=torch.device("cuda", 0))
    assert torch.distributed.get_backend(group) == "gloo"
    torch.distributed.barrier(device_ids=[0])


def uneven_pieces_are_gathered() -> None:
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 1 if child == 0 else 0
        store = torch.distributed.FileStore(f"{folder}/store", 2)
        store.set_timeout(timedelta(seconds=20))
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
        for async_op in (False, True):
            pieces = [torch.empty(2, 1), torch.empty(3)]
            mine = torch.full((2, 1), 5.0) if rank == 0 else torch.full((3,), 6.0)
            work = torch.distributed.all_gather(pieces, mine, async_op=async_op)
            if async_op:
                work.wait()
            assert [piece.tolist() for piece in pieces] == [[[5.0], [5.0]], [6.0, 6.0, 6.0]]
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _distributed_optimizer(parameters: list[torch.Tensor]) -> object:
    """A DistributedOptimizer with what its state methods look at, around torch's Adam."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    self = DistributedOptimizer.__new__(DistributedOptimizer)
    self.optimizer = torch.optim.AdamW(parameters)
    self.grad_scaler = None
    self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    self.config = SimpleNamespace(fp16=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    self.model_param_group_index_map = {p: (0, i) for i, p in enumerate(parameters)}
    return self


def optimizer_has_a_step_before_the_first() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved = _distributed_optimizer([parameter]).state_dict()
    assert saved["optimizer"]["param_groups"][0]["step"] == 0


def loaded_steps_are_counted_per_parameter() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = _distributed_optimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.optimizer.step()
    assert [int(optimizer.optimizer.state[p]["step"]) for p in parameters] == [2, 2, 2]


def loaded_state_needs_no_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = _distributed_optimizer([parameter])
    optimizer.optimizer.step()
    loaded = {name: torch.full((2,), 3.0) for name in ("param", "exp_avg", "exp_avg_sq")}
    optimizer._set_main_param_and_optimizer_states(parameter, loaded)
    assert parameter.tolist() == [3.0, 3.0]
    assert int(optimizer.optimizer.state[parameter]["step"]) == 1


def helpers_need_no_make() -> None:
    from megatron.core.datasets.utils import compile_helpers

    compile_helpers()
    from megatron.core.datasets import helpers_cpp

    assert helpers_cpp.build_sample_idx_int32


def half_precision_softmax_runs() -> None:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType

    softmax = FusedScaleMaskSoftmax(
        input_in_fp16=False,
        input_in_bf16=True,
        attn_mask_type=AttnMaskType.causal,
        scaled_masked_softmax_fusion=True,
        mask_func=lambda scores, mask: scores.masked_fill(mask, -10000.0),
        softmax_in_fp32=True,
        scale=None,
    )
    out = softmax(torch.zeros(1, 4, 32, 32, dtype=torch.bfloat16), None)
    assert out[0, 0, 0].tolist() == [1.0] + [0.0] * 31


def is_true(ask: Callable[[], object]) -> None:
    assert ask()


def is_zero(ask: Callable[[], object]) -> None:
    assert ask() == 0


PROBES: dict[str, Callable[[], None]] = {
    **{
        f"torch:{'Tensor.' if name.startswith('new_') else ''}{name}": functools.partial(
            makes_cpu_tensors, name
        )
        for name in FACTORY_ARGUMENTS
    },
    "torch:empty": empty_takes_pinned_memory,
    "torch:zeros": zeros_can_be_scripted,
    "torch:Tensor.to": to_cuda_is_no_copy_and_to_cpu_is_one,
    "torch:Tensor.cpu": cpu_is_a_copy,
    "torch:Tensor.cuda": cuda_keeps_tensors_and_modules,
    "torch:Tensor.pin_memory": lambda: LIKE.pin_memory(),
    "torch:Tensor.is_cuda": lambda: is_true(lambda: LIKE.is_cuda),
    "torch:Tensor.type": types_are_named_cuda,
    "torch.utils._device:DeviceContext.__init__": device_contexts_mean_the_cpu,
    "torch.amp.autocast_mode:autocast.__init__": autocast_casts,
    "torch:load": load_puts_gpu_tensors_on_the_cpu,
    "torch.cuda:is_available": lambda: is_true(torch.cuda.is_available),
    "torch.cuda:is_initialized": lambda: is_true(torch.cuda.is_initialized),
    "torch.cuda:device_count": count_is_one_device_per_local_process,
    "torch.cuda:current_device": lambda: is_zero(torch.cuda.current_device),
    "torch.cuda:set_device": set_device_is_remembered,
    "torch.cuda:device": device_block_ends,
    "torch.cuda:get_device_properties": properties_look_like_a_gpu,
    "torch.cuda:default_generators": generator_is_the_cpu_one,
    "torch.cuda.memory:memory_stats": lambda: is_zero(
        lambda: torch.cuda.memory_stats()["reserved_bytes.all.current"]
    ),
    "torch.cuda.memory:mem_get_info": lambda: torch.cuda.mem_get_info(),
    "torch.cuda:device_memory_used": lambda: is_zero(torch.cuda.device_memory_used),
    "torch.cuda.memory:reset_peak_memory_stats": lambda: torch.cuda.reset_peak_memory_stats(),
    "torch.cuda:cudart": lambda: torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart()),
    "torch.accelerator:current_accelerator": accelerator_is_none,
    "torch.cuda:Stream": streams_are_done,
    "torch.cuda:Event": events_measure_wall_time,
    "torch.cuda:set_stream": lambda: torch.cuda.set_stream(torch.cuda.Stream()),
    "torch.cuda:current_stream": lambda: torch.cuda.current_stream(),
    "torch.cuda:default_stream": lambda: torch.cuda.default_stream(),
    "torch.cuda:synchronize": lambda: torch.cuda.synchronize(),
    "torch.cuda:is_current_stream_capturing": lambda: torch.cuda.is_current_stream_capturing(),
    "torch:Tensor.record_stream": lambda: LIKE.record_stream(torch.cuda.current_stream()),
    "torch.utils.data:DataLoader.__init__": loader_pins_nothing,
    "torch.utils.data:DataLoader.__iter__": loader_leaves_the_generator,
    "multiprocessing.spawn:get_preparation_data": spawned_processes_are_enabled,
    "torch.distributed.distributed_c10d:init_process_group": process_group_is_gloo,
    "torch.distributed.distributed_c10d:new_group": groups_are_gloo,
    "torch.distributed.distributed_c10d:all_gather": uneven_pieces_are_gathered,
    f"{OPTIMIZER}.state_dict": optimizer_has_a_step_before_the_first,
    f"{OPTIMIZER}.load_state_dict": loaded_steps_are_counted_per_parameter,
    f"{OPTIMIZER}._set_main_param_and_optimizer_states": loaded_state_needs_no_step,
    "megatron.core.datasets.utils:compile_helpers": helpers_need_no_make,
    "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available": (
        half_precision_softmax_runs
    ),
}

# ---------------------------------------------------------------------- trying them, in children


def _outcome(probe: Callable[[], None], left_out: list[Place] | None = None) -> str:
    """Run a probe in a fork, some places as they were; return what it raised, "" for nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        error = ""
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        try:
            for place in left_out or []:
                setattr(*place)
            probe()
        except BaseException:
            error = traceback.format_exc()
        os.write(writer, error.encode()[-60000:])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        error = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return error if status == 0 else f"the child ended with status {status}"


def _try_all() -> dict[str, dict[str, str]]:
    """Install the whole table, and run every probe with and without its row."""
    for setting in SETTINGS:
        setting.apply()
    installer = Installer()
    installer.install(ROWS)
    outcomes = {}
    for row in ROWS:  # Megatron's come last: until then the forks are small
        try:
            owner_of(row)  # imports the module, which installs the row
        except (ImportError, AttributeError) as error:
            outcomes[row.target] = {"missing": str(error)}
            continue
        outcomes[row.target] = {
            "missing": "",
            "with": _outcome(PROBES[row.target]),
            "without": _outcome(PROBES[row.target], installer.places[row.target]),
        }
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """What every probe raised, by target."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_every_row_has_a_probe_and_every_probe_a_row() -> None:
    assert sorted(PROBES) == sorted(TARGETS)
    assert len(set(TARGETS)) == len(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_target_exists_in_the_host(target: str, outcomes: dict) -> None:
    assert outcomes[target]["missing"] == ""


@pytest.mark.parametrize("target", TARGETS)
def test_row_serves_its_purpose(target: str, outcomes: dict) -> None:
    assert outcomes[target]["with"] == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the originals work")
@pytest.mark.parametrize("target", TARGETS)
def test_row_is_needed(target: str, outcomes: dict) -> None:
    assert outcomes[target]["without"] != ""


if __name__ == "__main__":
    print(json.dumps(_try_all()))
