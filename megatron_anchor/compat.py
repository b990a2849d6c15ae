"""Everything that knows a host version: megatron-core 0.19 and 0.20, and what comes with them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from packaging.version import Version

from megatron_anchor.errors import UserError
from megatron_anchor.patches import MEGATRON, Patch, applied

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron notes a folder's last checkpoint."""

MEGATRON_MIN, MEGATRON_BELOW = Version("0.19.0"), Version("0.21")
"""Checkouts of Megatron-LM count from 0.19.0 on, and are judged by what they have."""


def require_supported_megatron() -> None:
    """Refuse a megatron-core of another generation.

    Raises:
        UserError: with the version found and the one needed.
    """
    found = Version(host_version())
    if not MEGATRON_MIN <= Version(found.base_version) < MEGATRON_BELOW:
        raise UserError(
            f"megatron-core {found} cannot be used here: pip install '{MEGATRON}', or put a "
            "checkout of such a version in front in PYTHONPATH"
        )


@contextmanager
def imports_of_the_host() -> Iterator[None]:
    """Let a name that is missing in Megatron be an error that says so.

    Raises:
        UserError: with the name, the version, and one that has it.
    """
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("megatron."):
            raise
        raise UserError(
            f"this Megatron ({host_version()}) lacks what megatron_anchor calls: {error}; "
            f"pip install '{MEGATRON}'"
        ) from error


def host_version() -> str:
    """Version of the megatron-core that this process uses, a wheel or a checkout."""
    # A checkout's commit behind a "+" is left out; of a wheel it would be the commit of whatever
    # repository its environment lies in.
    return Version(importlib.import_module("megatron.core.package_info").__version__).public


class HostFlag(NamedTuple):
    """One argument of Megatron's parser."""

    names: tuple[str, ...]
    """As typed, for instance ``("--no-rope-fusion",)``."""
    default: Any
    group: str
    """Megatron's heading for it in --help."""


@functools.cache
def host_flags() -> dict[str, HostFlag]:
    """Read all arguments of the installed Megatron's parser, by their name in the namespace."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    flags: dict[str, HostFlag] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            known = flags.get(action.dest)
            names = (*(known.names if known else ()), *action.option_strings)
            default = known.default if known else action.default
            flags[action.dest] = HostFlag(names, default, group.title or "")
    return flags


def have_cuda() -> bool:
    """Say whether there is a CUDA device, or something in its place (megatron_anchor.on_cpu)."""
    import torch

    return torch.cuda.is_available()


def have_transformer_engine() -> bool:
    """Say whether Transformer Engine is installed, without importing it (8 s)."""
    return importlib.util.find_spec("transformer_engine") is not None


def is_installed(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def have_fused_weight_gradient() -> bool:
    """Say whether Apex's or Transformer Engine's fused weight-gradient kernels can be used."""
    return (
        have_transformer_engine()
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


@functools.cache
def argument_defaults() -> dict[str, Any]:
    """Give the defaults of Megatron's flags, and of fields of its model config without a flag."""
    quiet_imports_without_gpu()
    from dataclasses import MISSING, fields

    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser())
    of_config = {
        field.name: field.default
        for field in fields(TransformerConfig)
        if field.default is not MISSING
    }
    return of_config | vars(parser.parse_args([]))


def gpt_model_config(args: Namespace) -> Any:
    """Turn a complete namespace into Megatron's model config, by Megatron's own translation."""
    from megatron.training.argument_utils import gpt_config_from_args

    return gpt_config_from_args(args)


def build_gpt_model(config: Any, *, vp_stage: int | None = None) -> Any:
    """Build this rank's part of a model as Megatron's training does, in the initialized groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(config).build_model(groups, vp_stage=vp_stage)


_WITHOUT_TRANSFORMER_ENGINE = ("qk_clip", "log_max_attention_logit")
"""Flags that Megatron validates by Transformer Engine's version, and this package serves itself."""


