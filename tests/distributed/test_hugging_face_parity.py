"""Logits and gradients of every layout against Hugging Face in the paper's shared form.

Theirs: one bos, positions 0, 1, ..., T and an explicit additive mask. Ours: copies of the anchor,
packed documents, Megatron's GPTModel under tensor, sequence, pipeline, context and data
parallelism. Same weights, float32.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import tiny_llama
from tests.distributed.ranks import run_ranks

S, GLOBAL_BATCH = 64, 4
# Each sample's document lengths add up to S with one anchor per document; odd sizes on purpose.
SAMPLES = ([63], [1, 1, 59], [20, 7, 34], [5, 30, 2, 23])

LAYOUTS = {
    "one process": {},
    "TP2": {"tp": 2},
    "TP2 SP": {"tp": 2, "sp": True},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
    "micro-batch 2 CP2": {"cp": 2, "micro_batch": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "TP2 SP CP2": {"tp": 2, "sp": True, "cp": 2},
    "TP4 (kv heads < TP)": {"tp": 4},
    "CP4 (kv heads < CP)": {"cp": 4},
    "PP2 interleaved CP2": {"pp": 2, "vpp": 2, "cp": 2},
    "DP2 PP2 micro-batch 2": {"dp": 2, "pp": 2, "micro_batch": 2},
    "TP2 SP PP2 CP2": {"tp": 2, "sp": True, "pp": 2, "cp": 2},
    "TP2 CP2 DP2": {"tp": 2, "cp": 2, "dp": 2},
    "CP8 (kv heads < CP)": {"cp": 8},
    "CP2 gathered": {"cp": 2, "keys": 2},
    "CP4 gathered, micro-batch 2": {"cp": 4, "keys": 4, "micro_batch": 2},
    "CP4 as 2 x 2": {"cp": 4, "keys": 2},
    "TP2 SP CP2 gathered": {"tp": 2, "sp": True, "cp": 2, "keys": 2},
}
"""`keys`: groups across which keys and values are gathered."""


def world_size(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1) * layout.get("dp", 1)


def split_of(layout):
    from megatron_anchor.training.context_parallel import ContextParallel

    cp, keys = layout.get("cp", 1), layout.get("keys", 1)
    kind = "ulysses" if keys == 1 else "gather" if keys == cp else "ulysses+gather"
    return ContextParallel(kind=kind, heads_ranks=cp // keys, keys_ranks=keys)


def build_model(tp, pp, cp, sp, vpp, dtype=torch.float32, context_parallel="ulysses"):
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_anchor.attention.layer_spec import anchor_block_spec
    from megatron_anchor.attention.rope import RotarySettings

    config = TransformerConfig(
        num_layers=tiny_llama.LAYERS,
        hidden_size=tiny_llama.HIDDEN,
        num_attention_heads=tiny_llama.HEADS,
        num_query_groups=tiny_llama.KV_HEADS,
        kv_channels=tiny_llama.HEAD_DIM,
        ffn_hidden_size=tiny_llama.FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        transformer_impl="local",
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        cp_comm_type="a2a" if cp > 1 else None,
        sequence_parallel=sp,
        # Two stages of an interleaved pipeline are each other's next and previous: batched
        # sends would mix up activations and gradients (Megatron's own arguments insist on it).
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
    )
    rotary = RotarySettings(head_dim=tiny_llama.HEAD_DIM, base=tiny_llama.ROPE_BASE)
    chunks = []
    for vp_stage in range(vpp or 1):
        stage = vp_stage if vpp else None
        model = GPTModel(
            config,
            anchor_block_spec(
                config,
                rotary=rotary,
                backend="sdpa",
                context_parallel=context_parallel,
                vp_stage=stage,
            ),
            vocab_size=tiny_llama.VOCAB,
            max_sequence_length=S,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="none",
            vp_stage=stage,
        )
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), model))
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def global_name(model, name):
    """Give a parameter its name in the unsplit model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def loaded_model(layout, weights, dtype=torch.float32):
    """Set up a layout's groups and give this rank its chunks of the model with its weights."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp, pp, cp = (layout.get(x, 1) for x in ("tp", "pp", "cp"))
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    found = split_of(layout)
    sizes = [found.heads_ranks, found.keys_ranks] if found.kind == "ulysses+gather" else None
    mpu.initialize_model_parallel(
        *(tp, pp, layout.get("vpp")),
        context_parallel_size=cp,
        hierarchical_context_parallel_sizes=sizes,
    )
    model_parallel_cuda_manual_seed(1)
    sp, vpp = layout.get("sp", False), layout.get("vpp")
    chunks = build_model(tp, pp, cp, sp, vpp, dtype, context_parallel=found.kind)
    shard = {"rank": mpu.get_tensor_model_parallel_rank(), "size": tp}
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                full = weights[global_name(chunk.module, name)]
                parameter.copy_(tiny_llama.tensor_parallel_shard(name, full, **shard))
    return chunks, shard


def compare_with_hugging_face(layout, weights, gradients, logits):
    """Run one layout on this rank; return the largest differences in logits and gradients."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, shard = loaded_model(layout, weights)
    forward_backward, seen = get_forward_backward_func(), []
    common = {
        "model": chunks if len(chunks) > 1 else chunks[0],
        "num_microbatches": GLOBAL_BATCH // layout.get("dp", 1) // layout.get("micro_batch", 1),
        "seq_length": S,
        "micro_batch_size": layout.get("micro_batch", 1),
    }
    forward_backward(
        forward_step_func=forward_step(layout, seen=seen),
        data_iterator=[micro_batches(layout) for _ in chunks]
        if len(chunks) > 1
        else micro_batches(layout),
        forward_only=True,
        collect_non_loss_data=True,
        **common,
    )
    worst_logit = max(
        (
            (got - vocabulary_share(logits[number], piece)).abs().max()
            for number, piece, got in seen
        ),
        default=torch.tensor(0.0),
    )
    for chunk in chunks:
        chunk.zero_grad_buffer()
    forward_backward(
        forward_step_func=forward_step(layout),
        data_iterator=[micro_batches(layout) for _ in chunks]
        if len(chunks) > 1
        else micro_batches(layout),
        forward_only=False,
        **common,
    )
    worst_gradient = {}
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            key = global_name(chunk.module, name)
            want = tiny_llama.tensor_parallel_shard(name, gradients[key], **shard)
            scale = gradients[key].abs().max()
            worst_gradient[key] = float((parameter.main_grad - want).abs().max() / scale)
    mpu.destroy_model_parallel()
    return float(worst_logit), len(seen), worst_gradient


