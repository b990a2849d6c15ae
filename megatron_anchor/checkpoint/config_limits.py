"""Values of a config.json that no model has: refused before anything is built of that size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError

LARGEST = {
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 10_000,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
    "n_routed_experts": 100_000,
    "max_position_embeddings": 2**31 - 1,
    "vocab_size": 2**31 - 1,
}
"""Far above every model, and soon built."""
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def check_limits(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` with value and place where a value is out of every bound."""
    problems = [*_too_large(config), *_dtypes(config)]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; correct it, or fetch the model again")


def _too_large(config: Mapping[str, Any]) -> Iterator[str]:
    for name, most in LARGEST.items():
        value = config.get(name)
        if isinstance(value, int | float) and value > most:
            yield f"{name} {value}, expected at most {most}"


def _dtypes(config: Mapping[str, Any]) -> Iterator[str]:
    for name in ("torch_dtype", "dtype"):
        value = config.get(name)
        if value is not None and str(value).removeprefix("torch.") not in DTYPES:
            yield f"{name} {str(value)[:60]!r}, expected one of {', '.join(DTYPES)}"
