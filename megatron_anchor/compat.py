"""Everything that knows a host version: megatron-core 0.19 and what comes with it."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
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


def have_cuda() -> bool:
    """Say whether there is a CUDA device, or something in its place (megatron_anchor.on_cpu)."""
    import torch

    return torch.cuda.is_available()


def have_transformer_engine() -> bool:
    """Say whether Transformer Engine is installed, without importing it (8 s)."""
    return importlib.util.find_spec("transformer_engine") is not None


def have_fused_weight_gradient() -> bool:
    """Say whether Apex's or Transformer Engine's fused weight-gradient kernels can be used."""
    return (
        have_transformer_engine()
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def add_argument_group(parser: ArgumentParser, config: type, *, title: str) -> None:
    """Turn a dataclass' fields and their docstrings into flags, by Megatron's own factory."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(config).build_group(parser, title=title)


def parse_and_validate_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser],
    *,
    check: Callable[[Namespace], None],
) -> Namespace:
    """Parse as Megatron does, with our own check before its validation and after it.

    Megatron's assertions name neither the value nor the remedy, so ours come first; and again
    afterwards, since validation fills in defaults and --use-checkpoint-args replaces values.

    Args:
        extra_args_provider: adds flags to the parser.
        check: raises ValueError for arguments that cannot run.

    Returns:
        Megatron's validated namespace, which is then also its global one.
    """
    from megatron.training import arguments as host

    args = host.parse_args(extra_args_provider)
    if not args.use_checkpoint_args:
        check(args)
    parse_args = host.parse_args
    host.parse_args = lambda *_, **__: args  # parsing takes Megatron about a second
    try:
        args = host.parse_and_validate_args(extra_args_provider)
    finally:
        host.parse_args = parse_args
    check(args)
    return args


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
        "megatron.core.models.gpt.gpt_model": "DEPRECATED",
    }
    for name, text in rows.items():
        logging.getLogger(name).addFilter(_Without(text))


def quiet_imports_without_gpu() -> None:
    """Silence what Megatron and torch say on import where nothing needs a GPU, as in data tools."""
    for text in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "Only transformer-engine>=",
        "Could not determine rank from torch.distributed",
    ):
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_Without("No CUDA runtime is found"))


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
