"""A tiny random Hugging Face Llama and its weights under Megatron's names.

Legend: V vocabulary, D hidden, T document tokens of a sample, S its slots (anchor copies included).
"""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, LAYERS, FFN, VOCAB = 8, 2, 8, 4, 96, 128
HIDDEN = HEADS * HEAD_DIM
ROPE_BASE = 1e4


def hugging_face_llama(seed: int = 0, *, kv_heads: int = KV_HEADS):
    """Build a random LlamaForCausalLM (GQA) in float32 with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Random norms too, and logits that spread: else mistakes would hide.
            spread = 0.1 if "norm" in name or "lm_head" in name else 0.25
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    return model


def megatron_weights(hf: dict[str, Tensor], *, kv_heads: int = KV_HEADS) -> dict[str, Tensor]:
    """Rename a Llama state dict (weights or gradients) to Megatron's local layer spec.

    ``linear_fc1`` stays a pair [2, FFN, D] so that each half can be sliced for tensor parallelism.
    """
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
        grouped = [x.view(kv_heads, -1, HIDDEN) for x in (q, k, v)]
        out |= {
            f"{ours}input_layernorm.weight": hf[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(grouped, 1).flatten(0, 1),
            f"{ours}self_attention.linear_proj.weight": hf[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}pre_mlp_layernorm.weight": hf[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.stack(
                (hf[f"{theirs}mlp.gate_proj.weight"], hf[f"{theirs}mlp.up_proj.weight"])
            ),
            f"{ours}mlp.linear_fc2.weight": hf[f"{theirs}mlp.down_proj.weight"],
        }
    return out


def tensor_parallel_shard(name: str, full: Tensor, *, rank: int, size: int) -> Tensor:
    """Cut one rank's share of a full weight."""
    if "norm" in name:
        return full
    if "linear_fc1" in name:
        return full.chunk(size, 1)[rank].flatten(0, 1)
    dim = 1 if ("linear_proj" in name or "linear_fc2" in name) else 0
    return full.chunk(size, dim)[rank]


class PackedExample:
    """One sample in the paper's shared form and in ours, written out from DESIGN's rules."""

    def __init__(self, lengths: list[int], *, seed: int, anchor: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        documents = [torch.randint(2, VOCAB, (n,), generator=generator) for n in lengths]
        shared, of_document, targets = [anchor], [-1], []
        tokens, labels, mask, positions, rows = [], [], [], [], []
        for number, document in enumerate(documents):
            start = len(shared)
            shared += document.tolist()
            of_document += [number] * len(document)
            rows_here = [0, *range(start, start + len(document))]
            tokens += [anchor, *document.tolist()]
            labels += [*document.tolist(), 0]
            mask += [1] * len(document) + [0]
            positions += rows_here
            rows += rows_here
            targets += list(zip(rows_here[:-1], document.tolist(), strict=True))
        self.shared_tokens = torch.tensor(shared)
        document_of = torch.tensor(of_document)
        slot = torch.arange(len(shared))
        causal = slot[None, :] <= slot[:, None]
        self.shared_mask = causal & (
            (document_of[:, None] == document_of[None, :]) | (slot[None, :] == 0)
        )
        self.targets = targets
        self.tokens, self.labels = torch.tensor(tokens), torch.tensor(labels)
        self.loss_mask, self.position_ids = torch.tensor(mask).float(), torch.tensor(positions)
        self.rows_in_shared_form = torch.tensor(rows)
        self.cu_seqlens = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0).to(torch.int32)


def hugging_face_logits_and_loss(model, example: PackedExample) -> tuple[Tensor, Tensor]:
    """Run Hugging Face in the shared form with an explicit additive mask, positions 0, 1, ..., T.

    Returns:
        [T + 1, V] logits and the summed loss over the example's targets.
    """
    additive = torch.zeros_like(example.shared_mask, dtype=torch.float32)
    additive.masked_fill_(~example.shared_mask, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=example.shared_tokens[None],
        attention_mask=additive[None, None],
        position_ids=torch.arange(len(example.shared_tokens))[None],
    ).logits[0]
    rows, targets = (torch.tensor(x) for x in zip(*example.targets, strict=True))
    loss = torch.nn.functional.cross_entropy(logits[rows], targets, reduction="sum")
    return logits, loss
