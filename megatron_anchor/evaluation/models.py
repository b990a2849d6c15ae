"""Hugging Face models, loaded for evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Placement:
    """How a model is run."""

    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu`` or ``cuda``."""
    dtype: str = "auto"
    """``auto``: bfloat16 on CUDA, float32 on CPU."""
    attention: str = "sdpa"
    """Of transformers: ``sdpa``, ``eager``, ``flash_attention_2`` ..."""

    def resolved(self) -> Placement:
        """Put what this machine has in the place of ``auto``.

        Raises:
            UserError: if CUDA is asked for and missing.
        """
        import torch

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA device; try --device cpu")
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        return Placement(device, dtype, self.attention)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's config.json.

    Raises:
        UserError: if it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds {type(config).__name__}, expected a JSON object")
    return config


def check_positions(folder: Path, lengths: Sequence[int], *, allow_longer: bool) -> str | None:
    """Check lengths against what the model was made for.

    Returns:
        A note where longer ones are allowed and asked for.

    Raises:
        UserError: if a length is beyond ``max_position_embeddings``.
    """
    most = read_config(folder).get("max_position_embeddings")
    beyond = [length for length in lengths if isinstance(most, int) and length > most]
    if not beyond:
        return None
    told = (
        f"{folder} was made for {most} positions (max_position_embeddings in its config.json), "
        f"and --seq-lengths asks for {', '.join(map(str, beyond))}"
    )
    if allow_longer:
        return f"{told}: scores there show what happens beyond training"
    raise UserError(f"{told}; leave these out, or give --allow-longer to see what happens")


def load_model(folder: Path, placement: Placement) -> Any:
    """Load a causal language model; `placement` is a resolved one.

    Raises:
        UserError: if it does not load.
    """
    import torch
    from transformers.utils import logging

    from megatron_anchor.checkpoint.pretrained import load_causal_model

    logging.disable_progress_bar()  # of the weights; ours counts samples
    model = load_causal_model(
        folder,
        dtype=getattr(torch, placement.dtype),
        attn_implementation=placement.attention,
    )
    return model.to(placement.device)
