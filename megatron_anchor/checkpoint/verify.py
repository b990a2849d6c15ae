"""Is a Megatron checkpoint the same model as a Hugging Face folder? Bits first, then logits.

The yardstick for logits is a floor: how far Hugging Face differs from itself when only the order
of its operations changes (its two attention implementations on the same weights and tokens).

Legend: S tokens, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_anchor.checkpoint.argument_check import unrepresentable
from megatron_anchor.checkpoint.families import family_of, rules_for
from megatron_anchor.checkpoint.finite import NonFinite
from megatron_anchor.checkpoint.fused_experts import separate_experts
from megatron_anchor.checkpoint.hugging_face_config import model_of, read_config
from megatron_anchor.checkpoint.hugging_face_weights import open_weights
from megatron_anchor.checkpoint.megatron_args import argument_values
from megatron_anchor.checkpoint.megatron_model import logits as megatron_logits
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.pretrained import load_causal_model, load_tokenizer
from megatron_anchor.checkpoint.rows import CastRows, Files, Rows
from megatron_anchor.checkpoint.to_hugging_face import (
    LIKE_MUST_AGREE,
    Stored,
    check_names,
    describe,
)
from megatron_anchor.checkpoint.to_megatron import check_tensors
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint, iteration_folder
from megatron_anchor.errors import UserError

FLOOR_FACTOR = 10.0
"""Logits may differ by so many times the floor ..."""
ABSOLUTE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""... or, where the floor is lower, by this share of the logits' standard deviation."""

LAYER_SETTINGS = ("no_rope", "sinks", "swiglu_limit")
ROPE_SETTINGS = ("rotary_base", "scaling", "positions")


@dataclass(frozen=True)
class TensorVerdict:
    """Result of the bitwise comparison."""

    tensors: int
    different: list[str]
    """Names of tensors with other bits, and the largest difference of values."""
    cast: dict[str, int]
    """Pairs of dtypes, as "here, in Hugging Face there", and how many tensors have them; these
    were compared in Megatron's."""
    not_finite: list[str]
    """Names of tensors with NaN or Inf, and how many."""

    @property
    def passed(self) -> bool:
        """Every bit is equal."""
        return not self.different


