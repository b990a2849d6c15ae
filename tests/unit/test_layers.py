"""Who may import what: the layers of the package, read from its sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_anchor

PACKAGE = Path(megatron_anchor.__file__).parent
KERNEL_LIBRARIES = ("transformer_engine", "flash_attn", "flash_attn_interface")

ALLOWED = {
    "megatron.training": ("training", "pretrain_gpt.py", "on_cpu", "compat.py"),
    "megatron": (
        "attention",
        "checkpoint",
        "packing",
        "training",
        "pretrain_gpt.py",
        "on_cpu",
        "compat.py",
    ),
    "megatron_anchor.training": (
        "training",
        "pretrain_gpt.py",
        "checkpoint/megatron_args.py",
        "checkpoint/megatron_model.py",
    ),
    "megatron_anchor.attention": (
        "attention",
        "precision",
        "training",
        "pretrain_gpt.py",
        "checkpoint/megatron_model.py",
        "checkpoint/megatron_args.py",
        "checkpoint/transformers_model.py",
    ),
    "megatron_anchor.corpus": ("corpus", "precision/texts.py"),
    "megatron_anchor.planner": ("planner",),
    "megatron_anchor.evaluation": ("evaluation",),
    "megatron_anchor.packing": (
        *("packing", "attention", "planner", "training"),
        "checkpoint/anchored_tokenizer.py",
    ),
    **dict.fromkeys(KERNEL_LIBRARIES, ("attention/backends",)),
}
"""Import to the parts of the package that may have it, at the top or inside a function."""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules_importing(name):
    for path in sorted(PACKAGE.rglob("*.py")):
        if any(i == name or i.startswith(f"{name}.") for i in imports_of(path)):
            yield path.relative_to(PACKAGE).as_posix()


PLANNER = """
import sys, importlib, pkgutil
import megatron_anchor.planner as planner
for module in pkgutil.iter_modules(planner.__path__):
    importlib.import_module(f"megatron_anchor.planner.{module.name}")
assert "numpy" in sys.modules
print([name for name in ("torch", "megatron", "transformers", "numba") if name in sys.modules])
"""


def test_the_planner_needs_numpy_alone():
    """Nothing heavy is loaded, directly or through another part of the package."""
    ran = subprocess.run([sys.executable, "-c", PLANNER], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


@pytest.mark.parametrize("name", ALLOWED)
def test_only_the_right_layers_import(name):
    users = list(modules_importing(name))
    # The corpus tools may compare with Megatron's formats, nothing else of the host.
    strangers = [user for user in users if not user.startswith(ALLOWED[name])]
    assert not strangers, f"{strangers} must not import {name}"
    assert users or name in KERNEL_LIBRARIES, f"nobody imports {name}: the rule is stale"
