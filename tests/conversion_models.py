"""Tiny random Hugging Face models of every family, and the ways in which they differ."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPE = {
    "vocab_size": 131,  # odd, so that Megatron has to fill it up
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 3e4}
FULL, SLIDING = "full_attention", "sliding_attention"

MODELS = {
    "llama": ("Llama", {}),
    "llama without gqa, tied": ("Llama", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama3 scaling, wide heads": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama linear, all biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
    ),
    "llama yarn, attention bias": (
        "Llama",
        {"attention_bias": True, "rope_parameters": YARN, "rms_norm_eps": 1e-5},
    ),
    "llama mlp bias": ("Llama", {"mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "smollm3": ("SmolLM3", {"pad_token_id": None}),
    "smollm3, uneven layers with a window, biases": (
        "SmolLM3",
        {
            **{"pad_token_id": None, "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False},
            **{"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
            **{"use_sliding_window": True, "sliding_window": 9},
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, window in the upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 untied": ("Qwen3", {"head_dim": 8}),
    "qwen3, window in every second layer": (
        "Qwen3",
        {
            **{"use_sliding_window": True, "sliding_window": 5, "head_dim": 16},
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
        },
    ),
    "mixtral, window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
            **{"sliding_window": 6, "swiglu_limit": 0.5},
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "gpt-oss, other layers, no attention biases": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16},
            **{
                "swiglu_limit": 2.0,
                "sliding_window": 9,
                "attention_bias": False,
                "rope_parameters": PLAIN,
            },
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "qwen3 moe, normalized": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}
"""Name to transformers' class and what differs from its defaults and from `SHAPE`."""


def hugging_face_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Build a random model with weights that spread, so that mistakes cannot hide."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, differences = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **differences})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    output = "embed_tokens" if config.tie_word_embeddings else "lm_head"  # logits below 1
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.05 if output in parameter_name else 0.25)
    return model.to(dtype).eval()


def weights_of(folder) -> dict[str, Tensor]:
    """Read a model folder's safetensors by the library itself."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
