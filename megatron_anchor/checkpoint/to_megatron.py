"""Hugging Face folder -> Megatron ``torch_dist`` checkpoint."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_anchor.checkpoint import families, megatron_args, tokenizer_files
from megatron_anchor.checkpoint.anchored_tokenizer import recorded_anchor
from megatron_anchor.checkpoint.extension import extended
from megatron_anchor.checkpoint.families import (
    ENGINE,
    LOCAL,
    TARGETS,
    Rule,
    family_of,
    indices_of,
    rules_for,
    stack_of,
    stacked,
)
from megatron_anchor.checkpoint.finite import NonFinite, counted
from megatron_anchor.checkpoint.fused_experts import separate_experts
from megatron_anchor.checkpoint.hugging_face_config import (
    model_of,
    read_config,
)
from megatron_anchor.checkpoint.hugging_face_weights import open_weights
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.rows import BLOCK_BYTES, Blocks, CastRows, Files, Rows, row_bytes
from megatron_anchor.checkpoint.torch_dist_writer import TorchDistWriter
from megatron_anchor.checkpoint.transformers_model import check_transformers_model
from megatron_anchor.compat import TRACKER
from megatron_anchor.errors import UserError
from megatron_anchor.whole_files import atomic_folder

SOURCE_FOLDER = "hugging_face"
ARGS_FILE = "megatron_args.txt"


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    model: Model
    tensors: int
    """Hugging Face tensors carried over."""
    bytes: int
    not_carried: dict[str, str]
    """Tensors that are no weights, and why nothing is lost."""
    flags: list[str]
    """Lines of megatron_args.txt."""


def convert_to_megatron(
    source: str | Path,
    out: str | Path,
    *,
    extend_to: int | None = None,
    rotary_base: float | None = None,
    positions: int | None = None,
    dtype: torch.dtype | None = None,
    target: str = LOCAL,
    drop_sliding_window: bool = False,
    allow_non_finite: bool = False,
    progress: bool = True,
) -> Converted:
    """Convert a model folder; nothing is left behind when it fails.

    Args:
        source: Hugging Face model folder.
        out: new folder for --load or --pretrained-checkpoint.
        extend_to: length from the paper's table, see `extended`.
        rotary_base: RoPE base.
        positions: ``max_position_embeddings``.
        dtype: of the weights; None: as they are.
        target: layer spec that will load it, one of `TARGETS`.
        drop_sliding_window: train a model with a sliding window without it.
        allow_non_finite: convert weights that are NaN or Inf, too.
        progress: show a bar.

    Raises:
        UserError: for a model that cannot be converted exactly, with the reason.
    """
    assert target in TARGETS, target
    source, out = Path(source), Path(out).absolute()
    config = read_config(source)
    model = model_of(config)
    check_transformers_model(config, model)
    model = extended(model, extend_to=extend_to, rotary_base=rotary_base, positions=positions)
    if drop_sliding_window:
        model = dataclasses.replace(model, windows=())
    _check_tokenizer(source, model)
    _check_path(out)
    with Files() as files:
        weights: Mapping[str, Rows] = separate_experts(open_weights(source, files), model)
        if dtype is not None:
            weights = {k: v if v.dtype == dtype else CastRows(v, dtype) for k, v in weights.items()}
        not_carried = check_tensors(weights, model)
        stored_dtype = weights["model.embed_tokens.weight"].dtype
        has_tokenizer = tokenizer_files.has_tokenizer(source)
        values = megatron_args.argument_values(
            model,
            dtype=stored_dtype,
            tokenizer=str(out / SOURCE_FOLDER) if has_tokenizer else None,
            anchor=_anchor(source, config),
            target=target,
        )
        total = sum(row_bytes(w) * w.shape[0] for k, w in weights.items() if k not in not_carried)
        with (
            atomic_folder(out) as folder,
            tqdm(
                total=total, unit="B", unit_scale=True, disable=not progress, desc="to Megatron"
            ) as bar,
        ):
            with TorchDistWriter(folder / "release") as writer:
                found = NonFinite()
                _write_model(writer, model, counted(weights, found), target, bar)
                if not allow_non_finite:
                    found.refuse(str(source), dtype=dtype)
                _write_objects(writer, model, target)
                writer.add_object("common_state", _common_state(values, stored_dtype))
                writer.finish()
            (folder / TRACKER).write_text("release")
            flags = megatron_args.flag_lines(values)
            (folder / ARGS_FILE).write_text("\n".join(flags) + "\n")
            _copy_source(source, folder / SOURCE_FOLDER)
    return Converted(model, len(weights) - len(not_carried), total, not_carried, flags)


def check_tensors(weights: Mapping[str, Rows], model: Model) -> dict[str, str]:
    """Check that tensors and rules fit each other one to one, before anything is written.

    Returns:
        Tensors that are not carried over, and why nothing is lost.

    Raises:
        UserError: naming the tensors that have no rule, are missing or have another shape.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules_for(model):
        dtypes: dict[torch.dtype, str] = {}
        for indices in rule.indices(model):
            names = rule.names(indices)
            expected |= dict(zip(names, rule.source_shapes(model), strict=True))
            dtypes |= {weights[name].dtype: name for name in names if name in weights}
        if len(dtypes) > 1:
            mixed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise UserError(f"{mixed}: Megatron keeps all layers in one; set --dtype")
    not_carried = {
        name: reason for name in weights if (reason := families.recomputed(name)) is not None
    }
    if model.tied and {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights):
        if not same_rows(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
            raise UserError(
                "lm_head.weight differs from model.embed_tokens.weight although config.json says "
                "tie_word_embeddings: set it to false there if the output layer is its own"
            )
        not_carried["lm_head.weight"] = "tied: equal to model.embed_tokens.weight"
    unknown = sorted(set(weights) - set(expected) - set(not_carried))
    if unknown:
        raise UserError(
            f"{model.family} has no rule for {_some(unknown)}; converting without it would not be "
            "exact. Is the architecture in config.json right?"
        )
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise UserError(f"the weights lack {_some(missing)}, which {model.family} needs")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            hint = ""
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                hint = f"; vocab_size in config.json is {model.vocabulary}"
            raise UserError(
                f"{name} has shape {list(weights[name].shape)}, config.json makes it {list(shape)}"
                f"{hint}"
            )
    return not_carried


def same_rows(first: Rows, second: Rows) -> bool:
    """Compare two tensors bit by bit."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    blocks, others = Blocks(), Blocks()
    return all(
        np.array_equal(a, b)
        for a, b in zip(
            blocks.of(first, 0, first.shape[0]), others.of(second, 0, second.shape[0]), strict=True
        )
    )


def megatron_blocks(
    rule: Rule, indices: Mapping[str, int], model: Model, weights: Mapping[str, Rows]
) -> Iterator[np.ndarray]:
    """Yield the bytes of one Megatron tensor in order, from its Hugging Face tensors."""
    sources = [weights[name] for name in rule.names(indices)]
    width = rule.shape(1, model)[1:]
    item = sources[0].dtype.itemsize if sources else _dtype(rule, model, weights).itemsize
    blocks = Blocks()
    for segment in rule.segments(model):
        if segment.source is not None:
            yield from blocks.of(sources[segment.source], segment.first, segment.rows)
            continue
        rest = segment.rows * int(np.prod(width, dtype=np.int64)) * item
        while rest:
            yield np.zeros(min(rest, BLOCK_BYTES), np.uint8)
            rest -= min(rest, BLOCK_BYTES)


def _dtype(rule: Rule, model: Model, weights: Mapping[str, Rows]) -> torch.dtype:
    names = rule.names(rule.indices(model)[0])
    return weights[names[0] if names else "model.embed_tokens.weight"].dtype


def _write_model(
    writer: TorchDistWriter,
    model: Model,
    weights: Mapping[str, Rows],
    target: str,
    bar: tqdm,
) -> None:
    for rule in rules_for(model):
        rows = sum(segment.rows for segment in rule.segments(model))
        for indices in rule.indices(model):

            def counted(
                rule: Rule = rule, indices: Mapping[str, int] = indices
            ) -> Iterator[np.ndarray]:
                for block in megatron_blocks(rule, indices, model, weights):
                    yield block
                    bar.update(min(block.size, bar.total - bar.n))  # fillings are not counted

            writer.add_chunk(
                rule.key(target),
                counted(),
                index=tuple(indices.values()),
                stack=rule.stack(model),
                shape=rule.shape(rows, model),
                dtype=_dtype(rule, model, weights),
            )


def _write_objects(writer: TorchDistWriter, model: Model, target: str) -> None:
    """Store the empty extra states that Megatron's layers ask for when they load."""
    family = family_of(model.family)
    for name in family.linear_layers + (family.separate_norms if target == ENGINE else ()):
        shape = ".".join(map(str, stack_of(name, model))) or "1"
        for indices in indices_of(name, model):
            offset = ".".join(map(str, indices.values())) or "0"
            writer.add_object(f"{stacked(name)}._extra_state", None, offset=offset, shape=shape)


def _common_state(values: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    return {
        "args": megatron_args.namespace(values, dtype=dtype),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def _copy_source(source: Path, target: Path) -> None:
    """Keep config and tokenizer next to the checkpoint: --tokenizer-model points here."""
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    tokenizer_files.copy_tokenizer(source, target)


def _check_tokenizer(source: Path, model: Model) -> None:
    size = tokenizer_files.vocabulary_size(source)
    if size is not None and size > model.vocabulary:
        raise UserError(
            f"{source}: the tokenizer has {size} tokens, the embedding {model.vocabulary} rows "
            "(vocab_size in config.json): resize the model's embedding with "
            f"model.resize_token_embeddings({size}) and save it again"
        )


def _check_path(out: Path) -> None:
    """The shell splits what ``$(cat megatron_args.txt)`` gives at spaces, quotes or not."""
    if re.search(r"[\s*?\[\]]", str(out)):
        raise UserError(
            f"--out {str(out)!r}: {ARGS_FILE} names this folder, and $(cat {ARGS_FILE}) cannot "
            "pass a path with spaces or wildcards; choose another name, or a link without them"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _anchor(source: str | Path, config: Mapping[str, Any]) -> int | None:
    """Choose the anchor: the one that the model was trained behind, else the tokenizer's."""
    recorded = recorded_anchor(config)
    return tokenizer_files.anchor_id(source, config) if recorded is None else recorded
