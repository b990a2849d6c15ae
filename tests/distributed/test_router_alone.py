"""The router by itself: per-token factor, score functions, Sinkhorn, and what it refuses.

Rows that do not count hold numbers of their own, or the anchor's, and must change nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.tiny_moe import balance

S, HIDDEN, EXPERTS, TOP_K = 64, 16, 8, 2
PACKINGS = {
    "documents of 15 tokens": ([15] * 4, 60),
    "documents of 2 tokens": ([2] * 21, 42),
    "26 slots of padding": ([37], 37),
}
"""Lengths that fill 64 slots with an anchor each, or leave padding; and their targets."""


def make_router(kind, **settings):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    settings = {
        "moe_router_topk": TOP_K,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **settings,
    }
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        add_bias_linear=False,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        init_method_std=1.0,
        **settings,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = kind(config=config, pg_collection=groups)
    router.set_layer_number(1)
    return router.train()


def rows_and_slots(lengths, targets):
    """[S, 1, HIDDEN] states in which copies equal the anchor, and their RouterSlots."""
    from megatron_anchor.attention.router_slots import router_slots

    starts = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0)
    generator = torch.Generator().manual_seed(len(lengths))
    states = torch.randn(S, 1, HIDDEN, generator=generator)
    states[starts[:-1]] = states[0].clone()
    mask = torch.ones(1, S, dtype=torch.bool)
    mask[0, starts[1:-1]] = False
    mask[0, starts[-1] :] = False
    loss_mask = torch.zeros(1, S)
    loss_mask[0, :targets] = 1
    return states, router_slots(mask, loss_mask)


def everything():
    """{name: result} of all that is asked of one rank, or of each of two."""
    from megatron.core import mpu

    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    found = {f"sinkhorn top {k}": sinkhorn_routes(k) for k in (1, 2)}
    if dist.get_world_size() > 1:
        return found | {"zigzag": zigzag_batch()}
    found |= {case: difference_from_formula(*case) for case in CASES}
    return found | {"factors": per_token_factors(), "refused": what_is_refused()}


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(everything, 1)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(everything, 2)


def table(slots, rank=0, size=1):
    """What Megatron's MoE layer makes of the mask."""
    return slots.share(rank=rank, size=size).transpose(0, 1).bool()


def gradient(router, states, mask):
    router.zero_grad()
    weights, chosen = router(states, mask)
    (weights * 0).sum().backward()
    return router.weight.grad.clone(), chosen


def per_token_factors():
    """{packing: (ours, Megatron's alone)}: per-token gradient over the one it should be."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_anchor.attention.router import AnchorRouter

    found = {}
    for name, (lengths, targets) in PACKINGS.items():
        states, slots = rows_and_slots(lengths, targets)
        found[name] = []
        for kind, mask in ((AnchorRouter, table(slots)), (TopKRouter, None)):
            norms = []
            for per_token in (True, False):
                router = make_router(
                    kind,
                    calculate_per_token_loss=per_token,
                    moe_router_load_balancing_type="aux_loss",
                    moe_aux_loss_coeff=1.0,
                )
                norms.append(float(gradient(router, states, mask)[0].norm()))
            found[name].append(norms[0] / targets / norms[1])
    return found


def test_the_coefficient_is_exact_per_token(one_rank):
    """Megatron divides by the targets T what it multiplied by its S slots."""
    stock = {"documents of 15 tokens": 1.067, "documents of 2 tokens": 1.524}
    stock["26 slots of padding"] = 1.730
    for name, (ours, megatrons) in one_rank[0]["factors"].items():
        assert ours == pytest.approx(1, abs=1e-6), name
        assert megatrons == pytest.approx(stock[name], abs=5e-4), name


def difference_from_formula(score_function, loss):
    """Relative difference of the router's gradient from float64 without the other rows."""
    from megatron_anchor.attention.router import AnchorRouter

    states, slots = rows_and_slots(*PACKINGS["documents of 2 tokens"])
    settings = (
        {"moe_z_loss_coeff": 1.0}
        if loss == "z_loss"
        else {"moe_router_load_balancing_type": loss, "moe_aux_loss_coeff": 1.0}
    )
    router = make_router(AnchorRouter, moe_router_score_function=score_function, **settings)
    ours, _ = gradient(router, states, table(slots))
    weight = router.weight.detach().double().requires_grad_()
    logits = states[:, 0][slots.counted_Bs[0]].double() @ weight.t()
    if loss == "z_loss":
        torch.logsumexp(logits, -1).square().mean().backward()
    else:
        scores = {
            "softmax": lambda x: x.softmax(-1),
            "sigmoid": torch.sigmoid,
            "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
        }[score_function](logits)
        counts = torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
        balance(scores / scores.sum(-1, keepdim=True), counts, len(logits)).backward()
    return float((ours - weight.grad).norm() / weight.grad.norm())


