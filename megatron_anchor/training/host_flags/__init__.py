"""Every argument of Megatron's parser has a row here: carried, refused, or without effect.

What has no row, because a newer Megatron added it, is refused where it is set. A test holds the
rows against the parser of the pinned Megatron, and `docs/host-flags.md` is written from them.
"""

from __future__ import annotations

from argparse import Namespace
from enum import Enum
from typing import Any, Literal, NamedTuple

from megatron_anchor import compat
from megatron_anchor.training.arguments import AnchorArguments, adapted_defaults
from megatron_anchor.training.host_flags.carried import CARRIED, READ_WITH
from megatron_anchor.training.host_flags.refused import (
    HARMLESS,
    NEEDS_ITS_LAYERS,
    NEEDS_TRANSFORMER_ENGINE,
    REFUSED,
    REFUSED_VALUES,
)
from megatron_anchor.training.host_flags.without_effect import WITHOUT_EFFECT

__all__ = [
    "CARRIED",
    "HARMLESS",
    "NEEDS_ITS_LAYERS",
    "NEEDS_TRANSFORMER_ENGINE",
    "OPTIONAL",
    "READ_WITH",
    "REFUSED",
    "REFUSED_VALUES",
    "ROWS",
    "WITHOUT_EFFECT",
    "Row",
    "as_typed",
    "refusals",
    "without_effect",
]

OPTIONAL = ("kitchen_config_file", "kitchen_recipe_number")
"""Arguments that Megatron has where a library is installed."""


class Row(NamedTuple):
    """What becomes of one argument."""

    verdict: Literal["carried", "refused", "without effect"]
    text: str
    """Who reads it, or why not."""


def _rows() -> dict[str, Row]:
    rows = [(name, Row("refused", reason)) for name, reason in REFUSED.items()]
    for by, names in CARRIED.items():
        rows += [(name, Row("carried", by)) for name in names.split()]
    for reason, names in WITHOUT_EFFECT.items():
        rows += [(name, Row("without effect", reason)) for name in names.split()]
    assert len(dict(rows)) == len(rows), "an argument has two rows"
    return dict(rows)


ROWS = _rows()
"""Name in Megatron's namespace to the argument's row."""


def refusals(args: Namespace) -> list[str]:
    """Say which of Megatron's arguments cannot be used here, and why.

    Args:
        args: Megatron's namespace before Megatron's own validation, which changes values.
    """
    return [
        f"{as_typed(flag, value)}: {reason}"
        for name, flag, value in _set_away_from_default(args)
        for reason in _reasons(name, value, args)
    ]


def without_effect(args: Namespace) -> list[str]:
    """Say which of Megatron's arguments that are set change nothing here, and why.

    Args:
        args: as in `refusals`.
    """
    return [
        f"{as_typed(flag, value)}: {reason}"
        for name, flag, value in _set_away_from_default(args)
        if (reason := _no_effect(name, args)) is not None
    ]


def _no_effect(name: str, args: Namespace) -> str | None:
    if name in ROWS and ROWS[name].verdict == "without effect":
        return ROWS[name].text
    switch = next((s for s, names in READ_WITH.items() if name in names.split()), None)
    if switch is None or getattr(args, switch, None):
        return None
    return f"read with {compat.host_flags()[switch].names[0]} only"


def as_typed(flag: compat.HostFlag, value: Any) -> str:
    """The flag and its value as on a command line."""
    if isinstance(value, bool) or value is None:
        return flag.names[0]
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([flag.names[0], *(str(_plain(one)) for one in values)])


def _reasons(name: str, value: Any, args: Namespace) -> list[str]:
    row = ROWS.get(name)
    if row is None:
        return [
            f"megatron_anchor knows nothing of this argument of Megatron {compat.host_version()}; "
            "leave it out"
        ]
    if row.verdict == "refused":
        return [row.text]
    values = value if isinstance(value, list) else [value]
    refused = REFUSED_VALUES.get(name, {})
    found = [refused[one] for one in map(_plain, values) if one in refused]
    if name in NEEDS_ITS_LAYERS and args.transformer_impl != "transformer_engine":
        found.append(f"it needs --transformer-impl transformer_engine: {NEEDS_ITS_LAYERS[name]}")
    if name in NEEDS_TRANSFORMER_ENGINE and not compat.have_transformer_engine():
        found.append(
            "Transformer Engine is not installed, and this needs it: "
            f"{NEEDS_TRANSFORMER_ENGINE[name]}; pip install 'megatron-anchor[te]'"
        )
    return found


def _set_away_from_default(args: Namespace) -> list[tuple[str, compat.HostFlag, Any]]:
    """(name, flag, value) of Megatron's arguments that have another value than without a flag."""
    ours = adapted_defaults()
    found = []
    for name, flag in compat.host_flags().items():
        default = ours.get(name, flag.default)
        value = getattr(args, name, default)
        same = value == default or (not value and not default and value is not False)
        harmless = name in HARMLESS and value == HARMLESS[name](args)
        if not same and not harmless and name not in AnchorArguments.__dataclass_fields__:
            found.append((name, flag, value))
    return found


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value