@dataclass(frozen=True, kw_only=True)
class LogitVerdict:
    """Result of the comparison of logits."""

    tokens: int
    largest_difference: float
    floor: float
    """Largest difference between Hugging Face's own attention implementations."""
    spread: float
    """Standard deviation of the logits."""
    kl: float
    """Mean KL divergence of the next-token distributions, in nats."""
    top1_agreement: float
    """Share of tokens whose likeliest next token is the same."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """Within the tolerance."""
        return self.largest_difference <= self.tolerance


def compare_tensors(checkpoint: TorchDistCheckpoint, folder: Path, files: Files) -> TensorVerdict:
    """Compare every tensor bit by bit, read through the maps that conversions use.

    Args:
        checkpoint: Megatron's side.
        folder: Hugging Face's side.
        files: reads both.

    Raises:
        UserError: if they are not the same kind of model.
    """
    model, *_ = describe(checkpoint, checkpoint.args(), folder, flag="--hf")
    check_names(checkpoint, model)
    weights = separate_experts(open_weights(folder, files), model)
    check_tensors(weights, model)
    stored, different = Stored([checkpoint], model), []
    cast: dict[str, int] = {}
    found = NonFinite()
    stored.check_zeros(remedy="give the model as exported")
    plans = stored.plans()
    for plan in plans:
        source: Rows = weights[plan.name]
        if source.dtype != plan.dtype:
            pair = f"{plan.dtype} in Megatron, {source.dtype} in Hugging Face"
            cast[pair] = cast.get(pair, 0) + 1
            source = CastRows(source, plan.dtype)
        largest, equal, first = 0.0, True, 0
        for ours in stored.blocks(plan.name):
            other = np.empty_like(ours)
            source.read(first, other)
            first += len(ours)
            found.look_at(plan.name, ours, plan.dtype)
            if not np.array_equal(ours, other):
                equal = False
                largest = max(largest, _largest_difference(ours, other, plan.dtype))
        if not equal:
            different.append(f"{plan.name} (by up to {largest:g})")
    return TensorVerdict(len(plans), different, cast, found.lines())


def setting_differences(
    checkpoint: TorchDistCheckpoint, folder: Path, *, their_rope: bool = False
) -> list[str]:
    """Say where the settings that logits depend on, besides weights, are not the same.

    Args:
        checkpoint: Megatron's side.
        folder: Hugging Face's side.
        their_rope: RoPE and length may be others.
    """
    args = checkpoint.args()
    model, *_ = describe(checkpoint, args, folder, flag="--hf")
    config = read_config(folder)
    theirs = model_of(config)
    names = ("epsilon", *LIKE_MUST_AGREE, *LAYER_SETTINGS, *(() if their_rope else ROPE_SETTINGS))
    found = [
        f"{name} {getattr(model, name)} (Hugging Face {getattr(theirs, name)})"
        for name in names
        if getattr(model, name) != getattr(theirs, name)
    ]
    pair = model.windows_in_force, theirs.windows_in_force
    if pair[0] != pair[1]:
        found.append("{} (Hugging Face {})".format(*map(_named_windows, pair)))
    said = family_of(model.family).says
    return found + list(unrepresentable(vars(args), said=said).values())


def _named_windows(windows: tuple[int, ...]) -> str:
    if not windows:
        return "full attention"
    where = "" if all(windows) else f" in layers {[n for n, size in enumerate(windows, 1) if size]}"
    return f"sliding_window {max(windows)}{where}"


def _largest_difference(first: np.ndarray, second: np.ndarray, dtype: torch.dtype) -> float:
    a, b = (torch.from_numpy(x.reshape(-1).copy()).view(dtype).float() for x in (first, second))
    return float((a - b).abs().max())


def compare_logits(
    checkpoint: TorchDistCheckpoint,
    folder: Path,
    tokens_S: Tensor,
    *,
    dtype: torch.dtype,
    their_rope: bool = False,
) -> LogitVerdict:
    """Compare the logits of both sides on one document; needs the CPU in CUDA's place.

    Megatron's side is what the run's own arguments make of the weights, whether or not we know
    what they mean.

    Args:
        checkpoint: Megatron's side.
        folder: Hugging Face's side; one model is in memory at a time.
        tokens_S: token ids.
        dtype: of weights and arithmetic on both sides.
        their_rope: rotate on Megatron's side as the Hugging Face config says.
    """
    args = checkpoint.args()
    model, *_ = describe(checkpoint, args, folder, flag="--hf")
    if their_rope:
        args = _with_rope_of(args, model_of(read_config(folder)))
    theirs = hugging_face_logits(folder, tokens_S, dtype=dtype, attention="eager")
    # transformers has one implementation alone for models with sinks.
    other = "eager" if family_of(model.family).sinks else "sdpa"
    others = hugging_face_logits(folder, tokens_S, dtype=dtype, attention=other)
    floor, spread = float((theirs - others).abs().max()), float(theirs.std())
    tensors = checkpoint.tensors()
    stored_names = {
        rule.keys[0]: key for rule in rules_for(model) for key in rule.keys if key in tensors
    }
    ours = megatron_logits(
        args,
        checkpoint.folder,
        tokens_S,
        rows=model.padded_rows,
        dtype=dtype,
        stored_names=stored_names,
    )[:, : model.vocabulary]
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return LogitVerdict(
        tokens=len(tokens_S),
        largest_difference=float((ours - theirs).abs().max()),
        floor=floor,
        spread=spread,
        kl=max(0.0, float((log_p.exp() * (log_p - log_q)).sum(-1).mean())),
        top1_agreement=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        tolerance=max(FLOOR_FACTOR * floor, ABSOLUTE_TOLERANCE[dtype] * spread),
    )


def _with_rope_of(args: Namespace, model: Model) -> Namespace:
    """Give a run's arguments with the rotation of another model."""
    rope = {"rotary_base", "rope_parameters", "max_position_embeddings"}
    values = argument_values(model, dtype=torch.float32, tokenizer=None, anchor=None)
    return Namespace(**{**vars(args), **{name: values[name] for name in rope}})


def hugging_face_logits(
    folder: Path, tokens_S: Tensor, *, dtype: torch.dtype, attention: str
) -> Tensor:
    """Give transformers' logits [S, V] in float32."""
    model = load_hugging_face(folder, dtype=dtype, attention=attention)
    with torch.no_grad():
        return model(input_ids=tokens_S[None]).logits[0].float()


def load_hugging_face(folder: Path, *, dtype: torch.dtype, attention: str) -> Any:
    """Load a model folder by transformers, from this machine's disk only."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return load_causal_model(folder, dtype=dtype, attn_implementation=attention)


def open_checkpoint(
    root: str | Path, files: Files, *, iteration: int | None = None
) -> TorchDistCheckpoint:
    """Open the checkpoint of an iteration, the latest by default."""
    return TorchDistCheckpoint(iteration_folder(root, iteration=iteration), files)


def text_tokens(text: str, folder: Path, *, limit: int) -> Tensor:
    """Tokenize a text by the folder's tokenizer; without one, random ids (a fixed seed).

    Args:
        text: any text.
        folder: Hugging Face folder.
        limit: tokens at most.

    Raises:
        UserError: for a text without tokens.
    """
    from megatron_anchor.checkpoint.tokenizer_files import has_tokenizer

    if not has_tokenizer(folder):
        model = model_of(read_config(folder))
        generator = torch.Generator().manual_seed(0)
        return torch.randint(model.vocabulary, (min(limit, 256),), generator=generator)
    ids = load_tokenizer(folder)(text)["input_ids"][:limit]
    if not ids:
        raise UserError("the text has no tokens; give another --text or --text-file")
    return torch.tensor(ids)
