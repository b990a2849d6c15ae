"""Everything that knows a host version: megatron-core 0.19 and what comes with it."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

from packaging.version import Version

from megatron_anchor.whole_files import replacing_text

TRACKER = "latest_checkpointed_iteration.txt"

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


def host_version() -> str:
    """Version of the installed megatron-core."""
    return version("megatron-core")


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


def add_argument_group(parser: ArgumentParser, config: type, *, title: str) -> None:
    """Turn a dataclass' fields and their docstrings into flags, by Megatron's own factory."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(config).build_group(parser, title=title)


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

    parse_args, validate_args = host.parse_args, host.validate_args
    parsers: list[ArgumentParser] = []
    restored: list[bool] = []

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(extra_args_provider(parser))
        return parsers[-1]

    def parse_and_restore(_: Any, *rest: Any) -> Namespace:
        args = parse_args(keep, *rest)
        restored.append(args.use_checkpoint_args)
        if restore is not None:
            restore(args, parsers[-1])
            args.use_checkpoint_args = False  # done
        return args

    def check_and_validate(args: Namespace, *defaults: Any) -> Namespace:
        check(args)
        return validate_args(args, *defaults)

    host.parse_args, host.validate_args = parse_and_restore, check_and_validate
    try:
        with refusals_of_the_host():
            args = host.parse_and_validate_args(extra_args_provider)
    finally:
        host.parse_args, host.validate_args = parse_args, validate_args
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


def save_also(is_due: Callable[[Namespace, int], bool]) -> None:
    """Let Megatron's training loop save at further iterations, for which it has no hook.

    After every step ``megatron.training.training.train`` calls ``checkpoint_and_decide_exit``,
    which saves by --save-interval and wherever the run ends. Where a save is due we call the host's
    own ``save_checkpoint_and_time`` first, and then the function without --save, so that nothing is
    saved twice. Calling this again replaces the earlier condition.

    Args:
        is_due: tells by Megatron's arguments and the iteration just done whether to save; asked on
            every rank after every step, and True on all of them or none.
    """
    from megatron.training import get_args
    from megatron.training import training as host

    decide = getattr(
        host.checkpoint_and_decide_exit, "__wrapped__", host.checkpoint_and_decide_exit
    )

    @functools.wraps(decide)
    def save_and_decide(
        model, optimizer, scheduler, iteration, operations, context, train_data_iterator
    ):
        args = get_args()
        state = (model, optimizer, scheduler)
        rest = (operations, context, train_data_iterator)
        if not is_due(args, iteration):
            return decide(*state, iteration, *rest)
        host.save_checkpoint_and_time(
            iteration, *state, operations, context, train_data_iterator=train_data_iterator
        )
        folder, args.save = args.save, None
        try:
            return decide(*state, iteration, *rest)
        finally:
            args.save = folder

    host.checkpoint_and_decide_exit = save_and_decide


