"""A run, its checkpoint and its flags describe one model.

Megatron compares four arguments with the checkpoint's, and --use-checkpoint-args restores those of
a list: a norm's epsilon or --qk-layernorm is in neither, and our own flags cannot be. Here every
argument of `model_fields` is compared, and restored where that is asked for.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_anchor.checkpoint.argument_check import is_ours
from megatron_anchor.training.arguments import rope_scaling
from megatron_anchor.training.command_line import CommandLine
from megatron_anchor.training.model_fields import may_change, model_fields, switch_of

OLDER_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Argument to what Megatron called it before 0.19."""

NOT_RESTORED = frozenset({"spec", "fp8_quantizer_factory", "fp4_quantizer_factory"})
"""Names of code to import: never taken from a file."""

SCALING = (
    "rope_parameters",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
)
"""Ours and Megatron's flags for scaled rotary positions."""

PRECISION = ("bf16", "fp16")

VOCABULARY = frozenset({"vocab_size", "padded_vocab_size"})
"""Restored, and compared by `lost_vocabulary`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An argument that is not what the checkpoint records."""

    name: str
    ours: Any
    theirs: Any
    """the checkpoint's value; where it records none, Megatron's default"""
    recorded: bool = True


def differences(
    ours: Namespace, theirs: Namespace, command_line: CommandLine
) -> Iterator[Difference]:
    """Compare the arguments that describe a model.

    Args:
        ours: this run's, validated.
        theirs: those that the checkpoint records, by this or an older Megatron, or our converter.
        command_line: tells what was given; what the checkpoint does not record is compared with the
            default, but only where the user has set it.

    Yields:
        Differences, of which `may_change` tells whether they can be meant.
    """
    here, there = _described(vars(ours)), _described(vars(theirs))
    for name in sorted(model_fields()):
        if name not in here or not (_has_meaning(name, here) or _has_meaning(name, there)):
            continue
        if name in there:
            if _plain(here[name]) != _plain(there[name]):
                yield Difference(name=name, ours=here[name], theirs=there[name])
        elif name in command_line.given and not may_change(name):
            default = command_line.default(name)
            if _plain(here[name]) != _plain(default):
                yield Difference(name=name, ours=here[name], theirs=default, recorded=False)


def restore(args: Namespace, theirs: Namespace, command_line: CommandLine) -> list[str]:
    """Take from a checkpoint all that describes its model (--use-checkpoint-args).

    Args:
        args: parsed and not validated, changed in place.
        theirs: as the checkpoint records them.
        command_line: what it says counts for arguments that may change.

    Returns:
        What was taken, as flags, where it differs from what the command line asks for.
    """
    recorded, taken = _with_todays_names(vars(theirs)), []
    for name in sorted(model_fields() | VOCABULARY):
        if name not in recorded or not hasattr(args, name) or not _has_meaning(name, recorded):
            continue
        if name in NOT_RESTORED or _is_meant(name, command_line):
            continue
        if _plain(getattr(args, name)) != _plain(recorded[name]):
            instead = f" (instead of {getattr(args, name)})" if name in command_line.given else ""
            taken.append(command_line.write(name, recorded[name]) + instead)
        setattr(args, name, recorded[name])
    return taken


def meant_values(args: Namespace, command_line: CommandLine) -> dict[str, Any]:
    """Give what the command line says about all that may differ from the checkpoint's record."""
    return {n: getattr(args, n) for n in command_line.given if _is_meant(n, command_line)}


def _is_meant(name: str, command_line: CommandLine) -> bool:
    for flags in (SCALING, PRECISION):  # several flags for one thing: any of them speaks for all
        if name in flags:
            return not command_line.given.isdisjoint(flags)
    fixed = name in model_fields() and not may_change(name)
    return name in command_line.given and not fixed


def lost_vocabulary(ours: Namespace, theirs: Namespace) -> str | None:
    """Say why the checkpoint's embedding does not fit: Megatron would cut its rows in silence.

    Rows that only fill the vocabulary up may go, as they do at a smaller tensor-parallel size.
    """
    rows, stored = ours.padded_vocab_size, getattr(theirs, "padded_vocab_size", None)
    if rows is None or stored is None:
        return None
    unit = getattr(theirs, "make_vocab_size_divisible_by", 1)
    unit *= getattr(theirs, "tensor_model_parallel_size", 1)
    least = getattr(theirs, "vocab_size", None) or stored - unit + 1
    if rows >= least:
        return None
    return (
        f"{rows} rows of the embedding here (--vocab-size, --padded-vocab-size, or the tokenizer's "
        f"size), {stored} there: rows of tokens would be cut; give --padded-vocab-size {stored}"
    )


def lost_query_norm(theirs: Namespace) -> str | None:
    """Say why a multi-latent model of stock Megatron has a norm that would be left behind.

    Without low rank of the queries its Transformer Engine layers normalise in front of their
    projection a second time. DeepSeek-V2-Lite does not, nor does this package.
    """
    described = vars(theirs)
    has_norm = (
        described.get("multi_latent_attention")
        and described.get("qk_layernorm")
        and described.get("q_lora_rank") is None
        and described.get("transformer_impl") == "transformer_engine"
    )
    if not has_norm or is_ours(described):
        return None
    return (
        "--multi-latent-attention with --qk-layernorm and without --q-lora-rank there: Megatron's "
        "layers of Transformer Engine have a norm in front of the query projection, which these "
        "have not (nor has DeepSeek-V2-Lite); go on with Megatron's own pretrain_gpt.py"
    )


def _with_todays_names(values: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, older in OLDER_NAMES.items():
        if name not in found and older in found:
            found[name] = found[older]
    if "add_bias_linear" not in found and "disable_bias_linear" in found:
        found["add_bias_linear"] = not found["disable_bias_linear"]
    return found


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the ways to say one thing to one: groups of keys, and scaled rotary positions."""
    found = _with_todays_names(values)
    if "group_query_attention" in found:
        grouped = found.pop("group_query_attention")
        heads = found.get("num_attention_heads")
        found["num_query_groups"] = found.get("num_query_groups") if grouped else heads
    if not found.keys().isdisjoint(SCALING):
        defaults = {**dict.fromkeys(SCALING), "rope_scaling_factor": 8.0}
        try:
            scaling = rope_scaling(Namespace(**{**defaults, **found}))
        except ValueError:  # of a stranger's record; it is shown as it stands
            return found
        found = {name: value for name, value in found.items() if name not in SCALING}
        found["rope_parameters"] = json.dumps(scaling, sort_keys=True) if scaling else None
    return found


def _has_meaning(name: str, values: Mapping[str, Any]) -> bool:
    switch = None if name == "num_query_groups" else switch_of(name)
    return switch is None or bool(values.get(switch))


def _plain(value: Any) -> Any:
    """What a value says, whatever type it has before and after validation, or in a file."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return _plain(value[0]) if len(value) == 1 else [_plain(part) for part in value]
    return None if value is False else value
