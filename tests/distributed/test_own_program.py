"""A program without Megatron's training loop: its gradients, and what its model refuses."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from tests import tiny_llama, tiny_moe
from tests.distributed.ranks import run_ranks
from tests.tiny_moe import S
from tests.tiny_moe_megatron import build_chunks

MODEL_ARGUMENTS = {
    "the default": {"position_embedding_type": "learned_absolute"},
    "rope": {"position_embedding_type": "rope"},
}


def whole_program(pickled):
    """On one rank: {case: gradients or message}."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    weights, biases = pickle.loads(pickled)
    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found = {per_token: gradients(weights, biases, per_token) for per_token in (False, True)}
    for name, arguments in MODEL_ARGUMENTS.items():
        build = (lambda a: lambda: build_chunks({}, weights, biases, per_token=True, **a))(
            arguments
        )
        found[name] = message(build)
    (model,) = build_chunks({}, weights, biases, per_token=True)
    found["no slots"] = message(lambda: run(model, collated(), router=False))
    mask = torch.zeros(2, S, dtype=torch.bool)
    found["host's mask"] = message(lambda: run(model, collated(), padding_mask=mask))
    found["shapes"] = message(lambda: slots_of_a_piece(collated()))
    with torch.no_grad():
        found["evaluation"] = message(lambda: run(model.eval(), collated(), router=False))
    return found


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def collated(numbers=(0, 1)):
    fields = [tiny_moe.make_samples()[n].fields for n in numbers]
    return {name: torch.stack([f[name] for f in fields]) for name in fields[0]}


def slots_of_a_piece(batch):
    from megatron_anchor.attention.router_slots import router_slots

    return router_slots(batch["router_mask"], batch["loss_mask"][:, : S // 2])


def run(model, batch, *, router=True, **arguments):
    """Summed loss of a micro-batch."""
    from megatron_anchor.attention.packed import pack_micro_batch
    from megatron_anchor.attention.router_slots import router_slots

    slots = router_slots(batch["router_mask"], batch["loss_mask"]) if router else None
    packed = pack_micro_batch(
        batch["position_ids"], batch["cu_seqlens"], seq_length=S, router=slots
    )
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=packed,
        **arguments,
    )
    return (losses * batch["loss_mask"]).sum()


def gradients(weights, biases, per_token):
    """Two micro-batches of two samples, as docs/own-program.md says."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    (model,) = build_chunks({}, weights, biases, per_token=per_token)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 if per_token else 0.5))
    total = 0
    for numbers in ((0, 1), (2, 3)):
        batch = collated(numbers)
        targets = batch["loss_mask"].sum()
        loss = run(model, batch)
        (loss if per_token else loss / targets / 2).backward()
        total += targets
    divisor = total if per_token else 1
    return {name: p.grad / divisor for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def truth():
    """Hugging Face's weights and gradients of the same batch."""
    model = tiny_moe.hugging_face_glm()
    biases = {k: v.detach().clone() for k, v in tiny_moe.expert_biases(model).items()}
    expected = {}
    for per_token in (False, True):
        model.zero_grad()
        runs = [tiny_moe.run(model, sample) for sample in tiny_moe.make_samples()]
        ranks = tiny_moe.deal(runs, dp=1, micro_batch=2)
        coefficients = tiny_moe.COEFFICIENTS
        tiny_moe.total_loss(ranks, per_token=per_token, coefficients=coefficients).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        expected[per_token] = tiny_moe.megatron_weights(grads)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return tiny_moe.megatron_weights(weights), biases, expected


@pytest.fixture(scope="module")
def found(truth):
    return run_ranks(whole_program, 1, pickle.dumps(truth[:2]))[0]


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "per token"])
def test_gradients_of_a_loop_of_its_own_equal_hugging_face(per_token, truth, found):
    expected = truth[2][per_token]
    assert set(found[per_token]) == set(expected)
    for name, gradient in found[per_token].items():
        want = expected[name]
        if "experts.local" not in name:
            want = tiny_llama.tensor_parallel_shard(name, want, rank=0, size=1)
        largest = float(want.abs().max()) or 1.0  # 0 for an expert without tokens
        worst = float((gradient - want).abs().max()) / largest
        assert worst <= 1e-5, f"{name} differs by {worst}"


@pytest.mark.parametrize("name", MODEL_ARGUMENTS)
def test_a_model_with_positions_of_its_own_is_refused(name, found):
    kind = MODEL_ARGUMENTS[name]["position_embedding_type"]
    assert f"GPTModel(position_embedding_type='{kind}') would add positions" in found[name]
    assert "pass position_embedding_type='none'" in found[name]


def test_training_experts_without_their_slots_is_refused(found):
    assert "pass pack_micro_batch(..., router=router_slots(" in found["no slots"]
    assert "padding_mask: the router takes the slots that count" in found["host's mask"]
    assert "router_mask has the shape (2, 64), loss_mask (2, 32)" in found["shapes"]
    assert found["evaluation"] is None
