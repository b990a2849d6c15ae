"""DeepSeek's models at every layout: logits, losses and gradients are those of Hugging Face.

Multi-latent attention with queries of low rank and without, yarn and plain RoPE, experts of both
kinds, multi-token prediction of one and two depths; samples with padding, documents of one token,
a document that is cut and one that goes on. The oracle is `tests.tiny_latent`.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import tiny_latent, tiny_moe
from tests.distributed.ranks import run_ranks
from tests.tiny_latent import CASES
from tests.tiny_latent_megatron import build_chunks, rotary_of
from tests.tiny_moe import S
from tests.tiny_moe_megatron import global_name, share

SAMPLES = tiny_latent.make_samples()
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
V3, REPEATED, LITE, DENSE = CASES

LAYOUTS = {
    "one process": (V3, {}),
    "one process, V2-Lite": (LITE, {}),
    "one process, dense": (DENSE, {}),
    "one process, micro-batch 2, repeated layer": (REPEATED, {"micro_batch": 2}),
    "full recompute, micro-batch 2": (V3, {"micro_batch": 2, "config": FULL}),
    "recompute of the attention": (
        V3,
        {"config": {**SELECTIVE, "recompute_modules": ["core_attn", "moe"]}},
    ),
    "recompute of the projections": (
        V3,
        {"config": {**SELECTIVE, "recompute_modules": ["mla_up_proj"]}},
    ),
    "recompute of both": (
        LITE,
        {"config": {**SELECTIVE, "recompute_modules": ["mla_up_proj", "core_attn"]}},
    ),
    "TP2 SP PP2": (V3, {"tp": 2, "sp": True, "pp": 2}),
    "TP2 SP CP2, V2-Lite": (LITE, {"tp": 2, "sp": True, "cp": 2}),
    "TP2 SP, CP2 gathered, micro-batch 2": (
        V3,
        {"tp": 2, "sp": True, "cp": 2, "keys": 2, "micro_batch": 2},
    ),
    "TP2 SP DP2, repeated layer": (REPEATED, {"tp": 2, "sp": True, "dp": 2}),
    "TP4 SP, recompute of the projections": (
        V3,
        {
            "tp": 4,
            "sp": True,
            "config": {**SELECTIVE, "recompute_modules": ["mla_up_proj"]},
        },
    ),
    "TP2 SP CP2, whole down projections on every rank": (
        V3,
        {"tp": 2, "sp": True, "cp": 2, "whole_down_projections": True},
    ),
    "PP2 interleaved, CP2": (V3, {"pp": 2, "vpp": 2, "cp": 2}),
    "CP4 as 2 x 2, full recompute": (REPEATED, {"cp": 4, "keys": 2, "config": FULL}),
    "CP2 EP2 DP2, micro-batch 2": (V3, {"cp": 2, "ep": 2, "dp": 2, "micro_batch": 2}),
    "PP2 CP2 gathered, dense": (DENSE, {"pp": 2, "cp": 2, "keys": 2}),
    "stage without decoder layers": (
        V3,
        {
            "pp": 4,
            "config": {"pipeline_model_parallel_layout": "Et|t|tt|mmL"},
        },
    ),
}
"""`keys`: groups across which keys and values are gathered."""

CONTROL = "control: each rank's part of the keys' gradient"
CROSSING = "control: depths predict beyond documents"
CONTROLS = {CONTROL: (LITE, {"tp": 2, "sp": True, "dp": 2}), CROSSING: (V3, {})}
"""What is wrong on purpose, to see that the comparison notices."""


def shape_of(name):
    return (LAYOUTS | CONTROLS)[name]


def ranks_of(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1) * layout.get("dp", 1)


def context_parallel_of(layout):
    from megatron_anchor.training.context_parallel import ContextParallel

    cp, keys = layout.get("cp", 1), layout.get("keys", 1)
    kind = "ulysses" if keys == 1 else "gather" if keys == cp else "ulysses+gather"
    return ContextParallel(kind=kind, heads_ranks=cp // keys, keys_ranks=keys)


def micro_batches(layout, split):
    """Yield (numbers of samples, collated fields) of this data-parallel rank."""
    from megatron.core import mpu

    from megatron_anchor.context_parallel.split import split_sample

    size, dp = layout.get("micro_batch", 1), layout.get("dp", 1)
    mine = list(range(mpu.get_data_parallel_rank(), len(SAMPLES), dp))
    for first in range(0, len(mine), size):
        fields = []
        for number in mine[first : first + size]:
            one = dict(SAMPLES[number].fields)
            if split.gathers:
                parts = split_sample(
                    one["cu_seqlens"].numpy(), sequence_length=S, parts=split.parts
                )
                one["part_of_chunk"] = torch.from_numpy(parts["part_of_chunk"])
            fields.append(one)
        collated = {name: torch.stack([f[name] for f in fields]) for name in fields[0]}
        yield mine[first : first + size], collated


def forward_step(layout, case, split, logits=None):
    """A step for Megatron's schedules: it sums the loss, or keeps (sample, slots, logits)."""
    from megatron.core import mpu

    from megatron_anchor.training.batch import _own_slots, get_batch
    from megatron_anchor.training.forward_step import loss_function

    rank = mpu.get_context_parallel_rank()

    def step(data_iterator, model):
        numbers, fields = next(data_iterator)
        batch = get_batch(
            iter([fields]),
            split=split,
            rank=rank,
            device=torch.device("cpu"),
            has_experts=case.experts is not None,
            prediction_depths=case.depths,
            figures=(),
        )
        output = model(
            batch.tokens,
            batch.packed.position_ids_Bs,
            None,
            labels=batch.labels if logits is None else None,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed,
        )

        def keep(logits_BsV, non_loss_data):
            slots = _own_slots(fields, split=split, rank=rank)
            every = torch.arange(S).expand(len(numbers), S)
            rows = every[:, slots] if isinstance(slots, slice) else slots
            logits.extend(zip(numbers, rows, logits_BsV.clone(), strict=True))

        def loss(losses):
            return loss_function(losses, batch=batch, report_packing=False)

        return output, loss if logits is None else keep

    return step