CASES = [(f, "aux_loss") for f in ("softmax", "sigmoid", "sqrtsoftplus")] + [
    ("softmax", "seq_aux_loss"),
    ("softmax", "global_aux_loss"),
    ("softmax", "z_loss"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_score_function_gives_the_formulas_gradient(case, one_rank):
    assert one_rank[0][case] <= 1e-5


def sinkhorn_routes(top_k):
    """Routes and gradients of this rank's slots, and those of Megatron without the other rows."""
    from megatron.core import mpu
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_anchor.attention.router import AnchorRouter

    lengths, targets = PACKINGS["documents of 15 tokens"]
    states, slots = rows_and_slots(lengths, targets)
    settings = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": top_k}
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    router = make_router(AnchorRouter, **settings)
    weights, chosen = router(states.chunk(cp)[rank], table(slots, rank, cp))
    stock = make_router(TopKRouter, **settings)
    kept = slots.counted_Bs[0]
    expected = [x.detach() for x in stock(states[kept], None)]
    unmasked = stock(states, None)[1]
    return weights.detach(), chosen, kept, expected, unmasked


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_balances_the_counted_slots(ranks, top_k, request):
    results = [rank[f"sinkhorn top {top_k}"] for rank in request.getfixturevalue(ranks)]
    weights, chosen = (torch.cat([result[n] for result in results]) for n in (0, 1))
    kept, (expected_weights, expected_chosen), unmasked = results[0][2:]
    assert torch.equal(chosen[kept], expected_chosen)
    assert torch.allclose(weights[kept], expected_weights)
    copies = ~kept  # no padding here: every other row is a copy of row 0
    assert copies.sum() == 3
    assert (chosen[copies] == chosen[0]).all()
    assert not torch.equal(unmasked[kept], expected_chosen), "copies must have mattered"


def what_is_refused():
    """{case: message or None}."""
    from megatron_anchor.attention.router import AnchorRouter

    states, _ = rows_and_slots(*PACKINGS["documents of 15 tokens"])
    statistics = {
        "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
        "z": {"moe_z_loss_coeff": 1.0},
        "bias": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
        "none": {},
    }
    said = {}
    for name, settings in statistics.items():
        router = make_router(AnchorRouter, **settings)
        said[name] = message(lambda router=router: router(states))
        said[f"{name}, evaluation"] = message(lambda router=router: router.eval()(states))
    for name, settings in {
        "quantile": {"moe_router_load_balancing_type": "quantile_balancing"},
        "chunks": {"mlp_chunks_for_training": 2},
    }.items():
        said[name] = message(lambda settings=settings: make_router(AnchorRouter, **settings))
    return said


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def test_a_router_with_statistics_needs_the_slots(one_rank):
    said = one_rank[0]["refused"]
    for name in ("aux", "z", "bias", "sinkhorn"):
        assert "router=router_slots(" in said[name], name
    silent = [name for name in said if name == "none" or "evaluation" in name]
    assert len(silent) == 6
    assert not any(said[name] for name in silent)
    assert "quantile_balancing: its quantiles would count" in said["quantile"]
    assert "--mlp-chunks-for-training 2: Megatron does not tell" in said["chunks"]


def zigzag_batch():
    """The counted slots that `get_batch` gives this rank where Transformer Engine communicates."""
    from megatron.core import mpu

    from megatron_anchor.context_parallel.split import ZIGZAG, SlotSplit
    from megatron_anchor.training.batch import get_batch

    split = SlotSplit(cp_size=mpu.get_context_parallel_world_size(), kind=ZIGZAG)
    given = {
        "split": split,
        "rank": mpu.get_context_parallel_rank(),
        "device": torch.device("cpu"),
        "has_experts": True,
    }
    # Two documents of 8 and 4 slots, one of padding; slot 8 is the second anchor.
    sample = {name: torch.arange(16)[None] for name in ("tokens", "labels", "position_ids")}
    sample["loss_mask"] = (torch.arange(16) < 7).float()[None]
    counted = torch.arange(16) < 12
    counted[8] = False
    sample["router_mask"] = counted[None]
    sample["cu_seqlens"] = torch.tensor([[0, 8, 12, *[16] * 6]], dtype=torch.int32)
    batch = get_batch(iter([sample]), figures=(), **given)
    router = batch.packed.router
    del sample["router_mask"]
    missing = message(lambda: get_batch(iter([sample]), **given))
    return batch.tokens, router.counted_Bs, router.tokens_B, router.targets_B, missing


def test_slots_are_counted_before_transformer_engine_splits_documents(two_ranks):
    results = [rank["zigzag"] for rank in two_ranks]
    slots = torch.cat([tokens[0] for tokens, *_ in results])
    assert sorted(slots.tolist()) == list(range(16))
    assert results[0][0][0].tolist() == [0, 1, 6, 7, 8, 11, 12, 15]
    for tokens, counted, total, targets, missing in results:
        assert missing.startswith("the data loader's samples have no num_documents")
        assert "router_mask" in missing
        assert counted[0].tolist() == [t < 12 and t != 8 for t in tokens[0].tolist()]
        assert (total.tolist(), targets.tolist()) == ([11], [7])
