"""Tiny random DeepSeek models (V3 with multi-token prediction, V2-Lite), as an oracle.

The main loss is Hugging Face's in the form with one anchor and no padding, with an explicit mask
and positions. Multi-token prediction is transformers' ``MtpLayer`` over every document alone (its
anchor, tokens and positions), and its targets are counted slot by slot from the law.

Legend: n tokens of a sample in that form, S slots of the packed sample, D depths.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import tiny_moe
from tests.tiny_moe import EXPERT_FFN, EXPERTS, GROUP_TOP_K, GROUPS, SCALING, TOP_K, VOCAB

HEADS, LAYERS, HIDDEN, FFN = 4, 4, 32, 48
Q_RANK, KV_RANK, PLAIN, ROTATED, VALUE = 16, 12, 8, 4, 6
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 32,
}
SHARE = 0.3
"""lambda, --mtp-loss-scaling-factor."""
COEFFICIENTS = {"aux_loss": 0.3, "z_loss": 0.02}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of model."""

    low_rank_queries: bool = True
    yarn: bool = True
    experts: str | None = "v3"
    """``v3``: sigmoid scores, groups, bias; ``v2``: softmax; None: dense layers only."""
    depths: int = 0
    repeated: bool = False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(1, LAYERS)) if self.experts else ()

    @property
    def mtp_layers(self) -> int:
        return min(self.depths, 1) if self.repeated else self.depths

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return dict(YARN) if self.yarn else {"rope_type": "default"}


CASES = {
    "V3 with two depths": Case(depths=2),
    "V3, one layer for two depths": Case(depths=2, repeated=True),
    "V2-Lite": Case(low_rank_queries=False, experts="v2"),
    "dense, plain RoPE, one depth": Case(yarn=False, experts=None, depths=1),
}


def make_samples() -> list[tiny_moe.Sample]:
    """Padded samples; the first is cut behind its last token, the second goes on with one."""
    cut, rest, *others = tiny_moe.make_samples()
    cut.fields["labels"][-1], cut.fields["loss_mask"][-1] = 77, 1
    rest.fields["labels"][0], rest.fields["loss_mask"][0] = 0, 0
    cut = cut._replace(targets=[*cut.targets, (len(cut.shared_tokens) - 1, 77)])
    return [cut, rest._replace(targets=rest.targets[1:]), *others]


class Model(NamedTuple):
    """Hugging Face's model and its layers of multi-token prediction."""

    main: Any
    layers: list[Any]


def hugging_face(case: Case, seed: int = 0) -> Model:
    """Build a random model in float32 with eager attention."""
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
    )
    from transformers.modeling_layers import MtpLayer

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "moe_intermediate_size": EXPERT_FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "routed_scaling_factor": SCALING,
        "first_k_dense_replace": case.moe_layers[0] if case.experts else LAYERS,
        "q_lora_rank": Q_RANK if case.low_rank_queries else None,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": VALUE,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1280,
        "rope_parameters": {**case.rope_parameters, "rope_theta": 1e4},
        "attn_implementation": "eager",
    }
    if case.experts == "v2":
        main = DeepseekV2ForCausalLM(DeepseekV2Config(**shape, topk_method="greedy"))
    else:
        groups = {"n_group": GROUPS, "topk_group": GROUP_TOP_K}
        main = DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **groups))
    last = main.model.layers[-1]
    config = copy.deepcopy(main.config)
    config.first_k_dense_replace = 0 if case.experts else LAYERS
    layers = [
        MtpLayer(config, type(last), type(last.input_layernorm), k) for k in range(case.mtp_layers)
    ]
    with torch.no_grad():
        for module in (main, *layers):
            module.float().train()
            for name, parameter in module.named_parameters():
                norm = "norm" in name
                parameter.normal_(1.0 if norm else 0.0, 0.1 if norm else 0.2)
            for name, buffer in module.named_buffers():
                if "correction_bias" in name:
                    buffer.normal_(0.0, 0.1)
    return Model(main, layers)


def named(model: Model, what: str = "parameters") -> dict[str, Tensor]:
    """All parameters, gradients or buffers, those of layer k of multi-token prediction as mtp.k."""
    found = {}
    for prefix, module in [("", model.main), *((f"mtp.{k}.", m) for k, m in _numbered(model))]:
        pairs = module.named_buffers() if what == "buffers" else module.named_parameters()
        for name, tensor in pairs:
            if what == "gradients":
                tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
            found[prefix + name] = tensor.detach()
    return found


def _numbered(model: Model) -> list[tuple[int, Any]]:
    return list(enumerate(model.layers))


