"""Which arguments describe the model: derived from the host, with nothing left out."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser
from dataclasses import fields, make_dataclass

import pytest
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.training import argument_utils

from megatron_anchor.training import model_fields as table
from megatron_anchor.training.arguments import AnchorArguments, add_anchor_arguments
from megatron_anchor.training.model_fields import (
    MAY_CHANGE,
    NOT_FIELDS,
    NOT_THE_MODEL,
    ONLY_WITH,
    may_change,
    model_fields,
    names_in,
    switch_of,
)

RUN_ALONE = {
    "where layers run, kernels and precision": "bias_gelu_fusion bias_swiglu_fusion "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers fp16_lm_cross_entropy "
    "fp4_param_gather fp8_param_gather init_method_xavier_uniform kitchen_config_file "
    "kitchen_recipe_number no_persist_layer_norm overlap_p2p_comm params_dtype seed "
    "te_precision_config_file",
    "compared by lost_vocabulary": "make_vocab_size_divisible_by padded_vocab_size vocab_size",
    "refused, or a path whose content is compared": "heterogeneous_layers_config_path yaml_cfg "
    "yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int "
    "yarn_original_max_position_embeddings",
}
"""What the host's builders read besides fields of its configs, and the model does not depend on."""

OF_SAMPLES_OR_RUN = {
    "ours": "allow_model_change anchor_attention_backend anchor_context_parallel "
    "anchor_first_token_loss balance_attention_work document_alignment document_list "
    "document_length_schedule loss_weighting effective_context_alpha effective_context_gamma "
    "effective_context_tail domain_tag_format domain_tags dump_bad_batch interleave_chunks "
    "interleave_max_chunk_length "
    "interleave_max_chunks interleave_min_chunk_length kv_gather_memory_mib packing "
    "pad_documents_to save_last save_last_every"
}
"""Of our own arguments."""


@pytest.fixture(scope="module")
def dests():
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return {action.dest for action in add_anchor_arguments(parser)._actions}


def host_fields():
    return {field.name for field in fields(MLATransformerConfig)}


def test_every_row_is_about_something_that_is_there(dests):
    assert names_in(NOT_THE_MODEL) <= host_fields()
    assert names_in(NOT_FIELDS) <= dests
    assert names_in(MAY_CHANGE) <= model_fields()
    assert not names_in(NOT_THE_MODEL) & names_in(MAY_CHANGE)
    assert set(ONLY_WITH.values()) <= model_fields()
    for start in ONLY_WITH:
        assert any(name.startswith(start) for name in model_fields()), start


def test_all_that_the_hosts_builders_read_has_a_row():
    """The functions that turn Megatron's arguments into the model's config, all branches."""
    source = "".join(
        inspect.getsource(function)
        for function in (
            argument_utils.core_transformer_config_from_args,
            argument_utils.gpt_config_from_args,
            argument_utils._apply_yarn_config_from_args,
        )
    )
    read = set(re.findall(r"\bargs\.(\w+)", source))
    read |= set(re.findall(r"(?:get|has)attr\(args, [\"'](\w+)[\"']", source))
    assert len(read) > 30
    parallel = {field.name for field in fields(ModelParallelConfig)}
    known = model_fields() | names_in(NOT_THE_MODEL) | parallel | names_in(RUN_ALONE)
    assert read - known == set()


def test_each_of_our_own_arguments_is_on_one_side():
    ours = {field.name for field in fields(AnchorArguments)}
    assert {n for n in ours if n not in model_fields()} == names_in(OF_SAMPLES_OR_RUN)
    assert {n for n in ours & model_fields() if not may_change(n)} == set()


def test_a_field_that_a_later_host_adds_describes_the_model(monkeypatch):
    later = make_dataclass("Later", [("new_gate", bool, False)], bases=(MLATransformerConfig,))
    monkeypatch.setattr(table, "MLATransformerConfig", later)
    model_fields.cache_clear()
    try:
        assert "new_gate" in model_fields()
        assert not may_change("new_gate")
    finally:
        model_fields.cache_clear()


def test_shape_norm_and_router_are_fixed():
    """A sample of what must never differ unseen; the first two are in none of Megatron's lists."""
    fixed = {name for name in model_fields() if not may_change(name)}
    assert fixed >= {
        *("qk_layernorm", "layernorm_epsilon", "num_layers", "hidden_size", "swiglu"),
        *("normalization", "no_rope_freq", "rotary_percent", "rotary_interleaved", "window_size"),
        *("moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_score_function"),
        *("add_qkv_bias", "softmax_type", "untie_embeddings_and_output_weights"),
    }


def test_parallelism_describes_no_model():
    parallel = {field.name for field in fields(ModelParallelConfig)} - {"bf16", "fp16"}
    assert not parallel & model_fields()
    assert {"num_layers", "qk_layernorm"} <= {f.name for f in fields(TransformerConfig)}


def test_a_switch_is_no_part_of_what_it_switches():
    assert switch_of("qk_clip_alpha") == "qk_clip"
    assert switch_of("qk_clip") is None
    assert switch_of("mtp_num_layers") is None
    assert switch_of("moe_router_topk") == "num_experts"
    assert switch_of("num_layers") is None
