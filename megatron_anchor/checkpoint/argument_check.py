"""Can a Hugging Face family represent what a run trained? Each of the run's arguments is asked."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron_anchor.checkpoint.model_arguments import (
    CARRIED,
    REQUIRED,
    WITHOUT_EFFECT,
    Required,
)
from megatron_anchor.checkpoint.training_arguments import NOT_OF_THE_MODEL
from megatron_anchor.errors import UserError

HARMLESS = {
    name: reason
    for rows in (WITHOUT_EFFECT, NOT_OF_THE_MODEL)
    for reason, names in rows.items()
    for name in names
}
"""Name to the reason why its value does not matter."""

NOTHING: Mapping[str, Required] = MappingProxyType({})

FACTOR_OF_STOCK = 8.0
"""Megatron's own program drops --rope-scaling-factor on the way to its model, which has this."""


def unrepresentable(
    given: Mapping[str, Any], *, said: Mapping[str, Required] = NOTHING
) -> dict[str, str]:
    """Find the arguments under which a run trained something that its family cannot say.

    Args:
        given: of the run, as its checkpoint records them.
        said: names to what the family needs in the place of `REQUIRED` (`Family.says`).

    Returns:
        Name to a description with the value found and the value needed.
    """
    found = {}
    for name, value in sorted(given.items()):
        row = said.get(name) or REQUIRED.get(name)
        if row is not None:
            problem = _unmet(name, value, row, has_experts=bool(given.get("num_experts")))
        elif name in CARRIED or name in HARMLESS or value is None:
            problem = None
        else:
            problem = _unknown(name, value)
        if problem:
            found[name] = problem
    return found | _rope_problems(given)


def check_representable(
    given: Mapping[str, Any],
    *,
    ignored: Collection[str] = (),
    said: Mapping[str, Required] = NOTHING,
) -> list[str]:
    """Check that a run's arguments describe a model that a family can represent.

    Args:
        given: of the run.
        said: see `unrepresentable`.
        ignored: names of arguments that the user leaves out knowingly.

    Returns:
        Notes on what was left out.

    Raises:
        UserError: naming every argument that cannot be said, with both values; or for an
            ignored name that is no problem.
    """
    problems = unrepresentable(given, said=said)
    for name in ignored:
        if name not in problems:
            raise UserError(
                f"--ignore-arguments {name}: the export depends on no such argument of this run; "
                "leave it out"
            )
    wrong = {name: text for name, text in problems.items() if name not in ignored}
    if wrong:
        raise UserError(
            f"no Hugging Face family can represent this run: {', '.join(wrong.values())}. To "
            "export it without them, which is another model wherever they matter: "
            f"tools/convert_megatron_to_hf.py --ignore-arguments {' '.join(wrong)}"
        )
    return [f"exported without {problems[name]}" for name in ignored]


def is_ours(given: Mapping[str, Any]) -> bool:
    """Say whether a run was megatron_anchor's, or a conversion, and not stock Megatron's."""
    return "rope_parameters" in given or "attention_pattern" in given


def _rope_problems(given: Mapping[str, Any]) -> dict[str, str]:
    """Find settings of RoPE that say two things at once."""
    found = {}
    factor = given.get("rope_scaling_factor", FACTOR_OF_STOCK)
    if given.get("use_rope_scaling") and factor != FACTOR_OF_STOCK and not is_ours(given):
        found["rope_scaling_factor"] = (
            f"rope_scaling_factor {factor} (Megatron's own program trains with "
            f"{FACTOR_OF_STOCK} whatever the flag says; expected {FACTOR_OF_STOCK})"
        )
    base, inside = given.get("rotary_base"), _parameters(given).get("rope_theta")
    if inside is not None and inside != base:
        found["rope_parameters"] = (
            f"rope_parameters with rope_theta {inside} (the first version of this package trained "
            f"with --rotary-base; expected {base}, which it is)"
        )
    return found


def _parameters(given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        found = json.loads(given.get("rope_parameters") or "{}")
    except ValueError:  # said where the rotation is read
        return {}
    return found if isinstance(found, dict) else {}


def _unmet(name: str, value: Any, row: Required, *, has_experts: bool) -> str | None:
    if row.allows(value) or (row.with_experts and not has_experts):
        return None
    needed = " or ".join(repr(v) for v in row.accepted)
    return f"{name} {value!r} ({row.meaning}; expected {needed})"


def _unknown(name: str, value: Any) -> str | None:
    from megatron_anchor import compat

    defaults = compat.argument_defaults()
    if name in defaults and defaults[name] == value:
        return None
    default = repr(defaults[name]) if name in defaults else "not an argument of this Megatron"
    return f"{name} {value!r} (what it does to the model is not known; default: {default})"
