"""Rows for Megatron's distributed optimizer when it wraps torch's own Adam.

Apex and Transformer Engine count steps once per parameter group, torch once per parameter, in a
tensor called `step`. Megatron-Core 0.19 handles the latter only in part: its `state_dict` finds no
step before the first update, its loader hands one and the same tensor to every parameter (each
update then counts it once per parameter), and its copy of loaded state looks for a saved `step`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_anchor.patches import MEGATRON, Patch

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _make_state(adam: torch.optim.Optimizer) -> None:
    """Create the state that Adam would create in its first step."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def with_state_before_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `state_dict`: there is a step to report before the first update too."""

    @functools.wraps(original)
    def on_cpu(self: Any) -> Any:
        if _is_torch_adam(self.optimizer):
            _make_state(self.optimizer)
        return original(self)

    return on_cpu


def with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load_state_dict`: every parameter counts its steps in a tensor of its own."""

    @functools.wraps(original)
    def on_cpu(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if _is_torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return on_cpu


def without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the copy of one parameter's loaded state: the step is loaded with its group."""

    @functools.wraps(original)
    def on_cpu(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        if _is_torch_adam(self.optimizer):
            tensors = {**tensors, "step": None}
        with torch.no_grad():  # float32 models keep no copy: the target is the parameter itself
            original(self, model_param, tensors)

    return on_cpu


ROWS = (
    Patch(
        target=f"{_OPTIMIZER}.state_dict",
        replacement=with_state_before_first_step,
        reason="torch's Adam has no step to save or to load into before its first update",
        host=MEGATRON,
    ),
    Patch(
        target=f"{_OPTIMIZER}.load_state_dict",
        replacement=with_own_steps,
        reason="Megatron makes torch's Adam share one step between parameters: it counts too fast",
        host=MEGATRON,
    ),
    Patch(
        target=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        replacement=without_step,
        reason="torch's Adam keeps its step per parameter, checkpoints keep it per group",
        host=MEGATRON,
    ),
)
