"""What the flags for weights and conversations mean for a run: rules, settings, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_anchor.corpus.chat_checks import prompt_note, require_whole_answers
from megatron_anchor.corpus.chat_encoding import (
    TOO_LONG,
    ChatSettings,
    chat_settings,
    pattern_of,
)
from megatron_anchor.corpus.chat_templates import load_chat_template
from megatron_anchor.errors import UserError
from megatron_anchor.indexed.weights import (
    WEIGHT_DTYPES,
    read_weights_manifest,
    weights_manifest_path,
)
from megatron_anchor.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megatron_anchor.corpus.preprocess import PreprocessConfig

CHAT_DTYPE = "uint8"
_DEFAULT_DTYPE = "float32"


def require_weight_options(config: PreprocessConfig) -> None:
    """Refuse flags that do not go together.

    Raises:
        UserError: it names both.
    """
    if config.weight_dtype not in WEIGHT_DTYPES:
        raise UserError(
            f"--weight-dtype {config.weight_dtype}: expected {', '.join(WEIGHT_DTYPES)}"
        )
    if config.long_conversations not in TOO_LONG:
        raise UserError(
            f"--long-conversations {config.long_conversations}: expected {' or '.join(TOO_LONG)}"
        )
    most = config.max_conversation_tokens
    if most is not None and most < 1:
        raise UserError(f"--max-conversation-tokens {most}: expected at least 1")
    if not config.chat:
        return
    for flag, given in (
        ("--pretokenized", config.pretokenized),
        ("--split-sentences", config.split_sentences),
        ("--weight-key", config.weight_key is not None),
        ("--engine gigatoken", config.tokenizer.engine == "gigatoken"),
    ):
        if given:
            why = {
                "--weight-key": "the answers weigh 1 and all else 0; a message may have a weight "
                "of 0 itself",
                "--engine gigatoken": "it does not say where in a text its tokens stand",
            }.get(flag, "a row holds messages")
            raise UserError(f"--chat does not go with {flag}: {why}")
    if len(config.json_keys) != 1:
        raise UserError(
            f"--chat takes the messages of one key, not of {', '.join(config.json_keys)}; give a "
            "single --json-keys"
        )


def idle_weight_options(config: PreprocessConfig) -> list[str]:
    """A sentence for each flag that has no effect."""
    of_chat = {
        "--chat-template": config.chat_template is not None,
        "--chat-template-kwargs": config.chat_template_kwargs is not None,
        "--tools-key": config.tools_key != "tools",
        "--max-conversation-tokens": config.max_conversation_tokens is not None,
    }
    notes = [
        f"{flag} has no effect without --chat"
        for flag, given in of_chat.items()
        if given and not config.chat
    ]
    if config.long_conversations != TOO_LONG[0] and config.max_conversation_tokens is None:
        notes.append("--long-conversations has no effect without --max-conversation-tokens")
    if config.weight_dtype != _DEFAULT_DTYPE and config.weight_key is None:
        notes.append("--weight-dtype has no effect without --weight-key")
    return notes


def weight_dtype_of(config: PreprocessConfig) -> str | None:
    """The dtype of the weights that a run writes, None where it writes none."""
    if config.chat:
        return CHAT_DTYPE
    return config.weight_dtype if config.weight_key is not None else None


def checked_chat(config: PreprocessConfig, tokenizer: Tokenizer) -> ChatSettings | None:
    """The settings of --chat, after its template was tried; None without --chat.

    Raises:
        UserError: the tokenizer or the template does not serve.
    """
    if not config.chat:
        return None
    template = load_chat_template(
        tokenizer, file=config.chat_template, kwargs=config.chat_template_kwargs
    )
    settings = chat_settings(
        tokenizer,
        template,
        append_eod=config.append_eod,
        max_tokens=config.max_conversation_tokens,
        too_long=config.long_conversations,
        text_is_text=not config.tokenizer.allow_special_in_text,
    )
    require_whole_answers(template, control=pattern_of(settings.special))
    return settings


def run_notes(
    config: PreprocessConfig, tokenizer: Tokenizer, chat: ChatSettings | None
) -> list[str]:
    """What the user should know of a tokenizer, a template and the flags."""
    if chat is None:
        return [*tokenizer.notes, *config.notes]
    note = prompt_note(chat.template)  # the tokenizer's are on what stands around plain texts
    return [*([note] if note else []), *config.notes]


def weights_from(
    config: PreprocessConfig,
    chat: ChatSettings | None,
    *,
    fingerprint: str,
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """What made the weights of a run, for their JSON."""
    if chat is not None:
        return {
            "tokenizer": fingerprint,
            "chat": chat.template.identity,
            "counts": dict(sorted(counts.items())),
        }
    return {"tokenizer": fingerprint, "weight_key": config.weight_key}


def joined_origins(origins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What made the weights of corpora that are merged: one origin where they share it."""
    shared = [{k: v for k, v in origin.items() if k != "counts"} for origin in origins]
    if any(origin != shared[0] for origin in shared):
        return {"merged": origins}
    counts: dict[str, int] = {}
    for origin in origins:
        for name, number in origin.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + number
    return {**shared[0], **({"counts": dict(sorted(counts.items()))} if counts else {})}


def weighted_tokens(prefixes: Sequence[str]) -> tuple[list[int], dict[str, int]]:
    """Tokens that are learned of every corpus, and counts of conversations; empty without."""
    if not all(weights_manifest_path(prefix).exists() for prefix in prefixes):
        return [], {}
    found = [read_weights_manifest(prefix) for prefix in prefixes]
    return [one.weighted_tokens for one in found], dict(found[0].made_from.get("counts", {}))
