"""Names on the Hugging Face hub, and whether it can be asked at all."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from megatron_anchor.errors import UserError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_FILES = (".json", ".model", ".tiktoken", ".txt", ".bpe")


def require_name(name: str, *, flag: str) -> None:
    """Refuse what is no file or folder here and cannot be a name on the hub.

    Raises:
        UserError: it looks like a path.
    """
    is_path = name.startswith((".", "/", "~")) or name.endswith((*_FILES, "/"))
    if is_path or not _NAME.fullmatch(name):
        raise UserError(
            f"{flag} {name}: there is no such file or folder (seen from {Path.cwd()}), and a name "
            "on the Hugging Face hub is written owner/name"
        )


@functools.cache
def is_reachable(seconds: float = 5.0) -> bool:
    """Whether the hub answers; asked once, so that nobody waits for retries without a network."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception:  # its HTTP library, and with it the kinds of errors, changed between versions
        return False
    return True


def is_cached(name: str) -> bool:
    """Whether a tokenizer of this name lies in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    files = ("tokenizer.json", "tokenizer_config.json", "config.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
