"""A slot's linear work in units of l^2, by hand; test_planner_launch has it for real models."""

from argparse import Namespace

import pytest

from megatron_anchor.training.slot_work import slot_work

DENSE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 8,
    "swiglu": False,
    "quick_geglu": False,
    "padded_vocab_size": 128,
    "num_experts": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
}
OUTPUT = 64 * 128


def work(**changes):
    return slot_work(Namespace(**DENSE | changes))


def test_a_plain_layer_costs_twelve_hidden_sizes_and_its_share_of_the_output_layer():
    assert work() == 12 * 64 + 2 * OUTPUT / (4 * 2 * 64)


def test_grouped_queries_and_gates_change_the_products_alone():
    attention, mlp = 2 * 64 * 8 * (8 + 2), 3 * 64 * 256
    found = work(group_query_attention=True, num_query_groups=2, swiglu=True)
    assert found == 2 * (4 * (attention + mlp) + OUTPUT) / (4 * 2 * 64)


@pytest.mark.parametrize("frequency", [[0, 1, 1, 1], 2])
def test_experts_count_as_far_as_a_token_passes_them(frequency):
    sparse = 3 if frequency != 2 else 2
    expert = 2 * 64 * (2 * 32 + 48) + 64 * 16
    found = work(
        num_experts=16,
        moe_layer_freq=frequency,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48,
    )
    dense = 2 * 64 * 256
    total = 4 * 4 * 64 * 64 + sparse * expert + (4 - sparse) * dense + OUTPUT
    assert found == 2 * total / (4 * 2 * 64)


def test_latent_attention_has_widths_of_its_own():
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
    }
    projections = 64 * 8 * 16 + 64 * (16 + 4) + 16 * 8 * (12 + 10) + 8 * 10 * 64
    total = 4 * (projections + 2 * 64 * 256) + OUTPUT
    assert work(**latent) == 2 * total / (4 * 8 * (16 + 10))
    smaller = projections - 64 * 8 * 16 + 64 * 24 + 24 * 8 * 16
    total = 4 * (smaller + 2 * 64 * 256) + OUTPUT
    assert work(**latent | {"q_lora_rank": 24}) == 2 * total / (4 * 8 * 26)


def test_a_predictor_is_a_layer_with_two_inputs_and_an_output_layer():
    plain = 4 * 64 * 64 + 2 * 64 * 256
    total = 5 * plain + 2 * 64 * 64 + 2 * OUTPUT
    assert work(mtp_num_layers=1) == 2 * total / (5 * 2 * 64)