def train_one_batch(name, per_token, truth):
    """Run a global batch of one layout and compare; give what differs and what was reported."""
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.training.global_vars import set_args

    key, layout = shape_of(name)
    case, found = CASES[key], context_parallel_of(layout)
    sizes = [found.heads_ranks, found.keys_ranks] if found.kind == "ulysses+gather" else None
    mpu.initialize_model_parallel(
        *(layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")),
        context_parallel_size=layout.get("cp", 1),
        hierarchical_context_parallel_sizes=sizes,
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
    weights, biases, gradients, logits = truth[key]
    models = build_chunks(case, layout, weights, biases, per_token=per_token, kind=found.kind)
    config = models[0].config
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), model) for model in models
    ]
    counted = {}

    def finalize(model, *args, **kwargs):
        for chunk in model:
            for module_name, module in chunk.module.named_modules():
                if module_name.endswith("mlp.router") and case.experts == "v3":
                    router = global_name(chunk.module, module_name)
                    counted[router] = module.local_tokens_per_expert.clone()
        finalize_model_grads(model, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    size = layout.get("micro_batch", 1)
    common = {
        "model": chunks if len(chunks) > 1 else chunks[0],
        "num_microbatches": len(SAMPLES) // layout.get("dp", 1) // size,
        "seq_length": S,
        "micro_batch_size": size,
    }

    def batches():
        made = [micro_batches(layout, found.split) for _ in chunks]
        return made if len(made) > 1 else made[0]

    seen = []
    with torch.no_grad():  # routers count tokens where there are gradients
        get_forward_backward_func()(
            forward_step_func=forward_step(layout, case, found.split, seen),
            data_iterator=batches(),
            forward_only=True,
            collect_non_loss_data=True,
            **common,
        )
    worst_logit = max((logit_difference(*one, logits) for one in seen), default=0.0)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step(layout, case, found.split),
        data_iterator=batches(),
        forward_only=False,
        **common,
    )
    want = gradients[layout.get("dp", 1), size, per_token]
    worst = {}
    for chunk in chunks:
        for local, parameter in chunk.module.named_parameters():
            full = global_name(chunk.module, local)
            largest = float(want[full].abs().max()) or 1.0  # 0 for an expert without tokens
            whole = layout.get("whole_down_projections") and "_down_proj" in local
            expected = want[full] if whole else share(local, want[full])
            worst[full] = float((parameter.main_grad - expected).abs().max()) / largest
    get_moe_metrics_tracker().clear()
    mpu.destroy_model_parallel()
    return {
        "gradients": worst,
        "logits": (worst_logit, len(seen)),
        "counts": counted,
        # Tensor-parallel ranks, which are neighbours, report the same.
        "reports": reports if dist.get_rank() % layout.get("tp", 1) == 0 else [],
    }


def logit_difference(number, slots, logits_sV, expected):
    from megatron.core import mpu

    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    filled = slots < len(expected[number])
    want = expected[number][slots[filled]].chunk(size, -1)[rank]
    return float((logits_sV[filled] - want).abs().max()) if filled.any() else 0.0


