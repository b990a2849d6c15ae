"""Tokenizers and tiny models for the tests of evaluation."""

from __future__ import annotations

import torch

from megatron_anchor.evaluation.haystack import NOISE, default_essays


def byte_tokenizer(folder, *, bos: bool = True):
    """A byte a token, behind a <bos> if asked for: as fine as a tokenizer can be."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, folder, bos=bos)


def trained_tokenizer(folder, *, bos: bool = False):
    """A BPE with Metaspace words (as Llama-2's), trained on what prompts are made of."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([NOISE, default_essays()[:60_000]], trainer)
    return _save(tokenizer, folder, bos=bos)


def _save(tokenizer, folder, *, bos):
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def tiny_model(folder, *, seed: int = 0, positions: int = 2048, layers: int = 2):
    """A random Llama in float32 that says something else to every prompt, with bytes as tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    byte_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder
