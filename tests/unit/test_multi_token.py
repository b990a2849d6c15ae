"""Where multi-token prediction meets Megatron: replaced names, and what is missed at a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_anchor.attention import multi_token
from megatron_anchor.attention.future_tokens import future_tokens
from megatron_anchor.attention.multi_token import require_future
from megatron_anchor.attention.packed import pack_micro_batch
from megatron_anchor.patches import apply


@pytest.mark.parametrize("times", [1, 2])
def test_the_loss_is_ours_for_packed_documents_and_megatrons_else(monkeypatch, times):
    from megatron.core.models.gpt import gpt_model

    def theirs(hidden_states, labels, loss_mask, **others):
        return "Megatron's", hidden_states, labels, loss_mask, others

    def ours(hidden_states, labels, *, packed, config):
        return "ours", hidden_states, labels, packed, config

    monkeypatch.setattr(gpt_model, "process_mtp_loss", theirs)
    monkeypatch.setattr(multi_token, "attach_multi_token_loss", ours)
    for _ in range(times):
        apply(multi_token.LOSS_PATCH)
    documents = packed()
    call = {"hidden_states": 1, "labels": 2, "loss_mask": 3, "input_ids": 4, "config": 5}
    found = gpt_model.process_mtp_loss(**call, packed_seq_params=documents)
    assert found == ("ours", 1, 2, documents, 5)
    other = {"packed_seq_params": None, "input_ids": 4, "config": 5}
    found = gpt_model.process_mtp_loss(**{**call, **other})
    assert found == ("Megatron's", 1, 2, 3, other)
    assert gpt_model.process_mtp_loss.__wrapped__ is theirs, "no chain of replacements"


@pytest.mark.parametrize("times", [1, 2])
def test_a_spec_brings_its_layers_along_and_others_get_stock_ones(monkeypatch, times):
    from megatron.training.models import gpt

    def theirs(config, transformer_layer_spec, vp_stage=None):
        return "stock"

    monkeypatch.setattr(gpt, "mtp_block_spec", theirs)
    for _ in range(times):
        apply(multi_token.LAYERS_PATCH)
    assert gpt.mtp_block_spec(None, SimpleNamespace(mtp="own"), vp_stage=1) == "own"
    assert gpt.mtp_block_spec(None, SimpleNamespace(mtp=None)) is None, "another stage has them"
    assert gpt.mtp_block_spec(None, SimpleNamespace(layer_specs=[])) == "stock"
    assert gpt.mtp_block_spec.__wrapped__ is theirs


def packed(**more):
    cu_seqlens = torch.tensor([[0, 3, 8]], dtype=torch.int32)
    return pack_micro_batch(torch.arange(8)[None], cu_seqlens, seq_length=8, **more)


def sample():
    tokens = torch.arange(1, 9)[None]
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0]]).float(),
        "router_mask": torch.ones(1, 8, dtype=torch.bool),
        "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32),
    }


def test_a_model_without_the_tokens_of_its_depths_says_how_to_pass_them():
    with pytest.raises(ValueError, match=r"pack_micro_batch\(\.\.\., future=future_tokens\("):
        require_future(packed())


def test_a_layer_of_a_depth_has_its_own_router_slots_and_shares_the_documents():
    whole = packed(future=future_tokens(sample(), depths=2, has_experts=True))
    runs = whole.runs()
    for depth, counted in ((1, [1, 1, 0, 1, 1, 1, 1, 0]), (2, [1, 0, 0, 1, 1, 1, 0, 0])):
        view = whole.at_depth(depth)
        assert view.depth == depth
        assert view.router.counted_Bs.int().tolist() == [counted]
        assert view.runs() is runs
    assert whole.router is None
    assert whole.depth == 0


def test_the_tokens_of_both_depths():
    first, second = future_tokens(sample(), depths=2).depths
    assert first.tokens_Bs.tolist() == [[2, 3, 0, 5, 6, 7, 8, 0]]
    assert first.labels_Bs.tolist() == [[3, 4, 0, 6, 7, 8, 9, 0]]
    assert first.loss_mask_Bs.tolist() == [[1, 0, 0, 1, 1, 1, 0, 0]]
    assert second.tokens_Bs.tolist() == [[3, 0, 0, 6, 7, 8, 0, 0]]
    assert second.loss_mask_Bs.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "rotary",
    [{"head_dim": 24, "interleaved": True}, {"head_dim": 8}],
    ids=["of the whole head", "of halves"],
)
def test_another_rotation_than_that_of_multi_latent_attention_is_refused(rotary):
    from megatron.core.transformer import MLATransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        apply_rope_fusion=False,
        transformer_impl="local",
    )
    with pytest.raises(ValueError, match=r"pass RotarySettings\(head_dim=8, interleaved=True"):
        anchor_block_spec(config, rotary=RotarySettings(**rotary), backend="sdpa", pp_rank=0)
