"""Rows for tensors: wherever a program names a CUDA device, the CPU is meant."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from megatron_anchor.patches import Patch, instead

CPU = torch.device("cpu")
_DEVICE_TYPES = (str, int, torch.device)

FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


@functools.cache  # asked for every tensor that is made
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

    scripted = _find_builtin(original)
    if scripted is not None:  # TorchScript knows operators by identity
        _register_builtin(on_cpu, scripted)
    return on_cpu


def moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.to`: a copy for "cpu", as leaving a GPU makes one; nothing for a CUDA device.

    Only the word "cpu" counts as leaving: `other.device` is what stands in for a CUDA device.
    """

    @functools.wraps(original)
    def on_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = args[0] if args else kwargs.get("device")
        if not isinstance(device, _DEVICE_TYPES):
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


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type`: names tensors `torch.cuda.*Tensor`, and takes such names."""

    @functools.wraps(original)
    def on_cpu(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if not isinstance(dtype, torch.dtype):
            name = dtype if isinstance(dtype, str) else dtype.__name__
            dtype = "torch." + name.rpartition(".")[2]
        return original(self, dtype, *args, **kwargs)

    return on_cpu


def onto_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.load`: nothing is loaded onto a CUDA device."""

    @functools.wraps(original)
    def on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        location = CPU if map_location is None else meant(map_location)
        return original(f, location, *args, **kwargs)

    return on_cpu


def cpu_context(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a `with torch.device(...)` context."""
    # The context knows the factories by identity: let it note them before they are replaced.
    _device_constructors()

    @functools.wraps(original)
    def on_cpu(self: Any, device: Any) -> None:
        original(self, meant(device))

    return on_cpu


def cpu_autocast(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of `torch.autocast`: casts on the CPU, to the dtype asked for."""

    @functools.wraps(original)
    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            dtype = dtype or torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        original(self, device_type, dtype, *args, **kwargs)

    return on_cpu


ROWS = (
    Patch(
        target="torch.utils._device:DeviceContext.__init__",
        replacement=cpu_context,
        reason="`with torch.device('cuda')` and set_default_device make tensors on the CPU",
    ),
    *(
        Patch(
            target=f"torch:{name}",
            replacement=device_keyword,
            reason="tensors for a CUDA device are made on the CPU, and memory is never pinned",
        )
        for name in FACTORIES
    ),
    *(
        Patch(
            target=f"torch:Tensor.{name}",
            replacement=device_keyword,
            reason="tensors for a CUDA device are made on the CPU, and memory is never pinned",
        )
        for name in NEW_METHODS
    ),
    Patch(
        target="torch:Tensor.to",
        replacement=moving,
        reason="moving to a CUDA device leaves the tensor on the CPU; to('cpu') makes a copy",
    ),
    Patch(
        target="torch:Tensor.cpu",
        replacement=leaving,
        reason="leaving a GPU makes a copy: checkpoints are written from it while training goes on",
    ),
    Patch(
        target="torch:Tensor.cuda",
        replacement=instead(_stay),
        reason="moving to a CUDA device leaves the tensor on the CPU",
    ),
    Patch(
        target="torch:Tensor.pin_memory",
        replacement=instead(_stay),
        reason="pinned memory needs a driver",
    ),
    Patch(
        target="torch:Tensor.is_cuda",
        replacement=instead(torch.Tensor.is_cpu),
        reason="Megatron moves token counts to the host only from tensors that say they are CUDA",
    ),
    Patch(
        target="torch:Tensor.type",
        replacement=cuda_type,
        reason="Megatron's optimizers accept only parameters typed torch.cuda.*Tensor",
    ),
    Patch(
        target="torch.amp.autocast_mode:autocast.__init__",
        replacement=cpu_autocast,
        reason="autocast for CUDA switches itself off where there is none",
    ),
    Patch(
        target="torch:load",
        replacement=onto_cpu,
        reason="tensors that were saved on a GPU are loaded onto the CPU",
    ),
)
