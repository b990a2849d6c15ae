"""The maps of rows: nothing lost, nothing doubled, and Megatron's order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.row_maps import Grouped, Vocabulary
from tests import tiny_llama

models = st.builds(
    lambda family, groups, queries, head, hidden, ffn, vocabulary, **flags: Model(
        family=family,
        layers=2,
        hidden=hidden,
        ffn=ffn,
        heads=groups * queries,
        groups=groups,
        head=head,
        vocabulary=vocabulary,
        **flags,
    ),
    family=st.sampled_from(sorted(FAMILIES)),
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    head=st.integers(1, 5),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 9),
    vocabulary=st.integers(1, 20),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    output_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    experts=st.integers(1, 3),
)


@settings(max_examples=30)
@given(models)
def test_every_rule_uses_every_hugging_face_row_exactly_once(model):
    for rule in FAMILIES[model.family].rules:
        sources = rule.layout.source_rows(model.dims)
        assert len(sources) == len(rule.hugging_face)
        used = sorted(
            (segment.source, row)
            for segment in rule.segments(model)
            if segment.source is not None
            for row in range(segment.first, segment.first + segment.rows)
        )
        assert used == [(i, row) for i, rows in enumerate(sources) for row in range(rows)]


@settings(max_examples=30)
@given(models)
def test_no_hugging_face_name_belongs_to_two_rules_of_a_model(model):
    from megatron_anchor.checkpoint.families import rules_for

    names = [
        name
        for rule in rules_for(model)
        for indices in rule.indices(model)
        for name in rule.names(indices)
    ]
    keys = [rule.keys[0] for rule in rules_for(model)]
    assert len(names) == len(set(names))
    assert len(keys) == len(set(keys))


@settings(max_examples=30)
@given(models)
def test_the_padded_vocabulary_is_the_next_multiple_of_128(model):
    rows = sum(segment.rows for segment in Vocabulary().segments(model.dims))
    assert rows % 128 == 0
    assert 0 <= rows - model.vocabulary < 128


def test_grouped_rows_are_the_ones_that_the_reference_mapping_of_the_training_tests_gives():
    hf = {k: v.detach() for k, v in tiny_llama.hugging_face_llama().named_parameters()}
    model = Model(
        family="LlamaForCausalLM",
        layers=tiny_llama.LAYERS,
        hidden=tiny_llama.HIDDEN,
        ffn=tiny_llama.FFN,
        heads=tiny_llama.HEADS,
        groups=tiny_llama.KV_HEADS,
        head=tiny_llama.HEAD_DIM,
        vocabulary=tiny_llama.VOCAB,
    )
    q, k, v = (hf[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    ours = torch.cat(
        [
            (q, k, v)[segment.source][segment.first : segment.first + segment.rows]
            for segment in Grouped().segments(model.dims)
        ]
    )
    theirs = tiny_llama.megatron_weights(hf)["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert torch.equal(ours, theirs)
