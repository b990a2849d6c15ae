"""Rows for tensors: wherever a program names a CUDA device, the CPU is meant."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_anchor.on_cpu.table import Row, instead

CPU = torch.device("cpu")

FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
CUDA_TYPES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor",
    torch.int8: "CharTensor",
    torch.int16: "ShortTensor",
    torch.int32: "IntTensor",
    torch.int64: "LongTensor",
    torch.bool: "BoolTensor",
}


def meant(device: Any) -> Any:
    """Return the device that a program gets: the CPU for every CUDA device.

    >>> meant("cuda:3"), meant(0), meant("cpu"), meant(None)
    (device(type='cpu'), device(type='cpu'), 'cpu', None)
    """
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    return CPU if isinstance(device, int) else device


def device_keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes `device=` (and perhaps `pin_memory=`)."""

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = meant(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_cpu


def moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to`: a copy for "cpu", as leaving a GPU makes one; nothing for a CUDA device.

    Only the word "cpu" counts as leaving: `other.device` is what stands in for a CUDA device.
    """

    @functools.wraps(original)
    def on_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = args[0] if args else kwargs.get("device")
        if not isinstance(device, str | int | torch.device):
            return original(self, *args, **kwargs)
        if args:
            args = (meant(device), *args[1:])
        else:
            kwargs["device"] = meant(device)
        moved = original(self, *args, **kwargs)
        return moved.clone() if device == "cpu" and moved is self else moved

    return on_cpu


def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.cpu`: a copy, as leaving a GPU makes one."""

    @functools.wraps(original)
    def on_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = original(self, *args, **kwargs)
        return moved.clone() if moved is self else moved

    return on_cpu


def moving_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module.to`: nothing for a CUDA device."""

    @functools.wraps(original)
    def on_cpu(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if args:
            args = (meant(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = meant(kwargs["device"])
        return original(self, *args, **kwargs)

    return on_cpu


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_cpu(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{CUDA_TYPES[self.dtype]}"
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
        if isinstance(dtype, str) or "cuda" in str(dtype):
            dtype = "torch." + name.rpartition(".")[2]
        return original(self, dtype, *args, **kwargs)

    return on_cpu


def _map_location(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        location = CPU if map_location is None else meant(map_location)
        return original(f, location, *args, **kwargs)

    return on_cpu


ROWS = (
    *(
        Row(
            target=f"torch:{name}",
            replacement=device_keyword,
            reason="makes tensors on the CPU when device= names a CUDA device; no pinned memory",
        )
        for name in FACTORIES
    ),
    *(
        Row(
            target=f"torch:Tensor.{name}",
            replacement=device_keyword,
            reason="makes tensors on the CPU when device= names a CUDA device; no pinned memory",
        )
        for name in NEW_METHODS
    ),
    Row(
        target="torch:Tensor.to",
        replacement=moving,
        reason="moving to a CUDA device leaves the tensor on the CPU; to('cpu') makes a copy",
    ),
    Row(
        target="torch:Tensor.cpu",
        replacement=leaving,
        reason="leaving a GPU makes a copy: checkpoints are written from it while training goes on",
    ),
    Row(
        target="torch:Tensor.cuda",
        replacement=instead(_stay),
        reason="moving to a CUDA device leaves the tensor on the CPU",
    ),
    Row(
        target="torch.nn:Module.to",
        replacement=moving_module,
        reason="moving to a CUDA device leaves the module on the CPU",
    ),
    Row(
        target="torch.nn:Module.cuda",
        replacement=instead(_stay),
        reason="moving to a CUDA device leaves the module on the CPU",
    ),
    Row(
        target="torch:Tensor.pin_memory",
        replacement=instead(_stay),
        reason="pinned memory needs a driver",
    ),
    Row(
        target="torch:Tensor.is_cuda",
        replacement=instead(property(lambda self: self.device.type == "cpu")),
        reason="Megatron moves token counts to the host only from tensors that say they are CUDA",
    ),
    Row(
        target="torch:Tensor.type",
        replacement=_type,
        reason="Megatron's optimizers accept only parameters typed torch.cuda.*Tensor",
    ),
    Row(
        target="torch:Tensor.record_stream",
        replacement=instead(lambda self, stream: None),
        reason="there are no streams: work is done when the call returns",
    ),
    Row(
        target="torch:load",
        replacement=_map_location,
        reason="loads tensors that were saved on a GPU",
    ),
)
