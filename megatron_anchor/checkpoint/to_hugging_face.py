"""Megatron ``torch_dist`` checkpoint -> Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_anchor.checkpoint import tokenizer_files
from megatron_anchor.checkpoint.anchored_tokenizer import RECORD, add_anchor, trained_anchor
from megatron_anchor.checkpoint.argument_check import check_representable
from megatron_anchor.checkpoint.families import (
    BIASED,
    LAYER,
    Rule,
    biases_without_a_place,
    family_of,
    rules_for,
    stacked,
    unequal_windows,
)
from megatron_anchor.checkpoint.finite import NonFinite
from megatron_anchor.checkpoint.fused_experts import fused_blocks, fused_plans
from megatron_anchor.checkpoint.hugging_face_config import (
    architecture,
    config_for,
    model_of,
    read_config,
)
from megatron_anchor.checkpoint.hugging_face_weights import SHARD_BYTES, TensorPlan, write_weights
from megatron_anchor.checkpoint.megatron_args import model_from_args
from megatron_anchor.checkpoint.model import Model
from megatron_anchor.checkpoint.row_maps import Zeros
from megatron_anchor.checkpoint.rows import AverageRows, Blocks, CastRows, Files, Rows
from megatron_anchor.checkpoint.to_megatron import SOURCE_FOLDER
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint, iteration_folder
from megatron_anchor.checkpoint.transformers_model import check_transformers_model
from megatron_anchor.errors import UserError
from megatron_anchor.whole_files import atomic_folder

EMBEDDING = "embedding.word_embeddings.weight"
LAYER_KINDS = ("window_size", "no_rope_freq")
"""Arguments that one family says and another leaves out, if the user wishes."""
LIKE_MUST_AGREE = (
    *("layers", "hidden", "ffn", "heads", "groups", "head", "tied", "qk_norm"),
    *("experts", "experts_per_token", "normalized_router"),
)


@dataclass(frozen=True)
class Exported:
    """What an export did."""

    model: Model
    tensors: int
    bytes: int
    files: list[str]
    like: str | None
    """Folder whose config, generation config and tokenizer were taken over."""
    notes: list[str]


def convert_to_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    iteration: int | None = None,
    average: Sequence[int] = (),
    like: str | Path | None = None,
    ignored_arguments: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    allow_non_finite: bool = False,
    keep_tokenizer: bool = False,
    progress: bool = True,
) -> Exported:
    """Export a checkpoint; nothing is left behind when it fails.

    Args:
        source: what --save names, or the folder of one iteration.
        out: new model folder.
        iteration: which; None: the latest.
        average: iterations whose mean is exported instead.
        like: Hugging Face folder for everything that is not trained: architecture, token ids,
            tokenizer, generation config. None: the run's --tokenizer-model where it is such a
            folder of the same shape.
        ignored_arguments: of the run, which no family can represent and the user leaves out.
        dtype: of the weights; None: as stored.
        shard_bytes: largest size of a weight file.
        allow_non_finite: export weights that are NaN or Inf, too.
        keep_tokenizer: copy the tokenizer unchanged even if it does not add the run's anchor.
        progress: show a bar.

    Raises:
        UserError: for a checkpoint that cannot be exported exactly, with the reason.
    """
    if average and iteration is not None:
        raise UserError("--iteration and --average exclude each other")
    wanted: list[int | None] = [*dict.fromkeys(average)] or [iteration]
    with Files() as files:
        checkpoints = [
            TorchDistCheckpoint(iteration_folder(source, iteration=i), files) for i in wanted
        ]
        first = checkpoints[0]
        args = first.args()
        model, config, folder, notes = describe(first, args, like, ignored=ignored_arguments)
        notes += left_out(args, model, ignored_arguments) + data_notes(args)
        for other in checkpoints[1:]:
            left_out(other.args(), model, ignored_arguments)
            check_same_settings(first, model, other, describe(other, other.args(), like)[0])
        check_names(first, model)
        stored = Stored(checkpoints, model, dtype)
        plans, parts_of = fused_plans(stored.plans(), model)
        total = sum(plan.bytes for plan in plans)
        weights_dtype = str(stored.dtype).removeprefix("torch.")
        new_config = config_for(model, dtype=weights_dtype, like=config)
        check_transformers_model(new_config, model)
        anchor = trained_anchor(args, folder, config)
        if anchor is not None:
            new_config.pop(
                RECORD, None
            )  # of the original model: another place, maybe another token
            new_config[RECORD] = {"anchor_token_id": anchor}
            notes.append(f"trained behind the anchor {anchor}, recorded in config.json ({RECORD})")
        with (
            atomic_folder(out) as temporary,
            tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                disable=not progress,
                desc="to Hugging Face",
            ) as bar,
        ):
            found, dtypes = NonFinite(), {plan.name: plan.dtype for plan in plans}

            def blocks(name: str) -> Iterator[np.ndarray]:
                for block in fused_blocks(name, parts_of, stored.blocks):
                    found.look_at(name, block, dtypes[name])
                    yield block
                    bar.update(block.size)

            _write_json(temporary / "config.json", new_config)
            _write_companions(temporary, model, config, folder)
            if anchor is not None and not keep_tokenizer:
                notes += add_anchor(temporary, anchor)
            stored.check_zeros()
            names = write_weights(temporary, plans, blocks, shard_bytes=shard_bytes)
            if not allow_non_finite:
                found.refuse(str(source), dtype=dtype)
    return Exported(model, len(plans), total, names, None if folder is None else str(folder), notes)


def left_out(args: Namespace, model: Model, ignored: Sequence[str]) -> list[str]:
    """Check that the family says what the run's arguments ask for; give notes on the ignored.

    Raises:
        UserError: see `check_representable`.
    """
    said = {k: row for k, row in family_of(model.family).says.items() if k not in ignored}
    notes = check_representable(vars(args), ignored=ignored, said=said)
    if unequal := unequal_windows(model):
        raise UserError(f"{unequal}; --like a model of another family exports it")
    return notes


def data_notes(args: Namespace) -> list[str]:
    """Say what a run did with its documents that transformers will not do by itself."""
    position = getattr(args, "anchor_position", 0)
    if not position:
        return []
    return [
        f"trained with --anchor-position {position}: transformers gives the first token the "
        "position 0 unless position_ids say otherwise"
    ]


def describe(
    checkpoint: TorchDistCheckpoint,
    args: Namespace,
    like: str | Path | None,
    *,
    flag: str = "--like",
    ignored: Sequence[str] = (),
) -> tuple[Model, dict[str, Any] | None, Path | None, list[str]]:
    """Say what model a checkpoint holds.

    Args:
        checkpoint: one iteration.
        args: of the run.
        like: folder that describes the model; None: the run's --tokenizer-model, if it does.
        flag: that named ``like``, for messages.
        ignored: arguments of the run that are left out.

    Returns:
        The model as trained, the config to take the rest from and its folder, and notes.

    Raises:
        UserError: if ``like`` describes another model, or none of the families fits.
    """
    kept = vars(args).keys() - set(ignored).intersection(LAYER_KINDS)
    args = Namespace(**{name: getattr(args, name) for name in kept})
    model, config, folder, notes = _described(checkpoint, args, like, flag)
    if left_out := [] if like else biases_without_a_place(model):
        raise UserError(
            f"the run trained {', '.join(left_out)}, for which {model.family} has no place; "
            "--like HF_DIR exports it as another model, without those that are still zero"
        )
    return model, config, folder, notes


def _described(
    checkpoint: TorchDistCheckpoint, args: Namespace, like: str | Path | None, flag: str
) -> tuple[Model, dict[str, Any] | None, Path | None, list[str]]:
    tensors = checkpoint.tensors()
    if EMBEDDING not in tensors:
        raise UserError(
            f"{checkpoint.folder} has no {EMBEDDING}; it holds {', '.join(list(tensors)[:3])} ..."
        )
    padded = tensors[EMBEDDING][0][0]
    folder, notes = _like_folder(checkpoint, args, like)
    if folder is None:
        model = model_from_args(args, family=None, padded_vocabulary=padded)
        notes.append(
            f"exported as {model.family}, vocabulary {model.vocabulary}, without a tokenizer: "
            "--like HF_DIR takes these from the original model"
        )
        return model, None, None, notes
    try:
        config = read_config(folder)
        theirs = model_of(config)
    except UserError as error:
        if like is not None:
            raise
        model = model_from_args(args, family=None, padded_vocabulary=padded)
        notes.append(f"{folder}: {error}; exported as {model.family}, without its config")
        return model, None, folder, notes
    model = model_from_args(args, family=architecture(config), padded_vocabulary=padded)
    different = [
        f"{name} {getattr(model, name)} (there {getattr(theirs, name)})"
        for name in LIKE_MUST_AGREE
        if getattr(model, name) != getattr(theirs, name)
    ]
    if different and like is None:
        model = model_from_args(args, family=None, padded_vocabulary=padded)
        notes.append(
            f"{folder} is another model ({', '.join(different)}); exported as {model.family}, "
            "without its config"
        )
        return model, None, folder, notes
    if different:
        raise UserError(
            f"{flag} {folder} describes another model than the checkpoint's: {', '.join(different)}"
        )
    if theirs.vocabulary > padded:
        raise UserError(
            f"{flag} {folder}: vocab_size {theirs.vocabulary}, but the trained embedding has only "
            f"{padded} rows"
        )
    # What was not asked for explicitly does not take a trained bias away.
    biases: dict[str, Any] = {
        name: getattr(theirs, name) or (like is None and getattr(model, name)) for name in BIASED
    }
    model = dataclasses.replace(model, vocabulary=theirs.vocabulary, **biases)
    return model, config, folder, notes


def _like_folder(
    checkpoint: TorchDistCheckpoint, args: Namespace, like: str | Path | None
) -> tuple[Path | None, list[str]]:
    """Choose --like, what a conversion has beside it, or what the run was given."""
    if like is not None:
        return Path(like), []
    given, beside = getattr(args, "tokenizer_model", None), checkpoint.folder.parent / SOURCE_FOLDER
    notes = []
    if given and not Path(given).exists():
        notes.append(f"the run's --tokenizer-model {given} is no longer there")
    for folder in (beside, *([Path(given)] if given else [])):
        if (folder / "config.json").is_file():
            return folder, [*notes, f"config and tokenizer like {folder}"]
    return None, notes


def check_same_settings(
    first: TorchDistCheckpoint, model: Model, other: TorchDistCheckpoint, others: Model
) -> None:
    """Check that two checkpoints can have a mean.

    Raises:
        UserError: naming the settings in which they differ.
    """
    different = [
        f"{field.name} {getattr(model, field.name)} and {getattr(others, field.name)}"
        for field in dataclasses.fields(Model)
        if field.compare and getattr(model, field.name) != getattr(others, field.name)
    ]
    if different:
        raise UserError(
            f"--average: {first.folder.name} and {other.folder.name} were trained with different "
            f"settings: {', '.join(different)}"
        )


def check_names(checkpoint: TorchDistCheckpoint, model: Model) -> None:
    """Check that tensors and rules fit each other one to one, before anything is written.

    Raises:
        UserError: naming the tensors that have no rule, are missing or have another shape.
    """
    tensors = checkpoint.tensors()
    known: set[str] = set()
    for rule in rules_for(model):
        rows = sum(segment.rows for segment in rule.segments(model))
        shape = (*rule.stack(model), *rule.shape(rows, model))
        key = _stored_key(rule, tensors)
        if key is not None:
            known.add(key)
            found = tensors[key][0]
            if found != shape:
                raise UserError(
                    f"{checkpoint.folder}: {key} has shape {list(found)}, the run's arguments make "
                    f"it {list(shape)}"
                )
            continue
        singles = _single_keys(rule, tensors, model)
        if singles is None:
            raise UserError(
                f"{checkpoint.folder} lacks {' or '.join(rule.keys)}, which {model.family} needs"
            )
        known.update(singles)
    unknown = sorted(set(tensors) - known)
    if unknown:
        raise UserError(
            f"{model.family} has no rule for {', '.join(unknown[:3])}"
            + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
            + "; exporting without it would not be exact"
        )


def _stored_key(rule: Rule, tensors: Mapping[str, Any]) -> str | None:
    return next((key for key in rule.keys if key in tensors), None)


def _single_keys(rule: Rule, tensors: Mapping[str, Any], model: Model) -> list[str] | None:
    """Names where each layer is stored as a tensor of its own."""
    for name in rule.forms:
        if LAYER in name:
            numbered = name.replace(LAYER, "{}")
            keys = [stacked(numbered).format(i) for i in range(model.layers)]
            if all(key in tensors for key in keys):
                return keys
    return None


class Stored:
    """The Hugging Face tensors that one or several checkpoints hold."""

    def __init__(
        self,
        checkpoints: Sequence[TorchDistCheckpoint],
        model: Model,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self._checkpoints, self._wanted = checkpoints, dtype
        self._tensors = [checkpoint.tensors() for checkpoint in checkpoints]
        for checkpoint, tensors in zip(checkpoints, self._tensors, strict=True):
            for name in sorted(tensors.keys() | self._tensors[0].keys()):
                here, there = self._tensors[0].get(name), tensors.get(name)
                if here != there:
                    raise UserError(
                        f"--average: {name} is {here} in {checkpoints[0].folder.name}, {there} in "
                        f"{checkpoint.folder.name}"
                    )
        self._sources = {
            name: (rule, indices, number)
            for rule in rules_for(model)
            for indices in rule.indices(model)
            for number, name in enumerate(rule.names(indices))
        }
        self._blocks = Blocks()

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, and so of the model."""
        return self._wanted or self._tensors[0][EMBEDDING][1]

    def plans(self) -> list[TensorPlan]:
        """Give all tensors in the model's order: embedding, layers, the rest."""
        plans = [
            TensorPlan(name, rule.source_shapes(self.model)[number], self._dtype(rule))
            for name, (rule, _, number) in self._sources.items()
        ]

        def place(plan: TensorPlan) -> float:
            rule, indices, _ = self._sources[plan.name]
            return indices.get(LAYER, -1 if rule.megatron == EMBEDDING else math.inf)

        return sorted(plans, key=place)

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the bytes of one Hugging Face tensor in order."""
        rule, indices, number = self._sources[name]
        rows = self._rows(rule, indices)
        position, found = 0, []
        for segment in rule.segments(self.model):
            if segment.source == number:
                found.append((segment.first, position, segment.rows))
            position += segment.rows
        for _, start, count in sorted(found):
            yield from self._blocks.of(rows, start, count)

    def check_zeros(self, *, remedy: str = "export without --like") -> None:
        """Check that what the Hugging Face model does not have is zero.

        Args:
            remedy: for the message.

        Raises:
            UserError: naming a trained tensor that would be lost.
        """
        for rule in rules_for(self.model):
            if not isinstance(rule.layout, Zeros):
                continue
            for indices in rule.indices(self.model):
                rows = self._rows(rule, indices)
                for block in self._blocks.of(rows, 0, rows.shape[0]):
                    if block.any():
                        raise UserError(
                            f"{rule.keys[0]} {list(indices.values())} was trained, but "
                            f"{self.model.family} as described has no such bias; {remedy}, or set "
                            "attention_bias and mlp_bias to true in its config.json"
                        )

    def _dtype(self, rule: Rule) -> torch.dtype:
        if self._wanted is not None:
            return self._wanted
        key = _stored_key(rule, self._tensors[0]) or self._single(rule, 0)
        return self._tensors[0][key][1]

    def _rows(self, rule: Rule, indices: Mapping[str, int]) -> Rows:
        key, place = _stored_key(rule, self._tensors[0]), tuple(indices.values())
        if key is None:
            key, place = self._single(rule, indices[LAYER]), place[1:]
        sources: list[Rows] = [c.rows(key, place) for c in self._checkpoints]
        rows = sources[0] if len(sources) == 1 else AverageRows(sources)
        return rows if self._wanted in (None, rows.dtype) else CastRows(rows, self._wanted)

    def _single(self, rule: Rule, layer: int) -> str:
        keys = _single_keys(rule, self._tensors[0], self.model)
        assert keys is not None, rule
        return keys[layer]


def _write_companions(
    out: Path, model: Model, config: Mapping[str, Any] | None, folder: Path | None
) -> None:
    if folder is not None:
        tokenizer_files.copy_tokenizer(folder, out, positions=model.positions)
    generation = folder / "generation_config.json" if folder and config else None
    if generation is not None and generation.is_file():
        shutil.copyfile(generation, out / generation.name)
        return
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    known = {name: config[name] for name in ids if name in config} if config else {}
    _write_json(out / "generation_config.json", {"_from_model_config": True, **known})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
