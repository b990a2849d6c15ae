"""The files of a Hugging Face model folder, which may come from a stranger.

Nothing in such a folder may lead outside of it: a link called ``tokenizer.json`` would have any
file of this machine copied into a model that is then given away.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_anchor.errors import UserError

WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
CONFIGS = ("config.json", "generation_config.json")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
)
FOLDERS = ("additional_chat_templates",)


def check_links(folder: str | Path) -> None:
    """Check that no file of a model is a link to somewhere else.

    The hub's cache consists of links: those of ``models--X/snapshots/REVISION`` may lead to its own
    ``models--X/blobs``.

    Raises:
        UserError: naming a link and where it leads.
    """
    folder = Path(folder)
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    for path in _files(folder):
        try:
            target = path.resolve(strict=False)
        except (RuntimeError, OSError) as error:  # a circle of links
            raise UserError(f"{path} leads nowhere ({error}); put the file itself there") from error
        if not any(target.is_relative_to(place) for place in allowed):
            raise UserError(
                f"{path} leads to {target}, outside of the model's folder; put the file itself "
                "there if it belongs to the model"
            )


def _files(folder: Path) -> Iterator[Path]:
    """Give every file that is read or copied, and the folders on the way."""
    for pattern in (*CONFIGS, *TOKENIZERS, *WEIGHTS):
        yield from folder.glob(pattern)
    for name in FOLDERS:
        if (folder / name).is_dir():
            yield folder / name
            yield from (folder / name).rglob("*")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} where there is no such file.

    Raises:
        UserError: for anything else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def own_code(folder: str | Path) -> str | None:
    """Name the file by which a folder asks to have code of its own run, None if there is none."""
    for name in ("config.json", "tokenizer_config.json"):
        if read_json(Path(folder) / name).get("auto_map"):
            return name
    return None
