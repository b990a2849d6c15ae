"""Pictures of a measurement (needs matplotlib, the `plot` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.errors import UserError
from megatron_anchor.precision.arms import ARMS
from megatron_anchor.precision.run import Results

COLORS = dict(zip(ARMS, ("C0", "C9", "C4", "C3", "C2", "C1", "C7"), strict=True))
WIDTHS = dict(zip(ARMS, (1.5, 3.5, 1.2, 3.5, 1.5, 1.2, 1.5), strict=True))
"""Arms that often coincide with a later one are wide, so that both are seen."""
FLOOR = 1e-12
"""What is 0 lies below every axis; logarithms need a number."""


def require_matplotlib() -> None:
    """Raise a UserError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--out draws pictures, which need `pip install matplotlib`") from error


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_drift(path: Path, results: Results) -> None:
    """Write the paper's three panels: D by shift, D by token, D_logit by length.

    Args:
        path: of the PNG.
        results: what was measured; solid lines are the first kind of states, dashed the second.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = _figure(15, 5.4)
    by_shift, by_token, by_length = figure.subplots(1, 3)
    asked = results.settings
    figure.suptitle(f"{results.model}: {results.shape}; {asked.num_texts} text(s)", fontsize=10)
    order = np.argsort(asked.shifts)
    shifts = np.array(asked.shifts)[order]
    apart = shifts != asked.shift2
    for name in asked.arms:
        for states, line in zip(asked.states, ("-", "--"), strict=False):
            total = results.drift(name, states).totals[order]
            label = ARMS[name].says if line == "-" else None
            by_shift.plot(
                shifts[apart], total[apart], line, label=label, marker=".", **_style(name)
            )
        by_length.plot(*zip(*results.first_logit(name), strict=True), "-", **_style(name))
        far = results.far[name]
        by_length.plot(far.lengths, far.first_logit_O, ":", marker=".", **_style(name))
    by_shift.set(
        yscale="log",
        xlabel="shift1 (positions)",
        ylabel=f"D(shift1, {asked.shift2}), {asked.length} tokens",
        title=" / ".join(_lines(asked.states)),
    )
    by_length.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="D_logit of the first token",
        title=f"solid: texts ({asked.states[0]}); dotted: real q and k put far away",
    )
    for name in (n for n in asked.arms if n in ("bf16", "random-bf16", "float32")):
        values = results.drift(name, asked.states[0]).by_key_CS[0]
        keys = np.arange(1, len(values) + 1)
        by_token.plot(keys, np.maximum(values, FLOOR), color=COLORS[name], lw=0.6)
        by_token.plot([1], np.maximum(values[:1], FLOOR), "o", color=COLORS[name])
    by_token.set(
        xscale="log",
        yscale="log",
        xlabel="token (1: the first)",
        ylabel=f"its part of D({asked.pair[0]}, {asked.pair[1]})",
        title=f"by token ({asked.states[0]}); dots: the first token",
    )
    for axes in (by_shift, by_token, by_length):
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=100, format="png")


def _style(arm: str) -> dict[str, Any]:
    return {"color": COLORS[arm], "linewidth": WIDTHS[arm]}


def _lines(states: tuple[str, ...]) -> list[str]:
    return [
        f"{line}: states {name}" for name, line in zip(states, ("solid", "dashed"), strict=False)
    ]


def draw_frequencies(path: Path, results: Results) -> None:
    """Write errors by RoPE frequency: near and far lines, and the first arm by distance."""
    arms = [name for name in results.settings.arms if results.far[name].first_key_OF.any()]
    figure = _figure(15, 5)
    near, first, by_distance = figure.subplots(1, 3)
    for name in arms:
        far = results.far[name]
        axis = far.wavelengths_F
        near.plot(axis, far.other_keys_F, label=ARMS[name].says, marker=".", **_style(name))
        first.plot(axis, far.first_key_OF[-1], marker=".", **_style(name))
    far = results.far[arms[0]]
    near.set_title("other keys of the texts", fontsize=9)
    first.set_title(f"the first key, {far.lengths[-1] // 2} to {far.lengths[-1]} away", fontsize=9)
    for axes in (near, first):
        axes.set(xscale="log", yscale="log", xlabel="positions of a full turn")
        axes.set_ylabel("mean |difference| of the frequency's term in a logit")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    image = by_distance.imshow(far.first_key_OF, aspect="auto", origin="lower", cmap="viridis")
    by_distance.set_yticks(range(len(far.lengths)), [f"to {n}" for n in far.lengths])
    by_distance.set(xlabel="frequency (0: the fastest)", ylabel="distance of the row")
    by_distance.set_title(f"the first key by distance: {ARMS[arms[0]].says}", fontsize=9)
    figure.colorbar(image, ax=by_distance, shrink=0.8)
    pair = "shifts {} and {}".format(*results.settings.pair)
    figure.suptitle(f"{results.model}: which rotation carries the error ({pair})", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=100, format="png")


def draw_heads(path: Path, results: Results) -> None:
    """Write D by layer and head, and the first token's share of it, for the first arm."""
    asked = results.settings
    name = asked.arms[0]
    figure = _figure(6 * len(asked.states), 6)
    panels = np.atleast_1d(figure.subplots(1, len(asked.states)))
    for axes, states in zip(panels, asked.states, strict=True):
        drift = results.drift(name, states)
        image = axes.imshow(drift.by_head_CLH[0], aspect="auto", origin="lower", cmap="viridis")
        whole = max(drift.by_head_CLH[0].sum(), FLOOR)
        share = drift.first_key_CLH[0].sum() / whole
        axes.set(xlabel="head", ylabel="layer")
        axes.set_title(f"states {states}; the first token's share is {share:.1%}", fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.8)
    pair = "D({}, {})".format(*asked.pair)
    figure.suptitle(f"{results.model}: {pair} by layer and head, {ARMS[name].says}", fontsize=10)
    figure.savefig(path, dpi=100, format="png")
