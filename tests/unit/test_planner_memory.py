"""Memory against Megatron's own formulas, and the paper's setting on 8 A100."""

from argparse import Namespace

import pytest

from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.memory import budget, kept_by_layer, memory_of
from megatron_anchor.planner.models import MODELS, find_model
from megatron_anchor.planner.work import RECOMPUTE

LENGTH = 8192


def megatron_args(model, layout, *, length=LENGTH):
    """What theoretical_memory_usage reads."""
    return Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        group_query_attention=model.groups != model.heads,
        kv_channels=model.head,
        padded_vocab_size=model.padded_rows,
        seq_length=length,
        micro_batch_size=1,
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=model.untied,
        multi_latent_attention=False,
        add_bias_linear=False,
        num_experts=None,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=None,
        use_distributed_optimizer=True,
        tensor_model_parallel_size=layout.tp,
        expert_tensor_parallel_size=layout.tp,
        expert_model_parallel_size=1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None,
        data_parallel_size=layout.optimizer_shards,
        world_size=layout.gpus,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 1, 4), (4, 2, 2), (8, 4, 1), (2, 1, 1)])
def test_weights_and_optimizer_are_megatrons(name, sizes):
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    model, (tp, pp, dp) = MODELS[name][0], sizes
    layout = Layout(tp=tp, pp=pp, dp=dp)
    theirs = compute_weight_and_optimizer_memory(megatron_args(model, layout))
    memory = memory_of(model, layout, sequence_length=LENGTH, global_batch=dp)
    # Theirs leaves out biases and the norms of queries and keys, and spreads the final norm.
    assert memory.states == pytest.approx(theirs, rel=2e-4 if not model.qkv_bias else 1e-3)


def test_context_parallel_ranks_share_the_optimizer_too():
    model = MODELS["llama-2-7b"][0]
    one, eight = (
        memory_of(model, layout, sequence_length=LENGTH, global_batch=8)
        for layout in (Layout(dp=8), Layout(cp=8))
    )
    assert one.states == eight.states


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_are_megatrons_but_for_swiglu_and_dropout(name, tp):
    """Theirs counts GELU with dropout; part by part the two formulas must meet."""
    from megatron.training.theoretical_memory_usage import compute_activation_memory

    model, layout = MODELS[name][0], Layout(tp=tp, dp=1)
    theirs = compute_activation_memory(megatron_args(model, layout), num_microbatches=1)
    memory = memory_of(model, layout, sequence_length=LENGTH, global_batch=1)
    ours = memory.activations + memory.logits
    h, f = model.hidden, model.ffn
    layer = (
        -2 * h  # the masks of both dropouts (one byte each)
        + (6 - 4) * f  # SwiGLU keeps gate, up and product where GELU keeps input and output
        + 4 * model.heads  # sums of the fused softmax
    )
    ends = (
        8 * tp
        - 8  # ids: theirs are shared by tensor-parallel ranks, which in truth they are not
        - h  # dropout of the embedding
        + (8 - 4) * model.padded_rows  # float32 logits alone
    )
    expected = theirs + (layer * model.layers + ends) * LENGTH / tp
    assert ours == pytest.approx(expected, rel=1e-9)


def test_recomputation_keeps_less_and_full_keeps_the_input_alone():
    model = MODELS["llama-3-8b"][0]
    none, mlp, full = (kept_by_layer(model, recompute=r) for r in RECOMPUTE)
    assert none - mlp == 6 * model.ffn
    assert full == 2 * model.hidden


def test_few_key_value_heads_are_repeated_for_ulysses():
    model = MODELS["llama-3-8b"][0]  # 8 key/value heads
    eight, sixteen = (kept_by_layer(model, recompute="none", ulysses=u) for u in (8, 16))
    assert sixteen - eight == 2 * 2 * 8 * model.head


def test_pipeline_stages_hold_as_many_micro_batches_as_are_in_flight():
    model = MODELS["llama-2-7b"][0]
    sizes = {"sequence_length": LENGTH}
    few = memory_of(model, Layout(pp=4), global_batch=1, **sizes)
    many = memory_of(model, Layout(pp=4), global_batch=16, **sizes)
    assert many.activations > 3.9 * few.activations


def test_the_papers_run_fits_where_the_paper_ran_it():
    """Llama-2-7B at 64K on 8 A100-80GB, context parallel over all of them."""
    _, model = find_model("llama-2-7b")
    gpu = find_gpu("A100-80GB")
    sizes = {"sequence_length": 65536, "global_batch": 8}
    assert memory_of(model, Layout(cp=8, recompute="full"), **sizes).total < budget(gpu)
    assert memory_of(model, Layout(cp=8, dp=1), **sizes).total > budget(gpu)