def _control(name):
    """Have the error of a control for the length of a block."""
    from megatron_anchor.attention import future_tokens, latent

    if name == CONTROL:
        function = "copy_to_tensor_model_parallel_region"
        return mock.patch.object(latent, function, lambda x, group: x)
    if name == CROSSING:
        ends = torch.full((1, S), S)
        return mock.patch.object(future_tokens, "segment_ends", return_value=ends)
    return nullcontext()


def compare_layouts(names, pickled):
    """Run the layouts one after another in one process group."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    truth = pickle.loads(pickled)
    dist.init_process_group(backend="gloo")
    results = {}
    for name in names:
        for per_token in (False, True):
            with _control(name):
                results[name, per_token] = train_one_batch(name, per_token, truth)
    unset_num_microbatches_calculator()
    return results


@pytest.fixture(scope="module")
def oracles():
    return {
        name: tiny_latent.hugging_face(case, seed=n) for n, (name, case) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def runs(oracles):
    return {
        name: [tiny_latent.run(model, CASES[name], sample) for sample in SAMPLES]
        for name, model in oracles.items()
    }


@pytest.fixture(scope="module")
def truth(oracles, runs):
    """Weights, biases, gradients for each way to deal out the batch, and logits, by case."""
    found = {}
    for name, model in oracles.items():
        case = CASES[name]
        weights = tiny_latent.megatron_weights(case, tiny_latent.named(model))
        biases = tiny_latent.expert_biases(case, model)
        gradients = {}
        for dp, size in {
            (layout.get("dp", 1), layout.get("micro_batch", 1))
            for key, layout in (LAYOUTS | CONTROLS).values()
            if key == name
        }:
            for per_token in (False, True):
                ranks = tiny_moe.deal(runs[name], dp=dp, micro_batch=size)
                gradients[dp, size, per_token] = backward(case, model, ranks, per_token)
        logits = [
            run.main_logits[rows_in_shared_form(sample)]
            for run, sample in zip(runs[name], SAMPLES, strict=True)
        ]
        found[name] = weights, biases, gradients, logits
    return found


def backward(case, model, ranks, per_token):
    for module in (model.main, *model.layers):
        module.zero_grad()
    batches = [batch for rank in ranks for batch in rank]
    total_loss = tiny_latent.total_loss(case, batches, per_token=per_token)
    total_loss.backward(retain_graph=True)
    return tiny_latent.megatron_weights(case, tiny_latent.named(model, "gradients"))


def rows_in_shared_form(sample):
    """Row in the form with one anchor of every slot that is not padding: its position."""
    filled = sum(len(part["tokens"]) for part in tiny_latent.documents(sample))
    return sample.fields["position_ids"][:filled]


@pytest.fixture(scope="module")
def results(truth):
    """{(layout, per token): results of its ranks}, one start for each number of ranks."""
    out, pickled = {}, pickle.dumps(truth)
    for ranks in (1, 4):
        names = [name for name, (_, layout) in LAYOUTS.items() if ranks_of(layout) == ranks]
        names += [name for name, (_, layout) in CONTROLS.items() if ranks_of(layout) == ranks]
        for rank in run_ranks(compare_layouts, ranks, names, pickled, timeout=600):
            for key, result in rank.items():
                out.setdefault(key, []).append(result)
    return out


BOTH = pytest.mark.parametrize(
    "per_token", [False, True], ids=["mean of micro-batches", "per token"]
)


def test_no_layout_is_left_out():
    assert {ranks_of(layout) for _, layout in LAYOUTS.values()} == {1, 4}


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_equal_hugging_face(layout, per_token, truth, results):
    ours, key = results[layout, per_token], LAYOUTS[layout][0]
    pieces = sum(result["logits"][1] for result in ours)
    assert pieces >= len(SAMPLES)
    worst_logit = max(result["logits"][0] for result in ours)
    seen = largest_differences(ours)
    assert set(seen) == set(truth[key][0])
    worst = max(seen, key=seen.get)
    print(f"{layout}: logits {worst_logit:.1e}, gradients {seen[worst]:.1e} ({worst})")
    assert worst_logit <= 2e-5
    assert seen[worst] <= 1e-5, f"gradient of {worst} differs by {seen[worst]}"


def largest_differences(ranks):
    seen = {}
    for result in ranks:
        for key, value in result["gradients"].items():
            seen[key] = max(value, seen.get(key, 0))
    return seen


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_shows_the_mean_over_the_targets_of_each_depth(layout, per_token, runs, results):
    key = LAYOUTS[layout][0]
    found = {}
    for result in results[layout, per_token]:
        for report in result["reports"]:
            for name, pair in report.items():
                found[name] = found.get(name, 0) + pair.double()
    for depth in range(CASES[key].depths):
        total, targets = found[f"mtp_{depth + 1} loss"].tolist()
        assert targets == sum(r.depth_targets[depth] for r in runs[key])
        assert total == pytest.approx(sum(r.depth_losses[depth] for r in runs[key]), rel=1e-6)
        correct, of = found[f"mtp_{depth + 1}_acceptance_rate"].tolist()
        assert of == targets
        assert 0 <= correct <= 100 * targets
    assert found["lm loss"][1] == sum(r.targets for r in runs[key])
    assert f"mtp_{CASES[key].depths + 1} loss" not in found


@BOTH
@pytest.mark.parametrize("layout", [n for n, (k, _) in LAYOUTS.items() if k in (V3, REPEATED)])
def test_routers_count_tokens_of_every_depth(layout, per_token, runs, results):
    case = CASES[LAYOUTS[layout][0]]
    found = {}
    for result in results[layout, per_token]:
        for name, counts in result["counts"].items():
            found[name] = found.get(name, 0) + counts
    expected = tiny_latent.expert_counts(case, runs[LAYOUTS[layout][0]])
    assert {name: counts.tolist() for name, counts in found.items()} == {
        name: counts.tolist() for name, counts in expected.items()
    }


def logits_with(control, pickled):
    """Logits of one sample with something wrong, and the gradient of the keys' projection."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_anchor.attention.packed import pack_micro_batch

    weights, biases = pickle.loads(pickled)
    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    case = CASES[LITE]
    (model,) = build_chunks(case, {}, weights, biases)
    for module in model.modules():
        if control == "halves are pairs" and hasattr(module, "recompute_up_proj"):
            module.rotary = replace(rotary_of(case), interleaved=False)
        if control == "no mscale" and hasattr(module, "communication"):
            module.scale = (tiny_latent.PLAIN + tiny_latent.ROTATED) ** -0.5
    fields = SAMPLES[3].fields
    packed = pack_micro_batch(
        fields["position_ids"][None], fields["cu_seqlens"][None], seq_length=S
    )
    with torch.no_grad():
        return model(fields["tokens"][None], None, None, packed_seq_params=packed)[0]


