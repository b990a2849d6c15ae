"""Memory against Megatron's own formulas, and the paper's setting on 8 A100."""

from argparse import Namespace

import pytest

from megatron_anchor.planner.gpus import find_gpu
from megatron_anchor.planner.layout import Layout
from megatron_anchor.planner.memory import budget, kept_by_layer, memory_of
from megatron_anchor.planner.models import MODELS, find_model, known_shape
from megatron_anchor.planner.work import RECOMPUTE

LENGTH = 8192


def megatron_args(shape, layout, *, length=LENGTH):
    """What theoretical_memory_usage reads."""
    model, latent, experts = shape.model, shape.latent, shape.experts
    args = Namespace(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=shape.ffn,
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
        multi_latent_attention=latent is not None,
        add_bias_linear=model.linear_bias,
        num_experts=None,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=shape.predicted or None,
        use_distributed_optimizer=True,
        tensor_model_parallel_size=layout.tp,
        expert_tensor_parallel_size=1 if experts else layout.tp,
        expert_model_parallel_size=layout.ep,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=None,
        data_parallel_size=layout.optimizer_shards,
        world_size=layout.gpus,
    )
    if latent is not None:
        args.q_lora_rank, args.kv_lora_rank = latent.q_lora_rank, latent.kv_lora_rank
        args.qk_head_dim, args.v_head_dim = latent.qk_nope_head_dim, latent.v_head_dim
        args.qk_pos_emb_head_dim = latent.qk_rope_head_dim
    if experts is not None:
        args.num_experts, args.moe_router_topk = experts.number, experts.per_token
        args.moe_ffn_hidden_size = experts.ffn
        args.moe_shared_expert_intermediate_size = experts.shared_ffn or None
        dense = experts.dense_layers
        args.moe_layer_freq = [0] * dense + [1] * (model.layers - dense)
    return args


@pytest.mark.parametrize("name", [name for name in MODELS if not known_shape(name).experts])
@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 1, 4), (4, 2, 2), (8, 4, 1), (2, 1, 1)])
def test_weights_and_optimizer_are_megatrons(name, sizes):
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    shape, (tp, pp, dp) = known_shape(name), sizes
    layout = Layout(tp=tp, pp=pp, dp=dp)
    theirs = compute_weight_and_optimizer_memory(megatron_args(shape, layout))
    memory = memory_of(shape, layout, sequence_length=LENGTH, global_batch=dp)
    # Theirs leaves out biases and the norms of queries and keys, and spreads the final norm.
    assert memory.states == pytest.approx(theirs, rel=2e-4 if not shape.model.qkv_bias else 1e-3)


@pytest.mark.parametrize("name", [name for name in MODELS if known_shape(name).experts])
@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 8, 8), (2, 16, 4), (8, 1, 8)])
def test_weights_and_optimizer_of_experts_are_megatrons(name, sizes):
    """One stage; theirs shares the projections to the latents and leaves out biases and the ends
    of multi-token prediction."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    shape, (tp, dp, ep) = known_shape(name), sizes
    layout = Layout(tp=tp, dp=dp, ep=ep)
    theirs = compute_weight_and_optimizer_memory(megatron_args(shape, layout))
    memory = memory_of(shape, layout, sequence_length=LENGTH, global_batch=dp)
    plain = 6 + 12 / dp
    hidden, known = shape.model.hidden, 0.0
    if shape.latent:
        layers = shape.layers + shape.predicted
        latents = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
        latents += shape.latent.q_lora_rank or 0
        known += layers * hidden * latents * (1 - 1 / tp) * plain
    known += shape.predicted * 2 * hidden * hidden / tp * plain
    assert memory.states == pytest.approx(theirs + known, rel=2e-3)


def test_context_parallel_ranks_share_the_optimizer_too():
    shape = known_shape("llama-2-7b")
    one, eight = (
        memory_of(shape, layout, sequence_length=LENGTH, global_batch=8)
        for layout in (Layout(dp=8), Layout(cp=8))
    )
    assert one.states == eight.states


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_are_megatrons_but_for_swiglu_and_dropout(name, tp):
    """Theirs counts GELU with dropout; part by part the two formulas must meet."""
    from megatron.training.theoretical_memory_usage import compute_activation_memory

    shape, layout = known_shape(name), Layout(tp=tp, dp=1)
    model = shape.model
    theirs = compute_activation_memory(megatron_args(shape, layout), num_microbatches=1)
    memory = memory_of(shape, layout, sequence_length=LENGTH, global_batch=1)
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
    shape = known_shape("llama-3-8b")
    none, mlp, full = (kept_by_layer(shape, recompute=r) for r in RECOMPUTE)
    assert none - mlp == 6 * shape.ffn
    assert full == 2 * shape.model.hidden


def test_few_key_value_heads_are_repeated_for_ulysses():
    shape = known_shape("llama-3-8b")  # 8 key/value heads
    eight, sixteen = (kept_by_layer(shape, recompute="none", ulysses=u) for u in (8, 16))
    assert sixteen - eight == 2 * 2 * 8 * shape.model.head


def test_pipeline_stages_hold_as_many_micro_batches_as_are_in_flight():
    shape = known_shape("llama-2-7b")
    sizes = {"sequence_length": LENGTH}
    few = memory_of(shape, Layout(pp=4), global_batch=1, **sizes)
    many = memory_of(shape, Layout(pp=4), global_batch=16, **sizes)
    assert many.activations > 3.9 * few.activations


def test_the_papers_run_fits_where_the_paper_ran_it():
    """Llama-2-7B at 64K on 8 A100-80GB, context parallel over all of them."""
    _, shape = find_model("llama-2-7b")
    gpu = find_gpu("A100-80GB")
    sizes = {"sequence_length": 65536, "global_batch": 8}
    assert memory_of(shape, Layout(cp=8, recompute="full"), **sizes).total < budget(gpu)
    assert memory_of(shape, Layout(cp=8, dp=1), **sizes).total > budget(gpu)
