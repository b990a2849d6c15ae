"""Rows for `torch.distributed`: gloo in place of NCCL.

Gloo carries all collectives that Megatron uses (torch 2.13: reduce-scatter, all-gather into one
tensor, even and uneven all-to-all, coalesced ones, every dtype), except an all-gather of pieces of
unequal size.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_anchor.patches import Patch


def over_gloo(
    original: Callable[..., Any], *, unnamed_backend: str | None = None
) -> Callable[..., Any]:
    """Wrap `init_process_group` or `new_group`: over gloo, bound to no device.

    Backends other than NCCL stay; `unnamed_backend` serves where the caller names none.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        backend = given.get("backend") or unnamed_backend
        given["backend"] = "gloo" if backend and "nccl" in backend else backend
        given.pop("device_id", None)
        given.pop("pg_options", None)
        return original(**given)

    return on_cpu


class _PaddedGather:
    """Handle of an uneven all-gather: the pieces are cut out when it is waited for."""

    def __init__(self, work: Any, padded: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
        self.work = work
        self.padded = padded
        self.pieces = pieces

    def wait(self, *args: Any) -> bool:
        """Wait for the collective and fill the caller's tensors."""
        if self.work is not None:
            self.work.wait(*args)
        for piece, padded in zip(self.pieces, self.padded, strict=True):
            piece.copy_(padded[: piece.numel()].view(piece.shape))
        return True


def uneven_too(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `all_gather`: pieces of unequal size travel padded to the largest."""

    @functools.wraps(original)
    def on_cpu(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        sizes = {piece.numel() for piece in tensor_list}
        if len(sizes) <= 1:
            return original(tensor_list, tensor, group, async_op)
        padded = [tensor.new_empty(max(sizes)) for _ in tensor_list]
        mine = tensor.new_zeros(max(sizes))
        mine[: tensor.numel()] = tensor.detach().flatten()
        gather = _PaddedGather(original(padded, mine, group, async_op), padded, tensor_list)
        if async_op:
            return gather
        gather.wait()
        return None

    return on_cpu


_GLOO = "NCCL needs GPUs: gloo takes its place, without a device or NCCL's options"

ROWS = (
    Patch(
        target="torch.distributed.distributed_c10d:init_process_group",
        replacement=functools.partial(over_gloo, unnamed_backend="gloo"),
        reason=_GLOO,
    ),
    Patch(
        target="torch.distributed.distributed_c10d:new_group",
        replacement=over_gloo,
        reason=_GLOO,
    ),
    Patch(
        target="torch.distributed.distributed_c10d:all_gather",
        replacement=uneven_too,
        reason="gloo gathers only pieces of one size (checkpoint exchange, uneven experts)",
    ),
)
