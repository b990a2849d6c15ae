"""The tokenizer's files of a Hugging Face folder: copied as they are, asked for a few ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.model_folder import (
    FOLDERS,
    TOKENIZERS,
    check_links,
    read_json,
)
from megatron_anchor.errors import UserError

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(folder: str | Path) -> bool:
    """Say whether a folder holds a tokenizer."""
    return any((Path(folder) / name).is_file() for name in VOCABULARIES)


def copy_tokenizer(source: str | Path, target: Path, *, positions: int | None = None) -> list[str]:
    """Copy a tokenizer's files.

    Args:
        source: folder to copy from.
        target: folder to copy to.
        positions: raises ``model_max_length`` to this many tokens if it is lower.

    Returns:
        Names of the files and folders copied.

    Raises:
        UserError: for links that lead outside of the folder.
    """
    check_links(source)
    names = [name for name in TOKENIZERS if (Path(source) / name).is_file()]
    for name in names:
        shutil.copyfile(Path(source) / name, target / name)
    for name in FOLDERS:
        if (Path(source) / name).is_dir():
            shutil.copytree(Path(source) / name, target / name)
            names.append(name)
    path = target / "tokenizer_config.json"
    if positions and path.is_file():
        config = read_json(path)
        length = config.get("model_max_length")
        if isinstance(length, int | float) and 0 < length < positions:
            config["model_max_length"] = positions
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return names


def vocabulary_size(folder: str | Path) -> int | None:
    """Count a tokenizer's tokens, added ones included; None where there is none to count."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        ids = _vocabulary(folder).values()
        return max(ids, default=-1) + 1
    if (folder / "tokenizer.model").is_file():
        from sentencepiece import SentencePieceProcessor

        added = read_json(folder / "added_tokens.json").values()
        size = SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
        return max([size, *(i + 1 for i in added)])
    return None


def anchor_id(
    folder: str | Path, config: Mapping[str, Any], *, kinds: Sequence[str] = ("bos", "eos")
) -> int | None:
    """Choose the anchor: the tokenizer's bos, else its eos; without a tokenizer, the config's."""
    tokenizer = read_json(Path(folder) / "tokenizer_config.json")
    for kind in kinds:
        token = tokenizer.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text and (found := _token_id(Path(folder), text)) is not None:
            return found
        if not tokenizer or text:  # no tokenizer, or a token whose id only the config knows
            given = config.get(f"{kind}_token_id")
            first = given[0] if isinstance(given, list) and given else given
            if isinstance(first, int):
                return first
    return None


def _token_id(folder: Path, text: str) -> int | None:
    if (folder / "tokenizer.json").is_file():
        return _vocabulary(folder).get(text)
    if (folder / "tokenizer.model").is_file():
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        found = processor.piece_to_id(text)
        return found if processor.id_to_piece(found) == text else None
    return None


def _vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is no tokenizer: {error}") from error
