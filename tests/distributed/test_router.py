"""Experts at every layout: gradients and counts are those of Hugging Face with one anchor.

All auxiliary losses at once (micro-batch, sequence, global), z-loss and expert bias, on samples
with copies of the anchor, padding and unequal numbers of targets; the oracle is `tests.tiny_moe`.
"""

from __future__ import annotations

import pickle
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from tests import tiny_moe
from tests.distributed.ranks import run_ranks
from tests.tiny_moe import S
from tests.tiny_moe_megatron import build_chunks, global_name, share

SAMPLES = tiny_moe.make_samples()
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

LOG_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}

LAYOUTS = {
    "one process": {},
    "micro-batch 2": {"micro_batch": 2},
    "micro-batch 2, full recompute": {"micro_batch": 2, "config": FULL},
    "recompute of the experts": {
        "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    },
    "TP2 SP CP2": {"tp": 2, "sp": True, "cp": 2},
    "TP2 SP PP2, micro-batch 2": {"tp": 2, "sp": True, "pp": 2, "micro_batch": 2},
    "TP2 SP PP2 interleaved, recompute": {
        "tp": 2,
        "sp": True,
        "pp": 2,
        "vpp": 2,
        "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    },
    "PP2 CP2": {"pp": 2, "cp": 2, "config": FULL},
    "CP2 EP2 DP2, micro-batch 2": {"cp": 2, "ep": 2, "dp": 2, "micro_batch": 2},
    "TP2 SP EP4 DP2": {"tp": 2, "sp": True, "ep": 4, "dp": 2},
}
CONTROL = "control: every slot counts"


def ranks_of(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1) * layout.get("dp", 1)


def micro_batches(layout):
    """Yield collated samples of this data-parallel rank."""
    from megatron.core import mpu

    size = layout.get("micro_batch", 1)
    mine = SAMPLES[mpu.get_data_parallel_rank() :: layout.get("dp", 1)]
    for first in range(0, len(mine), size):
        fields = [sample.fields for sample in mine[first : first + size]]
        collated = {name: torch.stack([f[name] for f in fields]) for name in fields[0]}
        if layout.get("every_slot_counts"):
            collated["router_mask"][:] = True
        yield collated


def train_one_batch(layout, per_token, weights, biases):
    """Run a global batch; give {parameter: difference}, {router: tokens per expert}, log values."""
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.training.global_vars import set_args

    from megatron_anchor.context_parallel.split import SlotSplit
    from megatron_anchor.training.batch import get_batch
    from megatron_anchor.training.forward_step import loss_function

    cp = layout.get("cp", 1)
    mpu.initialize_model_parallel(
        layout.get("tp", 1),
        layout.get("pp", 1),
        layout.get("vpp"),
        context_parallel_size=cp,
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    set_args(
        Namespace(
            calculate_per_token_loss=per_token,
            check_for_nan_in_loss_and_grad=False,
            check_for_spiky_loss=False,
            seq_length=S,
        )
    )
    models = build_chunks(layout, weights, biases, per_token=per_token)
    config = models[0].config
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), model) for model in models
    ]
    counted = {}

    def finalize(model, *args, **kwargs):
        for chunk in model:
            for name, module in chunk.module.named_modules():
                if name.endswith("mlp.router"):
                    key = global_name(chunk.module, name)
                    counted[key] = module.local_tokens_per_expert.clone()
        finalize_model_grads(model, *args, **kwargs)

    config.finalize_model_grads_func = finalize

    def step(data_iterator, model):
        batch = get_batch(
            data_iterator,
            split=SlotSplit(cp_size=mpu.get_context_parallel_world_size()),
            rank=mpu.get_context_parallel_rank(),
            device=torch.device("cpu"),
            has_experts=True,
            figures=(),
        )
        output = model(
            batch.tokens,
            batch.packed.position_ids_Bs,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed,
        )
        return output, lambda losses: loss_function(losses, batch=batch, report_packing=False)

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[micro_batches(layout) for _ in chunks]
        if len(chunks) > 1
        else micro_batches(layout),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(SAMPLES) // layout.get("dp", 1) // layout.get("micro_batch", 1),
        seq_length=S,
        micro_batch_size=layout.get("micro_batch", 1),
        forward_only=False,
    )
    gradients = {}
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            gradients[name, global_name(chunk.module, name)] = parameter.main_grad.clone()
    tracker = get_moe_metrics_tracker()
    logged = {name: entry.values.clone() for name, entry in tracker.metrics.items()}
    tracker.clear()
    return gradients, counted, logged


