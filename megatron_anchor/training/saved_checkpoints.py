"""Checkpoints on the disk: which are whole, and what to do when one could not be saved."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_anchor.compat import TRACKER
from megatron_anchor.shell_words import quoted
from megatron_anchor.whole_files import atomic_write_text

_LITTLE = 1 << 30
"""Bytes free of a disk that may have been full a moment before: unfinished files go."""
_FOLDER = re.compile(r"iter_(\d{7,})")


def tracked_iteration(folder: str | Path) -> str | None:
    """What the tracker of a checkpoint folder says, None where there is none."""
    try:
        return Path(folder, TRACKER).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def whole_checkpoints(folder: str | Path) -> list[int]:
    """Iterations with a finished checkpoint (`metadata.json` is written last), ascending."""
    finished = Path(folder).glob("iter_*/metadata.json")
    named = (_FOLDER.fullmatch(path.parent.name) for path in finished)
    return sorted(int(match[1]) for match in named if match)


def refusals(args: Namespace) -> Iterator[str]:
    """Say why --load or --pretrained-checkpoint cannot be followed.

    Megatron ends with status 0 there, with a traceback, or trains from random weights.
    """
    pretrained = getattr(args, "pretrained_checkpoint", None)
    step = getattr(args, "ckpt_step", None)
    if pretrained and (not args.load or tracked_iteration(args.load) is None):
        yield from _not_to_be_loaded("--pretrained-checkpoint", pretrained, step)
    elif args.load:
        yield from _not_to_be_loaded("--load", args.load, step)


def _not_to_be_loaded(flag: str, folder: str, step: int | None) -> Iterator[str]:
    if Path(folder, "metadata.json").is_file():
        above, name = os.path.split(os.path.normpath(folder))
        number = _FOLDER.fullmatch(name)
        remedy = f"{flag} {quoted(above or '.')}" + (
            f" --ckpt-step {int(number[1])}" if number else ""
        )
        yield f"{flag} {folder} is the folder of one iteration: give {remedy}"
        return
    tracked = tracked_iteration(folder)
    if tracked == "release" or (tracked is None and not step):
        return
    tracker = Path(folder, TRACKER)
    whole = ", ".join(map(str, whole_checkpoints(folder))) or "none"
    remedy = f"write the iteration of a whole checkpoint into it (whole are: {whole})"
    if tracked is not None and not tracked.isdecimal():
        yield (
            f"{flag} {folder}: {tracker} holds {tracked!r}, expected the number of an iteration "
            f"(was a job killed while it was written?): {remedy}, or remove it to begin anew"
        )
    elif step and not Path(folder, f"iter_{step:07d}").is_dir():
        yield f"--ckpt-step {step}: {folder} has no such iteration (whole are: {whole})"
    elif not step and not Path(folder, f"iter_{int(tracked or 0):07d}").is_dir():
        yield (
            f"{flag} {folder}: {tracker} names iteration {tracked}, which has no folder there: "
            f"{remedy}"
        )


def explaining_failures(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `save_checkpoint` of Megatron's loop: a failure says what is left, and what to do.

    The errors of its writers do not say that a disk is full. Without --save nothing is saved:
    Megatron's rerun machine asks for a checkpoint all the same before it ends with its status.
    """
    from megatron.training import training as host
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        folder = host.get_args().save
        if folder is None:
            host.print_rank_0(f"without --save, iteration {iteration} is not saved")
            return None
        try:
            return original(iteration, *args, **kwargs)
        except (Exception, CheckpointException) as error:
            raise RuntimeError(failed_save(folder, iteration, error)) from error

    return save_checkpoint


def failed_save(folder: str, iteration: int, error: BaseException) -> str:
    """Words for a checkpoint that could not be saved."""
    reason = str(error).strip().splitlines()[-1:] or [""]
    usage = shutil.disk_usage(_nearest(Path(folder)))
    tracked = tracked_iteration(folder)
    remedy = "make room" if _may_be_full(error, usage.free) else "remove the cause"
    whole, again = "release" if tracked == "release" else f"of iteration {tracked}", quoted(folder)
    kept = (
        f"The checkpoint {whole} is whole: {remedy} and start the same command "
        f"again with --load {again}."
        if tracked
        else f"No checkpoint was saved there before: {remedy}, or choose another --save {again}."
    )
    unfinished = Path(folder, f"iter_{iteration:07d}")
    return (
        f"the checkpoint of iteration {iteration} could not be saved to {folder} "
        f"({type(error).__name__}: {reason[0]}). The disk has {usage.free / 1e6:.1f} MB left of "
        f"{usage.total / 1e6:.1f} MB. {kept}"
        + (f" {unfinished} is unfinished and may be removed." if unfinished.exists() else "")
    )


def _may_be_full(error: BaseException, free: int) -> bool:
    """Writers wrap what went wrong in errors of their own: then the disk itself is asked."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno in (errno.ENOSPC, errno.EDQUOT)
        seen = seen.__cause__ or seen.__context__
    words = ("No space left", "Disk quota exceeded", "unexpected pos", "file write failed")
    return free < _LITTLE or any(word in str(error) for word in words)


def _nearest(folder: Path) -> Path:
    """The folder, or the innermost one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


class WholeTrackers:
    """Megatron's access to files, but for writing trackers in a local folder.

    Megatron truncates the tracker and then writes, and ends with status 0 where it finds it empty.
    """

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as Megatron does; a tracker that is written replaces the old one at once."""
        folder, name = os.path.split(str(path))
        if mode == "w" and name == TRACKER and os.path.isdir(folder):
            return atomic_write_text(path)
        return self._host.open(path, mode, *args, **kwargs)
