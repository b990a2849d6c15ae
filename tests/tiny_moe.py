"""A tiny random GLM-4.5 (experts with sigmoid scores, groups, bias, shared experts), as an oracle.

Hugging Face runs each sample in the form with one anchor and no padding. The losses of the router
are written out here from its logits, sample by sample, without a mask.

Legend: n tokens of a sample in that form, T its targets, E experts, S slots of the packed sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.tiny_llama import PackedExample

HEADS, KV_HEADS, HEAD_DIM, LAYERS, FFN, VOCAB = 4, 2, 8, 4, 48, 128
HIDDEN = HEADS * HEAD_DIM
EXPERTS, TOP_K, EXPERT_FFN, GROUPS, GROUP_TOP_K, SCALING = 16, 4, 12, 4, 2, 2.5
MOE_LAYERS = (1, 2, 3)
COEFFICIENTS = {"aux_loss": 0.3, "seq_aux_loss": 0.5, "global_aux_loss": 0.7, "z_loss": 0.02}

S = 64
SAMPLES = ([15] * 4, [37], [1, 1, 2, 9, 30], [20, 7, 33])
"""Documents of each sample; with an anchor each they leave 0, 26, 16 and 1 slots of padding."""
WITHOUT_FIRST_TOKENS = 3
"""The sample in which the first tokens of documents are no targets."""


class Sample(NamedTuple):
    """What `PackedDataset` gives, and the form with one anchor."""

    fields: dict[str, Tensor]
    shared_tokens: Tensor
    shared_mask: Tensor
    targets: list[tuple[int, int]]


def make_sample(lengths: list[int], *, seed: int, first_token_loss: bool = True) -> Sample:
    """Write a padded sample out from the layout's rules."""
    example = PackedExample(lengths, seed=seed)
    filled = len(example.tokens)
    loss_mask, targets = example.loss_mask.clone(), example.targets
    anchors = example.cu_seqlens[:-1].long()
    if not first_token_loss:
        loss_mask[anchors] = 0
        targets = [(row, token) for row, token in targets if row > 0]
    counted = torch.ones(filled, dtype=torch.bool)
    counted[anchors[1:]] = False
    cu_seqlens = torch.full((S // 2 + 1,), S, dtype=torch.int32)
    cu_seqlens[: len(example.cu_seqlens)] = example.cu_seqlens

    def padded(field: Tensor) -> Tensor:
        return torch.nn.functional.pad(field, (0, S - filled))

    fields = {
        "tokens": padded(example.tokens),
        "labels": padded(example.labels),
        "loss_mask": padded(loss_mask),
        "position_ids": padded(example.position_ids),
        "router_mask": padded(counted),
        "cu_seqlens": cu_seqlens,
    }
    return Sample(fields, example.shared_tokens, example.shared_mask, targets)


def make_samples() -> list[Sample]:
    return [
        make_sample(lengths, seed=n, first_token_loss=n != WITHOUT_FIRST_TOKENS)
        for n, lengths in enumerate(SAMPLES)
    ]


def hugging_face_glm(seed: int = 0) -> Any:
    """Build a random Glm4MoeForCausalLM in float32 with eager attention."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        moe_intermediate_size=EXPERT_FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        n_group=GROUPS,
        topk_group=GROUP_TOP_K,
        routed_scaling_factor=SCALING,
        first_k_dense_replace=MOE_LAYERS[0],
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        },
        attn_implementation="eager",
        num_mtp_layers=0,
    )
    model = Glm4MoeForCausalLM(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.2)
        for layer in MOE_LAYERS:
            model.model.layers[layer].mlp.gate.e_score_correction_bias.normal_(0.0, 0.1)
    return model


def megatron_weights(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a state dict (weights or gradients) to Megatron's local layer spec.

    Each ``linear_fc1`` outside the experts stays a pair [2, FFN, D], to be cut for TP.
    """
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
        grouped = [x.view(KV_HEADS, -1, HIDDEN) for x in (q, k, v)]
        out |= {
            f"{ours}input_layernorm.weight": hf[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(grouped, 1).flatten(0, 1),
            f"{ours}self_attention.linear_proj.weight": hf[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}pre_mlp_layernorm.weight": hf[f"{theirs}post_attention_layernorm.weight"],
        }
        dense = f"{theirs}mlp.", f"{ours}mlp."
        if i in MOE_LAYERS:
            dense = f"{theirs}mlp.shared_experts.", f"{ours}mlp.shared_experts."
            out[f"{ours}mlp.router.weight"] = hf[f"{theirs}mlp.gate.weight"]
            for e in range(EXPERTS):
                expert = f"{ours}mlp.experts.local_experts.{e}."
                out[f"{expert}linear_fc1.weight"] = hf[f"{theirs}mlp.experts.gate_up_proj"][e]
                out[f"{expert}linear_fc2.weight"] = hf[f"{theirs}mlp.experts.down_proj"][e]
        names = (hf[f"{dense[0]}{x}_proj.weight"] for x in ("gate", "up"))
        out[f"{dense[1]}linear_fc1.weight"] = torch.stack(tuple(names))
        out[f"{dense[1]}linear_fc2.weight"] = hf[f"{dense[0]}down_proj.weight"]
    return out


def expert_biases(model: Any) -> dict[str, Tensor]:
    """The routers' biases under Megatron's names."""
    return {
        f"decoder.layers.{i}.mlp.router": model.model.layers[i].mlp.gate.e_score_correction_bias
        for i in MOE_LAYERS
    }


class Run(NamedTuple):
    """One sample in the form with one anchor."""

    loss: Tensor
    """summed over the targets"""
    targets: int
    logits: list[Tensor]
    """[n, E] of each router"""
    chosen: list[Tensor]
    """[n, k] experts of each router"""


def run(model: Any, sample: Sample) -> Run:
    """Run Hugging Face with an explicit mask and positions 0, 1, ..."""
    seen: list[Any] = []
    hooks = [
        model.model.layers[i].mlp.gate.register_forward_hook(lambda *a: seen.append(a[-1]))
        for i in MOE_LAYERS
    ]
    additive = torch.zeros_like(sample.shared_mask, dtype=torch.float32)
    additive.masked_fill_(~sample.shared_mask, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=sample.shared_tokens[None],
        attention_mask=additive[None, None],
        position_ids=torch.arange(len(sample.shared_tokens))[None],
    ).logits[0]
    for hook in hooks:
        hook.remove()
    rows, targets = (torch.tensor(x) for x in zip(*sample.targets, strict=True))
    loss = torch.nn.functional.cross_entropy(logits[rows], targets, reduction="sum")
    return Run(loss, len(rows), [x[0] for x in seen], [x[2] for x in seen])


def deal(runs: list[Run], *, dp: int, micro_batch: int) -> list[list[list[Run]]]:
    """The micro-batches of each data-parallel rank."""
    ranks = [runs[r::dp] for r in range(dp)]
    return [[rank[i : i + micro_batch] for i in range(0, len(rank), micro_batch)] for rank in ranks]


def total_loss(
    ranks: list[list[list[Run]]], *, per_token: bool, coefficients: dict[str, float]
) -> Tensor:
    """The loss of a global batch, router losses included."""
    batches = [batch for rank in ranks for batch in rank]
    total = torch.zeros((), dtype=torch.float64)
    for batch, layers in zip(batches, router_losses(ranks, per_token=per_token), strict=True):
        loss = sum(r.loss.double() for r in batch) / count_targets(batch)
        for losses in layers:
            loss = loss + sum(coefficients[name] * value for name, value in losses.items())
        everything = [r for other in batches for r in other]
        share = count_targets(batch) / count_targets(everything)
        total = total + loss * (share if per_token else 1 / len(batches))
    return total


def count_targets(runs: list[Run]) -> int:
    return sum(r.targets for r in runs)


def router_losses(
    ranks: list[list[list[Run]]], *, per_token: bool
) -> list[list[dict[str, Tensor]]]:
    """Each micro-batch's losses of each router, without coefficients."""
    return [
        [
            batch_losses(batch, [other[: step + 1] for other in ranks], layer, per_token=per_token)
            for layer in range(len(MOE_LAYERS))
        ]
        for rank in ranks
        for step, batch in enumerate(rank)
    ]


def batch_losses(
    batch: list[Run], so_far: list[list[list[Run]]], layer: int, *, per_token: bool
) -> dict[str, Tensor]:
    """Losses of a micro-batch; `so_far` are all ranks' micro-batches up to this one."""
    p = torch.cat([scores(r, layer) for r in batch])
    logits = torch.cat([r.logits[layer] for r in batch]).double()
    everything = [r for rank in so_far for step in rank for r in step]
    now = sum(len(r.logits[layer]) for rank in so_far for r in rank[-1])
    of_samples = [
        balance(scores(r, layer), counts([r], layer), len(r.logits[layer]))
        * (r.targets / count_targets(batch) if per_token else 1 / len(batch))
        for r in batch
    ]
    return {
        "aux_loss": balance(p, counts(batch, layer), len(p)),
        "seq_aux_loss": torch.stack(of_samples).sum(),
        "global_aux_loss": balance(p, counts(everything, layer), now),
        "z_loss": torch.logsumexp(logits, -1).square().mean(),
    }


def scores(r: Run, layer: int) -> Tensor:
    sigmoid = torch.sigmoid(r.logits[layer].double())
    return sigmoid / sigmoid.sum(-1, keepdim=True)


def counts(runs: list[Run], layer: int) -> Tensor:
    """How many tokens each expert would get by scores alone, as Megatron's losses count."""
    top = torch.cat([r.logits[layer].topk(TOP_K, dim=-1).indices.flatten() for r in runs])
    return torch.bincount(top, minlength=EXPERTS).double()


def balance(p: Tensor, tokens_per_expert: Tensor, tokens: int) -> Tensor:
    """E x sum of (share of choices) x (mean score)."""
    shares = tokens_per_expert / tokens_per_expert.sum()
    return len(shares) * (shares * p.sum(0) / tokens).sum()
