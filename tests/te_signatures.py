"""What we and Megatron call in Transformer Engine: parameter names, as a snapshot.

.venv-te/bin/python -m tests.te_signatures     # writes tests/te_signatures.json anew
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

SNAPSHOT = Path(__file__).with_suffix(".json")

NAMES = {
    "DotProductAttention.__init__": "transformer_engine.pytorch:DotProductAttention.__init__",
    "DotProductAttention.forward": "transformer_engine.pytorch:DotProductAttention.forward",
    "DotProductAttention.set_context_parallel_group": (
        "transformer_engine.pytorch:DotProductAttention.set_context_parallel_group"
    ),
    "get_batch_on_this_cp_rank": (
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
        ":get_batch_on_this_cp_rank"
    ),
}


def read() -> dict[str, list[str]]:
    """Read the parameter names from the installed Transformer Engine."""
    import importlib

    found = {}
    for name, target in NAMES.items():
        module, _, path = target.partition(":")
        thing = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
        found[name] = list(inspect.signature(inspect.unwrap(thing)).parameters)
    return found


def snapshot() -> dict[str, list[str]]:
    """Read the snapshot of the repository."""
    return json.loads(SNAPSHOT.read_text(encoding="utf-8"))["parameters"]


if __name__ == "__main__":
    import torch  # noqa: F401  # before Transformer Engine

    from tests import te_stand_in

    te_stand_in.install()
    from importlib.metadata import version

    content = {"transformer_engine": version("transformer_engine"), "parameters": read()}
    SNAPSHOT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {SNAPSHOT}")
