"""Command-line flags from a dataclass: its fields are the flags, their docstrings the help texts.

    @dataclass
    class Settings:
        packing: Literal["concat", "best-fit"] = "concat"
        \"\"\"How documents become samples.\"\"\"

A field `first_token: bool = True` becomes `--no-first-token`. `field(metadata={"flags": [...]})`
gives other names.
"""

import ast
import inspect
import types
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, _ArgumentGroup
from dataclasses import Field, fields
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def add_flags(parser: ArgumentParser | _ArgumentGroup, settings: type) -> None:
    """Add a flag for every field of a dataclass that is made by its constructor.

    Types are str, int, float, bool, Literal, a list of these (one or more values), or one of them
    or None.

    Raises:
        TypeError: a field has another type.
    """
    types_of, help_of = get_type_hints(settings), docstrings(settings)
    for one in fields(settings):
        help_text = help_of.get(one.name, "").replace("%", "%%")
        names, options = _flag(one, types_of[one.name])
        parser.add_argument(*names, dest=one.name, default=one.default, help=help_text, **options)


def tell_default(action: Action) -> None:
    """Add a flag's default to its help, unless the help speaks of it already.

    None, empty lists and switches that are off have none to tell.
    """
    default, told = action.default, action.help or ""
    if not action.option_strings or default is SUPPRESS or "default" in told.lower():
        return
    if isinstance(default, bool):
        if not isinstance(action, BooleanOptionalAction):
            return
        long = action.option_strings[0]
        default = long if default else long.replace("--", "--no-", 1)
    elif default is None or default in ((), [], ""):
        return
    elif isinstance(default, list | tuple):
        default = " ".join(map(str, default))
    action.help = f"{told} (default {str(default).replace('%', '%%')})".lstrip()


def docstrings(settings: type) -> dict[str, str]:
    """The strings that follow the fields of a dataclass and of its bases in their sources."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in pairwise(body.body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _flag(one: Field, kind: Any) -> tuple[list[str], dict[str, Any]]:
    """Names of a field's flag, and what argparse has to know of its type."""
    plain = one.name.replace("_", "-")
    names = one.metadata.get("flags", [f"--{plain}"])
    if kind is bool and one.default:
        return one.metadata.get("flags", [f"--no-{plain}"]), {"action": "store_false"}
    if kind is bool:
        return names, {"action": "store_true"}
    return names, _type(kind)


def _type(kind: Any) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        [kind] = [one for one in inner if one is not type(None)]
        return _type(kind)
    if origin is list:
        return {**_type(inner[0]), "nargs": "+"}
    if origin is Literal:
        return {"type": type(inner[0]), "choices": list(inner)}
    if kind in (str, int, float):
        return {"type": kind}
    raise TypeError(f"no flag can have the type {kind}")