def megatron_weights(case: Case, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename parameters (or their gradients) to Megatron's local layer spec, as `tiny_moe` does."""
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(LAYERS):
        out |= _layer(hf, f"model.layers.{i}.", f"decoder.layers.{i}.")
    for k in range(case.mtp_layers):
        theirs, ours = f"mtp.{k}.", f"mtp.layers.{k}."
        for name, own in (("enorm", "enorm"), ("hnorm", "hnorm"), ("post_norm", "final_layernorm")):
            out[f"{ours}{own}.weight"] = hf[f"{theirs}{name}.weight"]
        out[f"{ours}eh_proj.weight"] = hf[f"{theirs}eh_proj.weight"]
        out |= _layer(hf, f"{theirs}mtp_block.", f"{ours}mtp_model_layer.")
    return out


ATTENTION = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}


def _layer(hf: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    out = {
        f"{ours}input_layernorm.weight": hf[f"{theirs}input_layernorm.weight"],
        f"{ours}pre_mlp_layernorm.weight": hf[f"{theirs}post_attention_layernorm.weight"],
    }
    for name, own in ATTENTION.items():
        if f"{theirs}self_attn.{name}.weight" in hf:
            out[f"{ours}self_attention.{own}.weight"] = hf[f"{theirs}self_attn.{name}.weight"]
    dense = f"{theirs}mlp.", f"{ours}mlp."
    if f"{theirs}mlp.gate.weight" in hf:
        dense = f"{theirs}mlp.shared_experts.", f"{ours}mlp.shared_experts."
        out[f"{ours}mlp.router.weight"] = hf[f"{theirs}mlp.gate.weight"]
        for e in range(EXPERTS):
            expert = f"{ours}mlp.experts.local_experts.{e}."
            out[f"{expert}linear_fc1.weight"] = hf[f"{theirs}mlp.experts.gate_up_proj"][e]
            out[f"{expert}linear_fc2.weight"] = hf[f"{theirs}mlp.experts.down_proj"][e]
    pair = (hf[f"{dense[0]}{x}_proj.weight"] for x in ("gate", "up"))
    out[f"{dense[1]}linear_fc1.weight"] = torch.stack(tuple(pair))
    out[f"{dense[1]}linear_fc2.weight"] = hf[f"{dense[0]}down_proj.weight"]
    return out


def routers(case: Case) -> list[str]:
    """Megatron's names of the routers, in the order of `Run.logits`, once per depth."""
    if not case.experts:
        return []
    names = [f"decoder.layers.{i}.mlp.router" for i in case.moe_layers]
    numbers = [0] * case.depths if case.repeated else list(range(case.depths))
    return names + [f"mtp.layers.{k}.mtp_model_layer.mlp.router" for k in numbers]


def expert_biases(case: Case, model: Model) -> dict[str, Tensor]:
    """The routers' biases under Megatron's names."""
    buffers = named(model, "buffers")
    found = {}
    for name in routers(case) if case.experts == "v3" else ():
        theirs = name.replace("decoder.", "model.").replace("mtp.layers.", "mtp.")
        theirs = theirs.replace("mtp_model_layer", "mtp_block").replace("router", "gate")
        found[name] = buffers[f"{theirs}.e_score_correction_bias"]
    return found


class Run(NamedTuple):
    """One sample; `loss`, `targets`, `logits` and `chosen` as in `tiny_moe.Run`."""

    loss: Tensor
    """main loss and weighted losses of the depths, summed"""
    targets: int
    """of the main loss"""
    logits: list[Tensor]
    chosen: list[Tensor]
    depth_losses: list[float]
    """summed over the targets of each depth"""
    depth_targets: list[int]
    main_logits: Tensor
    """[n, V]"""


def run(model: Model, case: Case, sample: tiny_moe.Sample) -> Run:
    """Run Hugging Face on one sample."""
    seen: list[Any] = []
    main, hooks = _watched(model.main, seen)
    additive = torch.zeros_like(sample.shared_mask, dtype=torch.float32)
    additive.masked_fill_(~sample.shared_mask, torch.finfo(torch.float32).min)
    logits = main(
        input_ids=sample.shared_tokens[None],
        attention_mask=additive[None, None],
        position_ids=torch.arange(len(sample.shared_tokens))[None],
    ).logits[0]
    for hook in hooks:
        hook.remove()
    rows, targets = (torch.tensor(x) for x in zip(*sample.targets, strict=True))
    loss = torch.nn.functional.cross_entropy(logits[rows], targets, reduction="sum")
    routed = [[one] for one in seen]
    depths = [_run_depths(model, case, document) for document in documents(sample)]
    for depth in range(case.depths):
        loss = loss + SHARE / case.depths * sum(found[depth].loss for found in depths)
        if case.experts:
            routed.append([found[depth].routed for found in depths])
    return Run(
        loss,
        len(rows),
        [torch.cat([one[0] for one in parts]) for parts in routed],
        [torch.cat([one[2] for one in parts]) for parts in routed],
        [sum(found[d].loss.item() for found in depths) for d in range(case.depths)],
        [sum(found[d].targets for found in depths) for d in range(case.depths)],
        logits.detach(),
    )


def _watched(module: Any, seen: list[Any]) -> tuple[Any, list[Any]]:
    gates = [m for name, m in module.named_modules() if name.endswith("mlp.gate")]
    return module, [m.register_forward_hook(lambda *a: seen.append(a[-1])) for m in gates]


def documents(sample: tiny_moe.Sample) -> list[dict[str, Tensor]]:
    """The fields of each document slice of a packed sample."""
    borders = sample.fields["cu_seqlens"].unique_consecutive().tolist()
    parts = [
        {name: sample.fields[name][a:b] for name in ("tokens", "labels", "loss_mask")}
        | {"positions": sample.fields["position_ids"][a:b]}
        for a, b in pairwise(borders)
    ]
    return [part for part in parts if part["tokens"].any()]  # the last segment may be padding


class _Depth(NamedTuple):
    loss: Tensor
    targets: int
    routed: tuple[Tensor, ...]
    """rows of the router's logits, weights and choices that have a token so far ahead"""


def _run_depths(model: Model, case: Case, document: dict[str, Tensor]) -> list[_Depth]:
    L = len(document["tokens"])
    ids, positions = document["tokens"][None], document["positions"][None]
    causal = torch.full((1, 1, L, L), torch.finfo(torch.float32).min).triu(1)
    states = model.main.model(
        input_ids=ids, position_ids=positions, attention_mask=causal
    ).last_hidden_state
    rotary = model.main.model.rotary_emb(states, positions)
    found = []
    for depth in range(1, case.depths + 1):
        layer = model.layers[0 if case.repeated else depth - 1]
        seen: list[Any] = []
        _, hooks = _watched(layer, seen)
        further = torch.nn.functional.pad(ids[:, depth:], (0, min(depth, L)))
        embedded = model.main.model.embed_tokens(further)
        states = layer(embedded, states, rotary, causal, positions, None)
        for hook in hooks:
            hook.remove()
        logp = torch.log_softmax(model.main.lm_head(states[0]), -1)
        terms = [
            -logp[i, document["labels"][i + depth]]
            for i in range(L - depth)
            if document["loss_mask"][i + depth]
        ]
        routed = tuple(x[: max(0, L - depth)] for x in seen[0]) if seen else ()
        found.append(_Depth(sum(terms, torch.zeros(())), len(terms), routed))
    return found


def total_loss(case: Case, batches: list[list[Run]], *, per_token: bool) -> Tensor:
    """The loss of a global batch, router losses included."""
    everything = [r for batch in batches for r in batch]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = sum(r.loss.double() for r in batch) / tiny_moe.count_targets(batch)
        for number, name in enumerate(routers(case)):
            repeats = case.depths if case.repeated and name.startswith("mtp") else 1
            losses = router_losses(case, batch, number)
            loss = loss + sum(COEFFICIENTS[k] * v for k, v in losses.items()) / repeats
        share = tiny_moe.count_targets(batch) / tiny_moe.count_targets(everything)
        total = total + loss * (share if per_token else 1 / len(batches))
    return total


def router_losses(case: Case, batch: list[Run], layer: int) -> dict[str, Tensor]:
    logits = torch.cat([r.logits[layer] for r in batch]).double()
    if case.experts == "v3":
        scores = torch.sigmoid(logits)
        scores = scores / scores.sum(-1, keepdim=True)
    else:
        scores = torch.softmax(logits, -1)
    counts = tiny_moe.counts(batch, layer)
    return {
        "aux_loss": tiny_moe.balance(scores, counts, len(logits)),
        "z_loss": torch.logsumexp(logits, -1).square().mean(),
    }


def expert_counts(case: Case, runs: list[Run]) -> dict[str, Tensor]:
    """Tokens of each expert, by the router's name in Megatron."""
    found: dict[str, Tensor] = {}
    for number, name in enumerate(routers(case)):
        chosen = torch.cat([r.chosen[number].flatten() for r in runs])
        found[name] = found.get(name, 0) + torch.bincount(chosen, minlength=EXPERTS)
    return found