def parse_and_validate_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser],
    *,
    check: Callable[[Namespace], None],
    restore: Callable[[Namespace, ArgumentParser], None] | None = None,
    compare: Callable[[Namespace, ArgumentParser], None] | None = None,
) -> Namespace:
    """Parse as Megatron does, with our own checks before its validation and after it.

    Megatron's assertions name neither the value nor the remedy, so ours come first, after
    --use-checkpoint-args replaced values; and again afterwards, since validation fills in defaults.

    Args:
        extra_args_provider: adds flags to the parser.
        check: raises ValueError for arguments that cannot run.
        restore: follows --use-checkpoint-args; None: Megatron does, by its own list.
        compare: raises ValueError for a checkpoint that does not belong to the validated arguments;
            None: nothing is compared.

    Returns:
        Megatron's validated namespace, which is then also its global one.

    Raises:
        ValueError: the check's, or what Megatron has against the arguments.
    """
    from megatron.training import arguments as host

    parsers: list[ArgumentParser] = []
    restored: list[bool] = []

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(extra_args_provider(parser))
        return parsers[-1]

    def restoring(parse_args: Callable[..., Namespace]) -> Callable[..., Namespace]:
        def parse_and_restore(_: Any, *rest: Any) -> Namespace:
            args = parse_args(keep, *rest)
            restored.append(args.use_checkpoint_args)
            if restore is not None:
                restore(args, parsers[-1])
                args.use_checkpoint_args = False  # done
            return args

        return parse_and_restore

    def checking(validate_args: Callable[..., Namespace]) -> Callable[..., Namespace]:
        def check_and_validate(args: Namespace, *defaults: Any) -> Namespace:
            check(args)
            wanted = {name: getattr(args, name) for name in _WITHOUT_TRANSFORMER_ENGINE}
            vars(args).update(dict.fromkeys(wanted, False))
            validated = validate_args(args, *defaults)
            vars(validated).update(wanted)
            return validated

        return check_and_validate

    parsing = Patch(
        target="megatron.training.arguments:parse_args",
        replacement=restoring,
        reason="--use-checkpoint-args restores all of a model, and our flags are kept",
        parameters=("extra_args_provider",),
        host=MEGATRON,
    )
    validating = Patch(
        target="megatron.training.arguments:validate_args",
        replacement=checking,
        reason="our reasons come before Megatron's bare assertions",
        parameters=("args",),
        host=MEGATRON,
    )
    with applied(parsing, validating), refusals_of_the_host():
        args = host.parse_and_validate_args(extra_args_provider)
    args.use_checkpoint_args = restored[-1]
    check(args)
    if compare is not None:
        compare(args, parsers[-1])
    return args


@contextmanager
def refusals_of_the_host() -> Iterator[None]:
    """Let what Megatron has against arguments be a ValueError that says so.

    Its assertions often have no words: the condition and its place stand for them.
    """
    try:
        yield
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        *_, place = traceback.walk_tb(error.__traceback__)
        if place[0].f_globals.get("__name__", "").startswith("megatron_anchor."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"
        words = str(error).strip() or f"{frame.line} ({where})"
        raise ValueError(f"Megatron refuses these arguments: {words}") from error


def is_validated(args: Namespace) -> bool:
    """Say whether Megatron's validation has filled this namespace in, and changed its values."""
    return hasattr(args, "params_dtype")


def was_typed(flag: str) -> bool:
    """Say whether a flag stands on this process' command line, which is what Megatron parses.

    A namespace does not tell a flag with the value of its default from none.
    """
    return any(word == flag or word.startswith(f"{flag}=") for word in sys.argv[1:])


def restore_host_arguments(args: Namespace, *, flag: str) -> None:
    """Let Megatron restore its own list of arguments from a checkpoint (--use-checkpoint-args).

    Args:
        args: parsed, not validated; changed in place.
        flag: the argument that names the checkpoint, ``load`` or ``pretrained_checkpoint``.
    """
    from megatron.training.checkpointing import load_args_from_checkpoint

    load_args_from_checkpoint(args, load_arg=flag)


def mend_help_texts(parser: ArgumentParser) -> None:
    """Escape the stray percent signs in Megatron 0.19.2's help texts, which make --help crash."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


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