def micro_batches(layout):
    """Yield (sample numbers, this rank's MicroBatch) of this data-parallel rank."""
    from megatron.core import mpu

    from megatron_anchor.attention.packed import pack_micro_batch
    from megatron_anchor.context_parallel.split import assign_chunks
    from megatron_anchor.training.batch import MicroBatch

    size, split = layout.get("micro_batch", 1), split_of(layout).split
    mine = list(range(mpu.get_data_parallel_rank(), GLOBAL_BATCH, layout.get("dp", 1)))
    for first in range(0, len(mine), size):
        numbers = mine[first : first + size]
        examples = [EXAMPLES[n] for n in numbers]
        chunks = [
            assign_chunks(e.cu_seqlens.numpy(), sequence_length=S, parts=split.parts)
            for e in examples
        ]
        pieces = [
            split.slots(e.cu_seqlens.numpy(), part_of_chunk, rank=mpu.get_context_parallel_rank())
            for e, part_of_chunk in zip(examples, chunks, strict=True)
        ]
        tokens, labels, loss_mask, positions = (
            torch.stack([getattr(e, field)[p] for e, p in zip(examples, pieces, strict=True)])
            for field in ("tokens", "labels", "loss_mask", "position_ids")
        )
        cu_seqlens = torch.full((size, 8), S, dtype=torch.int32)
        for row, example in enumerate(examples):
            cu_seqlens[row, : len(example.cu_seqlens)] = example.cu_seqlens
        batch = MicroBatch(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            packed=pack_micro_batch(
                positions,
                cu_seqlens,
                seq_length=S,
                part_of_chunk=chunks if split.gathers else (),
            ),
            figures={},
        )
        yield numbers, pieces, batch


def forward_step(layout, seen=None):
    """Give Megatron's schedules a step that keeps logits (``seen``) or sums the loss."""

    def step(data_iterator, model):
        numbers, pieces, batch = next(data_iterator)
        labels = None if seen is not None else batch.labels
        output = model(
            batch.tokens,
            batch.packed.position_ids_Bs,
            None,
            labels=labels,
            packed_seq_params=batch.packed,
        )

        def keep(logits_BsV, non_loss_data):
            rows = zip(numbers, pieces, logits_BsV, strict=True)
            seen.extend((number, piece, row.clone()) for number, piece, row in rows)

        def loss(losses_Bs):
            return (losses_Bs * batch.loss_mask).sum(), batch.loss_mask.sum().int(), {}

        return output, loss if seen is None else keep

    return step