def compare_layouts(names, pickled):
    """Run the layouts one after another in one process group."""
    weights, biases, gradients = pickle.loads(pickled)
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    dist.init_process_group(backend="gloo")
    results = {}
    for name in names:
        layout = LAYOUTS.get(name, {"every_slot_counts": True})
        for per_token in (False, True):
            got, counted, logged = train_one_batch(layout, per_token, weights, biases)
            want = gradients[layout.get("dp", 1), layout.get("micro_batch", 1), per_token]
            worst = {}
            for (local, key), gradient in got.items():
                expected = share(local, want[key])
                largest = float(want[key].abs().max()) or 1.0  # 0 for an expert without tokens
                worst[key] = float((gradient - expected).abs().max()) / largest
            results[name, per_token] = worst, counted, logged
            mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
    return results


@pytest.fixture(scope="module")
def truth():
    """Hugging Face's weights, gradients for each way to deal out the batch, and counts."""
    model = tiny_moe.hugging_face_glm()
    biases = {k: v.detach().clone() for k, v in tiny_moe.expert_biases(model).items()}
    gradients, logs = {}, {}
    for dp in (1, 2):
        for micro_batch in (1, 2):
            for per_token in (False, True):
                runs = [tiny_moe.run(model, sample) for sample in SAMPLES]
                ranks = tiny_moe.deal(runs, dp=dp, micro_batch=micro_batch)
                key = dp, micro_batch, per_token
                gradients[key] = backward(model, ranks, per_token, tiny_moe.COEFFICIENTS)
                logs[key] = sum_of_losses(tiny_moe.router_losses(ranks, per_token=per_token))
    counts = {
        key: sum(torch.bincount(r.chosen[n].flatten(), minlength=tiny_moe.EXPERTS) for r in runs)
        for n, key in enumerate(biases)
    }
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return tiny_moe.megatron_weights(weights), biases, gradients, counts, logs


def backward(model, ranks, per_token, coefficients):
    model.zero_grad()
    tiny_moe.total_loss(ranks, per_token=per_token, coefficients=coefficients).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    return tiny_moe.megatron_weights(grads)


def sum_of_losses(batches):
    """{log name: sum over micro-batches and layers}, as Megatron's tracker adds them up."""
    return {
        LOG_NAMES[name]: sum(losses[name].item() for layers in batches for losses in layers)
        for name in LOG_NAMES
    }


@pytest.fixture(scope="module")
def results(truth):
    """{layout: results of its ranks}, one start of the group for each number of ranks."""
    out = {}
    pickled = pickle.dumps(truth[:3])  # as bytes: hundreds of tensors would share hundreds of files
    for ranks in (1, 4):
        names = [name for name, layout in LAYOUTS.items() if ranks_of(layout) == ranks]
        names += [CONTROL] if ranks == 1 else []
        for rank in run_ranks(compare_layouts, ranks, names, pickled):
            for key, result in rank.items():
                out.setdefault(key, []).append(result)
    return out


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "per token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_counts_are_those_of_one_anchor_without_padding(
    layout, per_token, truth, results
):
    ours = results[layout, per_token]
    seen = largest_differences(ours)
    assert set(seen) == set(truth[0])
    worst = max(seen, key=seen.get)
    print(f"{layout}: {seen[worst]:.1e} ({worst})")
    assert seen[worst] <= 1e-5, f"gradient of {worst} differs by {seen[worst]}"
    assert sums(counts for _, counts, _ in ours) == sums([truth[3]])


def largest_differences(ranks):
    seen = {}
    for differences, _, _ in ranks:
        seen |= {key: max(value, seen.get(key, 0)) for key, value in differences.items()}
    return seen


def sums(dictionaries):
    total = {}
    for dictionary in dictionaries:
        for key, values in dictionary.items():
            total[key] = total.get(key, 0) + values
    return {key: values.tolist() for key, values in total.items()}


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "per token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_shows_the_losses_without_copies_and_padding(layout, per_token, truth, results):
    shape = LAYOUTS[layout]
    expected = truth[4][shape.get("dp", 1), shape.get("micro_batch", 1), per_token]
    logged = sums(logged for _, _, logged in results[layout, per_token])
    assert {name: sum(values) for name, values in logged.items()} == pytest.approx(expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_counting_every_slot_would_be_noticed(per_token, truth, results):
    """Negative control: what the router did without the mask."""
    seen = largest_differences(results[CONTROL, per_token])
    assert min(v for k, v in seen.items() if "router" in k) > 0.1
    counted = sums(counts for _, counts, _ in results[CONTROL, per_token])
    assert counted != sums([truth[3]])


@pytest.mark.parametrize("name", tiny_moe.COEFFICIENTS)
def test_every_loss_has_a_part_in_the_gradients(name, truth):
    """Anti-vacuity: without one of them the gradients would differ by far."""
    model = tiny_moe.hugging_face_glm()
    ranks = tiny_moe.deal([tiny_moe.run(model, s) for s in SAMPLES], dp=1, micro_batch=1)
    without = backward(model, ranks, True, {**tiny_moe.COEFFICIENTS, name: 0.0})
    for key, gradient in truth[2][1, 1, True].items():
        if "router" in key:
            assert (gradient - without[key]).abs().max() / gradient.abs().max() > 1e-3
