"""The checkpoint that a start will load, and what it says about the run that wrote it.

Megatron's own choice is followed: --load where it holds a checkpoint, else --pretrained-checkpoint.
Nothing in a checkpoint is executed by reading it here.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint.archives import load_fake
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from megatron_anchor.compat import TRACKER
from megatron_anchor.errors import UserError
from megatron_anchor.training.saved_checkpoints import tracked_iteration

NON_PERSISTENT = "non_persistent"
"""Megatron's name for the folder of --non-persistent-ckpt-type global."""

RELEASE = "release"


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A checkpoint, of which only what is no tensor is read."""

    folder: Path
    flag: str
    """Which of Megatron's arguments names it: ``load`` or ``pretrained_checkpoint``."""
    weights_only: bool
    """The weights begin a new run: --finetune, --pretrained-checkpoint, or a converted model."""

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """What Megatron stored besides tensors: arguments, schedule, kind of optimizer states.

        Raises:
            UserError: if it is damaged, or would execute something.
        """
        if is_torch_format(self.folder):
            path = sorted(self.folder.glob("mp_rank_*/model_optim_rng.pt"))[0]
            state = load_fake(str(path), place=str(path))
            if not isinstance(state, Mapping):
                raise UserError(f"{path} holds a {type(state).__name__}, expected a dict")
            return state
        with Files() as files:
            return TorchDistCheckpoint(self.folder, files).common_state()

    @property
    def args(self) -> Namespace | None:
        """The arguments of the run that wrote it, None where it does not record them."""
        found = self.state.get("args")
        return found if isinstance(found, Namespace) else None


def is_torch_format(folder: Path) -> bool:
    """Whether a checkpoint is one of --ckpt-format torch: a file for each model-parallel rank."""
    return any(folder.glob("mp_rank_*/model_optim_rng.pt"))


def stored_run(args: Namespace) -> StoredRun | None:
    """Find the checkpoint that Megatron will load.

    Args:
        args: Megatron's namespace, which passed `saved_checkpoints.refusals`.

    Returns:
        None where the run begins with random weights, or cannot be read from here (a local
        non-persistent checkpoint; remote storage).

    Raises:
        UserError: if --pretrained-checkpoint is asked for and holds none.
    """
    load, pretrained = args.load, args.pretrained_checkpoint
    if pretrained and (not load or tracked_iteration(load) is None):
        flag, begins = "pretrained_checkpoint", True
    else:
        flag, begins = "load", args.finetune
    root = getattr(args, flag)
    folder = _folder(args, root) if root else None
    if folder is None:
        if flag == "pretrained_checkpoint" and not _is_elsewhere(args, pretrained):
            raise UserError(
                f"--pretrained-checkpoint {pretrained}: there is no {TRACKER} in it; give the "
                "folder that a run saved to, or that was converted"
            )
        return None
    return StoredRun(folder=folder, flag=flag, weights_only=begins or folder.name == RELEASE)


def _folder(args: Namespace, root: str) -> Path | None:
    if _is_elsewhere(args, root):
        return None
    tracked, fresh = tracked_iteration(root), _non_persistent(args, root)
    if tracked == RELEASE:
        return Path(root, RELEASE)
    iteration = args.ckpt_step or (int(tracked) if tracked is not None else -1)
    if fresh is not None and fresh[0] >= iteration:
        return fresh[1]
    return Path(root, f"iter_{iteration:07d}") if iteration >= 0 else None


def _is_elsewhere(args: Namespace, root: str) -> bool:
    return args.non_persistent_ckpt_type == "local" or bool(re.match(r"\w+://", root))


def _non_persistent(args: Namespace, root: str) -> tuple[int, Path] | None:
    """Iteration and folder of the newest checkpoint of --non-persistent-ckpt-type global."""
    if args.non_persistent_ckpt_type != "global":
        return None
    folder = Path(args.non_persistent_global_ckpt_dir or Path(root, NON_PERSISTENT))
    tracked = tracked_iteration(folder)
    if tracked is None or not tracked.isdecimal():
        return None
    return int(tracked), folder / f"iter_{int(tracked):07d}"