def vocabulary_share(logits_SV, piece):
    from megatron.core import mpu

    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return logits_SV[piece].chunk(size, -1)[rank]


EXAMPLES = [tiny_llama.PackedExample(lengths, seed=n) for n, lengths in enumerate(SAMPLES)]


def layouts_on_ranks(names, weights, gradients, logits):
    return {
        name: compare_with_hugging_face(LAYOUTS[name], weights, gradients, logits) for name in names
    }


@pytest.fixture(scope="module")
def truth():
    """Hugging Face's logits at every slot of ours, its gradients of the mean loss, its weights."""
    model = tiny_llama.hugging_face_llama()
    logits, loss = [], torch.zeros(())
    for example in EXAMPLES:
        shared_logits, example_loss = tiny_llama.hugging_face_logits_and_loss(model, example)
        logits.append(shared_logits.detach()[example.rows_in_shared_form])
        loss = loss + example_loss
    (loss / sum(len(e.targets) for e in EXAMPLES)).backward()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return tiny_llama.megatron_weights(weights), tiny_llama.megatron_weights(gradients), logits


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_logits_and_gradients_equal_hugging_face_in_the_shared_form(ranks, truth):
    names = [name for name, layout in LAYOUTS.items() if world_size(layout) == ranks]
    assert names
    results = run_ranks(layouts_on_ranks, ranks, names, *truth)
    for name in names:
        logits_seen = sum(result[name][1] for result in results)
        assert logits_seen >= GLOBAL_BATCH, f"{name}: compared only {logits_seen} pieces of logits"
        worst_logit = max(result[name][0] for result in results)
        # Gathered keys come in two sets, whose merging rounds a few more times.
        allowed = 1e-5 if "keys" not in LAYOUTS[name] else 2e-5
        assert worst_logit <= allowed, f"{name}: logits differ by {worst_logit}"
        parameters = {key: worst for result in results for key, worst in result[name][2].items()}
        assert len(parameters) == 3 + 6 * tiny_llama.LAYERS
        for result in results:
            for key, worst in result[name][2].items():
                assert worst <= 1e-5, f"{name}: gradient of {key} differs by {worst} of its largest"
        print(f"{name}: logits {worst_logit:.1e}", end="; ")
        print(f"gradients {max(max(r[name][2].values()) for r in results):.1e}")


def logits_of_rank(layout, weights, dtype):
    """Give {sample: this context-parallel rank's piece of the logits}."""
    chunks, _ = loaded_model(layout, weights, dtype)
    pieces = {}
    with torch.no_grad():
        for numbers, _, batch in micro_batches(layout):
            logits = chunks[0](
                batch.tokens,
                batch.packed.position_ids_Bs,
                None,
                packed_seq_params=batch.packed,
            )
            pieces |= {n: row.float() for n, row in zip(numbers, logits, strict=True)}
    return pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cp", [2, 4])
def test_model_logits_under_context_parallelism_have_the_bits_of_one_process(cp, dtype, truth):
    (whole,) = run_ranks(logits_of_rank, 1, {}, truth[0], dtype)
    pieces = run_ranks(logits_of_rank, cp, {"cp": cp}, truth[0], dtype)
    for number, logits in whole.items():
        together = torch.cat([rank[number] for rank in pieces])
        worst = float((together - logits).abs().max())
        assert torch.equal(together, logits), f"sample {number}: logits differ by {worst}"


@pytest.mark.parametrize("wrong", ["positions count the anchor copies", "no document mask"])
def test_a_wrong_layout_would_be_noticed(wrong, truth):
    """Negative controls: the comparison above fails by far, so it can fail."""
    example = EXAMPLES[2]
    if wrong == "no document mask":
        cu_seqlens = torch.tensor([0, S], dtype=torch.int32)
        positions = example.position_ids
    else:
        cu_seqlens, positions = example.cu_seqlens, torch.arange(S)
    (logits,) = run_ranks(logits_with, 1, truth[0], example.tokens, positions, cu_seqlens)
    assert (logits - truth[2][2]).abs().max() > 0.1


def logits_with(weights, tokens, positions, cu_seqlens):
    """Run one process with the given positions and documents."""
    from megatron_anchor.attention.packed import pack_micro_batch

    chunks, _ = loaded_model({}, weights)
    packed = pack_micro_batch(positions[None], cu_seqlens[None], seq_length=S)
    with torch.no_grad():
        return chunks[0](tokens[None], positions[None], None, packed_seq_params=packed)[0]
