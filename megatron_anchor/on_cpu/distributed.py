"""Rows for `torch.distributed`: gloo in place of NCCL."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_anchor.on_cpu.table import Row


def over_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_process_group` or `new_group`: same group, over gloo, bound to no device."""

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") != "fake":
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(*args, **kwargs)

    return on_cpu


ROWS = (
    Row(
        target="torch.distributed.distributed_c10d:init_process_group",
        replacement=over_gloo,
        reason="NCCL needs GPUs: gloo takes its place, without a device or NCCL's options",
    ),
    Row(
        target="torch.distributed.distributed_c10d:new_group",
        replacement=over_gloo,
        reason="NCCL needs GPUs: gloo takes its place, without a device or NCCL's options",
    ),
)
