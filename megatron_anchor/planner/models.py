"""Shapes of well-known models, as their config.json on Hugging Face states them."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.hugging_face_config import model_of, read_config
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.errors import UserError

_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _model(
    family: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    vocabulary: int,
    positions: int,
    *,
    head: int = 128,
    base: float = 1e4,
    epsilon: float = 1e-5,
    **more: Any,
) -> Model:
    return Model(
        family=f"{family}ForCausalLM",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        head=head,
        vocabulary=vocabulary,
        positions=positions,
        rotary_base=base,
        epsilon=epsilon,
        **more,
    )


_QWEN2: dict[str, Any] = {"base": 1e6, "epsilon": 1e-6, "qkv_bias": True}

MODELS: dict[str, tuple[Model, str]] = {
    "llama-2-7b": (
        _model("Llama", 32, 4096, 11008, 32, 32, 32000, 4096),
        "meta-llama/Llama-2-7b-hf",
    ),
    "llama-2-13b": (
        _model("Llama", 40, 5120, 13824, 40, 40, 32000, 4096),
        "meta-llama/Llama-2-13b-hf",
    ),
    "llama-2-70b": (
        _model("Llama", 80, 8192, 28672, 64, 8, 32000, 4096),
        "meta-llama/Llama-2-70b-hf",
    ),
    "llama-3-8b": (
        _model("Llama", 32, 4096, 14336, 32, 8, 128256, 8192, base=5e5),
        "meta-llama/Meta-Llama-3-8B",
    ),
    "llama-3-70b": (
        _model("Llama", 80, 8192, 28672, 64, 8, 128256, 8192, base=5e5),
        "meta-llama/Meta-Llama-3-70B",
    ),
    "llama-3.1-8b": (
        _model(
            *("Llama", 32, 4096, 14336, 32, 8, 128256, 131072),
            base=5e5,
            scaling=_LLAMA3 | {"factor": 8.0},
        ),
        "meta-llama/Llama-3.1-8B",
    ),
    "llama-3.2-1b": (
        _model(
            *("Llama", 16, 2048, 8192, 32, 8, 128256, 131072),
            head=64,
            base=5e5,
            tied=True,
            scaling=_LLAMA3 | {"factor": 32.0},
        ),
        "meta-llama/Llama-3.2-1B",
    ),
    "mistral-7b-v0.3": (
        _model("Mistral", 32, 4096, 14336, 32, 8, 32768, 32768, base=1e6),
        "mistralai/Mistral-7B-v0.3",
    ),
    "qwen1.5-1.8b": (
        _model("Qwen2", 24, 2048, 5504, 16, 16, 151936, 32768, **_QWEN2),
        "Qwen/Qwen1.5-1.8B",
    ),
    "qwen2.5-7b": (
        _model("Qwen2", 28, 3584, 18944, 28, 4, 152064, 131072, **_QWEN2),
        "Qwen/Qwen2.5-7B",
    ),
    "qwen2.5-14b": (
        _model("Qwen2", 48, 5120, 13824, 40, 8, 152064, 131072, **_QWEN2 | {"epsilon": 1e-5}),
        "Qwen/Qwen2.5-14B",
    ),
    "qwen3-8b": (
        _model(
            *("Qwen3", 36, 4096, 12288, 32, 8, 151936, 40960),
            base=1e6,
            epsilon=1e-6,
            qk_norm=True,
        ),
        "Qwen/Qwen3-8B",
    ),
}
"""Shape and source (a repository on Hugging Face) of each name."""


def find_model(name: str) -> tuple[str, Model]:
    """Give the label and shape of a model.

    Args:
        name: of the table (in any case), or a folder that holds a config.json.

    Raises:
        UserError: for neither, or a mixture of experts.
        UserError: for a config.json that training could not use.
    """
    known = MODELS.get(name.lower().rsplit("/", 1)[-1].removesuffix("-hf"))
    if Path(name).is_dir():
        model = model_of(read_config(name))
    elif known:
        return name, known[0]
    else:
        near = get_close_matches(name.lower(), MODELS, n=1)
        raise UserError(
            f"--model {name}: "
            + (f"did you mean {near[0]}? " if near else "")
            + f"give a folder with a config.json, or one of {', '.join(MODELS)}"
        )
    if model.experts:
        raise UserError(
            f"--model {name}: {model.experts} experts; the planner counts dense models only (the "
            "memory and traffic of expert parallelism are not in it)"
        )
    return name, model
