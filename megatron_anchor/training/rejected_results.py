"""Results that Megatron's rerun machine rejects: reported before it acts on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import RerunMode, RerunState

from megatron_anchor.training import bad_batch


def reporting(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `RerunStateMachine.validate_result`: `bad_batch.report` is called first.

    In its default mode the machine lets the first iteration of a run pass unseen, for it could
    take no checkpoint there: NaN would go into the weights, and from there into the checkpoint that
    it takes in the second one. Here a fatal result ends the first iteration too.
    """

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
                bad_batch.report(message, fatal=fatal, raises=raises)
            return rejected

        if unseen and fatal and judge(result):
            raise RuntimeError(f"{message} in the first iteration of this run: result {result}")
        original(self, result, judge, message, comparison_func, tolerance, fatal)

    return validate_result
