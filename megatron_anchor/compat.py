"""Everything that knows a host version: megatron-core 0.19 and what comes with it."""

from __future__ import annotations

import importlib.util
import logging
from argparse import ArgumentParser
from importlib.metadata import version

from packaging.version import Version

MEGATRON_MIN, MEGATRON_BELOW = Version("0.19.2"), Version("0.20")


def require_supported_megatron() -> None:
    """Refuse a megatron-core that this package was never run with.

    Raises:
        RuntimeError: with the version found and the one needed.
    """
    found = Version(version("megatron-core"))
    if not MEGATRON_MIN <= found < MEGATRON_BELOW:
        raise RuntimeError(
            f"megatron_anchor needs megatron-core >= {MEGATRON_MIN}, < {MEGATRON_BELOW}, "
            f"found {found}: pip install 'megatron-core>={MEGATRON_MIN},<{MEGATRON_BELOW}'"
        )


def have_transformer_engine() -> bool:
    """Say whether Transformer Engine is installed, without importing it (8 s)."""
    return importlib.util.find_spec("transformer_engine") is not None


def add_argument_group(parser: ArgumentParser, config: type, *, title: str) -> None:
    """Turn a dataclass' fields and their docstrings into flags, by Megatron's own factory."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(config).build_group(parser, title=title)


def mend_help_texts(parser: ArgumentParser) -> None:
    """Escape the stray percent signs in Megatron 0.19.2's help texts, which make --help crash."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def use_shipped_dataset_helpers() -> None:
    """Keep Megatron from compiling its dataset helpers where the wheel ships them compiled.

    ``megatron.core.datasets.utils.compile_helpers`` runs make in the package's folder and ends
    rank 0 when it fails; the wheel has no Makefile there but has the compiled module.
    """
    import megatron.core.datasets.utils as host

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        host.compile_helpers = lambda: None


def quiet_expected_warnings() -> None:
    """Silence what Megatron says about things that this package does on purpose.

    Each row: the logger, and the text of a message that would only frighten the user.
    """
    rows = {
        # GPTModel is what AnchorAttention is for; Megatron advertises its HybridModel.
        "megatron.core.models.gpt.gpt_model": "deprecated",
    }
    for name, text in rows.items():
        logging.getLogger(name).addFilter(_Without(text))


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
