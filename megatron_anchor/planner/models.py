"""Well-known models, by what their config.json on Hugging Face states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megatron_anchor.checkpoint.families import FAMILIES
from megatron_anchor.checkpoint.hugging_face_config import architecture, model_of, read_config
from megatron_anchor.errors import UserError
from megatron_anchor.planner.configs import shape_of
from megatron_anchor.planner.shapes import Shape


class Known(NamedTuple):
    """One model of the table."""

    repository: str
    """On Hugging Face; where the config comes from."""
    config: Mapping[str, Any]
    """What of its config.json a plan reads."""


def _config(
    family: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    vocabulary: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def _scaled_llama(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


_QWEN2: dict[str, Any] = {
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
_QWEN3: dict[str, Any] = {**_QWEN2, "head_dim": 128}
_QWEN3_EXPERTS: dict[str, Any] = {
    **_QWEN3,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}


def _deepseek(mscale: float) -> dict[str, Any]:
    return {
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "aux_loss_alpha": 0.001,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
        },
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more: dict[str, Any] = {
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    return _config("GptOss", layers, 2880, 2880, 64, 8, 201088, 131072, **more)


MODELS: dict[str, Known] = {
    "llama-2-7b": Known(
        "meta-llama/Llama-2-7b-hf",
        _config("Llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    ),
    "llama-2-13b": Known(
        "meta-llama/Llama-2-13b-hf",
        _config("Llama", 40, 5120, 13824, 40, 40, 32000, 4096),
    ),
    "llama-2-70b": Known(
        "meta-llama/Llama-2-70b-hf",
        _config("Llama", 80, 8192, 28672, 64, 8, 32000, 4096),
    ),
    "llama-3-8b": Known(
        "meta-llama/Meta-Llama-3-8B",
        _config("Llama", 32, 4096, 14336, 32, 8, 128256, 8192, rope_theta=500000.0),
    ),
    "llama-3-70b": Known(
        "meta-llama/Meta-Llama-3-70B",
        _config("Llama", 80, 8192, 28672, 64, 8, 128256, 8192, rope_theta=500000.0),
    ),
    "llama-3.1-8b": Known(
        "meta-llama/Llama-3.1-8B",
        _config("Llama", 32, 4096, 14336, 32, 8, 128256, 131072, **_scaled_llama(8.0)),
    ),
    "llama-3.2-1b": Known(
        "meta-llama/Llama-3.2-1B",
        _config("Llama", 16, 2048, 8192, 32, 8, 128256, 131072, **_scaled_llama(32.0))
        | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "llama-3.2-3b": Known(
        "meta-llama/Llama-3.2-3B",
        _config("Llama", 28, 3072, 8192, 24, 8, 128256, 131072, **_scaled_llama(32.0))
        | {"head_dim": 128, "tie_word_embeddings": True},
    ),
    "mistral-7b-v0.1": Known(
        "mistralai/Mistral-7B-v0.1",
        _config("Mistral", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=4096),
    ),
    "mistral-7b-v0.3": Known(
        "mistralai/Mistral-7B-v0.3",
        _config("Mistral", 32, 4096, 14336, 32, 8, 32768, 32768, rope_theta=1e6)
        | {"sliding_window": None},
    ),
    "mistral-nemo-12b": Known(
        "mistralai/Mistral-Nemo-Base-2407",
        _config("Mistral", 40, 5120, 14336, 32, 8, 131072, 131072, rope_theta=1e6, head_dim=128)
        | {"sliding_window": None},
    ),
    "mixtral-8x7b": Known(
        "mistralai/Mixtral-8x7B-v0.1",
        _config("Mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, rope_theta=1e6)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    ),
    "qwen1.5-1.8b": Known(
        "Qwen/Qwen1.5-1.8B",
        _config("Qwen2", 24, 2048, 5504, 16, 16, 151936, 32768, **_QWEN2),
    ),
    "qwen2.5-7b": Known(
        "Qwen/Qwen2.5-7B",
        _config("Qwen2", 28, 3584, 18944, 28, 4, 152064, 131072, **_QWEN2),
    ),
    "qwen2.5-14b": Known(
        "Qwen/Qwen2.5-14B",
        _config("Qwen2", 48, 5120, 13824, 40, 8, 152064, 131072, **_QWEN2) | {"rms_norm_eps": 1e-5},
    ),
    "qwen3-4b": Known(
        "Qwen/Qwen3-4B",
        _config("Qwen3", 36, 2560, 9728, 32, 8, 151936, 40960, **_QWEN3)
        | {"tie_word_embeddings": True},
    ),
    "qwen3-8b": Known(
        "Qwen/Qwen3-8B",
        _config("Qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, **_QWEN3),
    ),
    "qwen3-14b": Known(
        "Qwen/Qwen3-14B",
        _config("Qwen3", 40, 5120, 17408, 40, 8, 151936, 40960, **_QWEN3),
    ),
    "qwen3-32b": Known(
        "Qwen/Qwen3-32B",
        _config("Qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, **_QWEN3),
    ),
    "qwen3-30b-a3b": Known(
        "Qwen/Qwen3-30B-A3B",
        _config("Qwen3Moe", 48, 2048, 6144, 32, 4, 151936, 40960, **_QWEN3_EXPERTS)
        | {"moe_intermediate_size": 768},
    ),
    "qwen3-235b-a22b": Known(
        "Qwen/Qwen3-235B-A22B",
        _config("Qwen3Moe", 94, 4096, 12288, 64, 4, 151936, 40960, **_QWEN3_EXPERTS)
        | {"moe_intermediate_size": 1536},
    ),
    "smollm3-3b": Known(
        "HuggingFaceTB/SmolLM3-3B",
        _config("SmolLM3", 36, 2048, 11008, 16, 4, 128256, 65536, rope_theta=5e6)
        | {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    ),
    "gpt-oss-20b": Known("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": Known("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "glm-4.5-air": Known(
        "zai-org/GLM-4.5-Air",
        _config("Glm4Moe", 46, 4096, 10944, 96, 8, 151552, 131072, rope_theta=1e6, head_dim=128)
        | {
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 1,
        },
    ),
    "deepseek-v2-lite": Known(
        "deepseek-ai/DeepSeek-V2-Lite",
        _config("DeepseekV2", 27, 2048, 10944, 16, 16, 102400, 163840, **_deepseek(0.707))
        | {
            "q_lora_rank": None,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek-v3": Known(
        "deepseek-ai/DeepSeek-V3",
        _config("DeepseekV3", 61, 7168, 18432, 128, 128, 129280, 163840, **_deepseek(1.0))
        | {
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
        },
    ),
}
"""Name to its facts; tests hold the parameters that follow from them against the published ones."""

ALIASES = {"mistral-7b": "mistral-7b-v0.3"}


@cache
def known_shape(name: str) -> Shape:
    """The shape of a model of the table."""
    return shape_of(MODELS[name].config)


def find_model(name: str) -> tuple[str, Shape]:
    """Give the label and shape of a model.

    Args:
        name: of the table or its repository (in any case), or a folder that holds a config.json.

    Raises:
        UserError: for neither.
        UserError: for a config.json that training could not use.
    """
    if Path(name).is_dir():
        config = read_config(name)
        return name, shape_of(config, model=_converted(config))
    key = name.lower().rsplit("/", 1)[-1].removesuffix("-hf")
    key = _BY_REPOSITORY.get(key, ALIASES.get(key, key))
    if key in MODELS:
        return name, known_shape(key)
    longer = [known for known in MODELS if known.startswith(key)]
    near = list(dict.fromkeys(longer + get_close_matches(key, MODELS, n=2)))[:3]
    raise UserError(
        f"--model {name}: "
        + (f"did you mean {' or '.join(near)}? " if near else "")
        + f"give one of {', '.join(MODELS)}; or, for another model, a folder with the model's "
        "config.json from Hugging Face (that file alone is enough)"
    )


_BY_REPOSITORY = {
    known.repository.lower().rsplit("/", 1)[-1].removesuffix("-hf"): name
    for name, known in MODELS.items()
}


def _converted(config: Mapping[str, Any]) -> Any:
    """What the converter makes of a config, so that its refusals come with the plan.

    Without transformers, whose defaults it asks for, the planner's own reading has to do.
    """
    if architecture(config) not in FAMILIES or not find_spec("transformers"):
        return None
    # The planner reads these from the config itself, for families that are not converted, too.
    return replace(model_of(config), swiglu_limit=0.0, sinks=False, windows=(), no_rope=())