def skip_batches_of_any_kind() -> None:
    """Let the iterations of --iterations-to-skip read our batches.

    Megatron's ``dummy_train_step`` broadcasts and cuts the fields of its own batches, and breaks
    where tensor or context parallelism needs that. Nothing of a skipped batch is used: here the
    ranks that have the data read it, and the others nothing.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import training as host

    def dummy_train_step(data_iterator: Any) -> None:
        machine = get_rerun_state_machine()
        # Interleaved pipelines have an iterator for each chunk of the model.
        chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while machine.should_run_forward_backward(data_iterator):
            for _ in range(get_num_microbatches()):
                for iterator in chunks:
                    if iterator is not None:
                        next(iterator)

    host.dummy_train_step = dummy_train_step


def replace_multi_token_loss(
    attach_loss: Callable[..., Any], *, for_packed: Callable[[Any], bool]
) -> None:
    """Let another function attach the loss of multi-token prediction to a model's last states.

    Args:
        attach_loss: takes ``hidden_states``, ``labels``, ``packed`` and what else Megatron gives.
        for_packed: whether it is for a micro-batch with these ``packed_seq_params``; else
            Megatron's own is called.
    """
    from megatron.core.models.gpt import gpt_model as host

    original = getattr(host.process_mtp_loss, "original", host.process_mtp_loss)

    @functools.wraps(original)
    def process_mtp_loss(
        hidden_states: Any,
        labels: Any,
        *,
        loss_mask: Any = None,
        packed_seq_params: Any = None,
        input_ids: Any = None,
        **others: Any,
    ) -> Any:
        if for_packed(packed_seq_params):
            return attach_loss(hidden_states, labels, packed=packed_seq_params, **others)
        return original(
            hidden_states,
            labels,
            loss_mask=loss_mask,
            packed_seq_params=packed_seq_params,
            input_ids=input_ids,
            **others,
        )

    process_mtp_loss.original = original  # type: ignore[attr-defined]
    host.process_mtp_loss = process_mtp_loss


def let_specs_bring_multi_token_layers() -> None:
    """Take the layers of multi-token prediction from a block spec that has some (``spec.mtp``).

    Megatron's builder of models makes stock layers for it, whatever the other layers are.
    """
    from megatron.training.models import gpt as host

    original = getattr(host.mtp_block_spec, "original", host.mtp_block_spec)

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: Any = None) -> Any:
        if hasattr(transformer_layer_spec, "mtp"):
            return transformer_layer_spec.mtp
        return original(config, transformer_layer_spec, vp_stage=vp_stage)

    mtp_block_spec.original = original  # type: ignore[attr-defined]
    host.mtp_block_spec = mtp_block_spec


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


class OnRejected(Protocol):
    """Called with the check's message; `raises` where the process ends right after the call."""

    def __call__(self, message: str, *, fatal: bool, raises: bool) -> None:
        """Take note."""


def watch_rejected_results(on_rejected: OnRejected) -> None:
    """Have every result that Megatron's rerun machine rejects reported before it acts on it.

    In its default mode the machine lets the first iteration of a run pass unseen, for it could
    take no checkpoint there: NaN would go into the weights, and from there into the checkpoint that
    it takes in the second one. Here a fatal result ends the first iteration too.
    """
    from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

    original = getattr(RerunStateMachine.validate_result, "original", None)
    original = original or RerunStateMachine.validate_result

    @functools.wraps(original)
    def validate_result(
        self: Any,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        unseen = (
            self.mode is RerunMode.VALIDATE_RESULTS
            and self.state is RerunState.INITIAL_RUN
            and not self.first_iteration_complete
        )
        raises = fatal and (unseen or self.mode is RerunMode.DISABLED)

        def judge(value: Any) -> bool:
            rejected = bool(rejection_func(value))
            if rejected:
                on_rejected(message, fatal=fatal, raises=raises)
            return rejected

        if unseen and fatal and judge(result):
            raise RuntimeError(f"{message} in the first iteration of this run: result {result}")
        original(self, result, judge, message, comparison_func, tolerance, fatal)

    validate_result.original = original  # type: ignore[attr-defined]
    RerunStateMachine.validate_result = validate_result


def write_trackers_whole() -> None:
    """Keep latest_checkpointed_iteration.txt whole, whenever the job is killed or the disk full.

    Megatron truncates it and then writes, and ends with status 0 where it finds it empty.
    """
    from megatron.training import checkpointing as host

    if not isinstance(host.maybe_msc, _WholeTrackers):
        host.maybe_msc = _WholeTrackers(host.maybe_msc)


class _WholeTrackers:
    """Megatron's access to files, but for writing trackers in a local folder."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        folder, name = os.path.split(str(path))
        if mode == "w" and name == TRACKER and os.path.isdir(folder):
            return replacing_text(path)
        return self._host.open(path, mode, *args, **kwargs)


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