@pytest.mark.parametrize("control", ["nothing", "halves are pairs", "no mscale"])
def test_a_wrong_rotation_or_scale_would_be_noticed(control, truth):
    """Negative controls, and the same way of comparing with nothing wrong."""
    weights, biases, _, logits = truth[LITE]
    (found,) = run_ranks(logits_with, 1, control, pickle.dumps((weights, biases)))
    difference = float((found[: len(logits[3])] - logits[3]).abs().max())
    assert difference <= 1e-5 if control == "nothing" else difference > 0.1


def dtypes_at_the_kernel(precision, pickled):
    """What the kernels of a bfloat16 model are called with, and what its attention returns."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_anchor.attention.packed import pack_micro_batch

    weights, biases = pickle.loads(pickled)
    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    half = {"config": {"bf16": True, "params_dtype": torch.bfloat16}}
    (model,) = build_chunks(CASES[LITE], half, weights, biases, precision=precision)
    seen = set()

    def spy(kernel):
        def call(*tensors, **others):
            seen.update(tensor.dtype for tensor in tensors)
            return kernel(*tensors, **others)

        return call

    for module in model.modules():
        if hasattr(module, "communication"):
            module.kernel = spy(module.kernel)
            module.register_forward_hook(lambda *found: seen.add(("out", found[-1].dtype)))
    fields = SAMPLES[3].fields
    packed = pack_micro_batch(
        fields["position_ids"][None], fields["cu_seqlens"][None], seq_length=S
    )
    with torch.no_grad():
        model(fields["tokens"][None], None, None, packed_seq_params=packed)
    return seen


@pytest.mark.parametrize(
    ("precision", "dtype"), [("model", torch.bfloat16), ("fp32", torch.float32)]
)
def test_attention_in_float32_begins_with_the_rotation(precision, dtype, truth):
    weights, biases, _, _ = truth[LITE]
    pickled = pickle.dumps((weights, biases))
    (seen,) = run_ranks(dtypes_at_the_kernel, 1, precision, pickled)
    assert seen == {dtype, ("out", torch.bfloat16)}


@BOTH
def test_a_gradient_of_one_ranks_heads_would_be_noticed(per_token, results):
    """Negative control: what Megatron's own layer does under tensor parallelism."""
    seen = largest_differences(results[CONTROL, per_token])
    down = [value for name, value in seen.items() if "linear_kv_down_proj" in name]
    assert min(down) > 0.01


@BOTH
def test_targets_of_another_document_would_be_noticed(per_token, results):
    """Negative control: tokens and labels shifted through the sample, as if it were one text."""
    seen = largest_differences(results[CROSSING, per_token])
    assert min(value for name, value in seen.items() if "eh_proj" in name) > 0.01
    assert seen["embedding.word_embeddings.weight"] > 0.01
