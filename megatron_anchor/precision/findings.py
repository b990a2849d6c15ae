"""The findings in words, every number computed from the results."""

from __future__ import annotations

import numpy as np

from megatron_anchor.precision.arms import ARMS
from megatron_anchor.precision.measurement import Drift
from megatron_anchor.precision.run import Results
from megatron_anchor.terminal import escaped

TRUTH = "float32"


def findings(results: Results) -> str:
    """Say what was found, one paragraph a question, in Markdown."""
    asked = results.settings
    first = asked.states[0]
    parts = [
        f"Measured: {escaped(results.model)} ({results.shape}); {asked.num_texts} text(s) of "
        f"{asked.length} tokens; shift2 = {asked.shift2}, shift1 = "
        f"{', '.join(map(str, asked.shifts))}.",
        *(_totals(results, states) for states in asked.states),
    ]
    if len(asked.states) == 2:
        parts.append(_own_share(results))
    lead = asked.arms[0]
    parts += [_token(results, lead, first), _layers(results, lead, first)]
    parts += [_lengths(results), _frequencies(results, lead)]
    return "\n\n".join(part for part in parts if part)


def _totals(results: Results, states: str) -> str:
    """D of every arm, against float32 and against the first arm."""
    rows = ["| arm | D | a weight moves by | times float32's D |", "|---|---|---|---|"]
    truth = results.drift(TRUTH, states) if TRUTH in results.settings.arms else None
    for name in results.settings.arms:
        drift = results.drift(name, states)
        total = _at_shifts(drift)
        weight = total / drift.logits / results.settings.length
        times = _range(total / _at_shifts(truth)) if truth is not None else "-"
        rows.append(
            f"| {name} ({ARMS[name].says}) | {_range(total)} | {_range(weight)} | {times} |"
        )
    return (
        f"**D, states {states}**, least and most over the shifts ({_pair(results)} among them); "
        "the weight's mean is D / (layers x heads x keys):\n\n" + "\n".join(rows)
    )


def _own_share(results: Results) -> str:
    shares = [
        f"{name} {results.drift(name, 'shared').totals[0] / total:.0%}"
        for name in results.settings.arms
        if (total := results.drift(name, "end-to-end").totals[0])
    ]
    return (
        "**Drift of states.** Of D end-to-end, this share arises inside each layer's own attention "
        f"(states shared, {_pair(results)}): {', '.join(shares)}. The rest is rounding carried "
        "from layer to layer by hidden states that differ already."
    )


def _token(results: Results, arm: str, states: str) -> str:
    drift = results.drift(arm, states)
    by_key = drift.by_key_CS[0]
    if not by_key.sum():
        return ""
    share = by_key / by_key.sum()
    top = np.argsort(-share)[:3]
    last = share[-max(1, len(share) // 10) :].sum()
    leading = ", ".join(f"token {key} with {share[key]:.1%}" for key in top)
    return (
        f"**By token** ({arm}, {states}, {_pair(results)}). The most comes from {leading}. The "
        f"first token carries {share[0]:.1%} of D, {share[0] * len(share):.0f} times an average "
        f"key's share; it holds {drift.first_weight_LH.mean():.1%} of the attention. The last "
        f"tenth of the keys carries {last:.1%} (their means are over the few rows that see them)."
    )


def _layers(results: Results, arm: str, states: str) -> str:
    by_head = results.drift(arm, states).by_head_CLH[0]
    if not by_head.sum():
        return ""
    layers = by_head.sum(1) / by_head.sum()
    top = np.argsort(-layers)[:3]
    best = np.unravel_index(by_head.argmax(), by_head.shape)
    return (
        f"**By layer and head** ({arm}, {states}, {_pair(results)}). Layers "
        + ", ".join(f"{layer} ({layers[layer]:.1%})" for layer in top)
        + f" carry the most of {len(layers)}; the first has {layers[0]:.1%}, the last "
        f"{layers[-1]:.1%}. The leading head is {best[1]} of layer {best[0]} with "
        f"{by_head.max() / by_head.sum():.1%} (an equal share is {1 / by_head.size:.1%})."
    )


def _lengths(results: Results) -> str:
    """D_logit at both ends, as run and far away."""
    lengths = sorted(results.settings.lengths)
    reached = next(iter(results.far.values())).lengths
    rows = [
        f"| arm | texts of {lengths[0]} tokens | of {lengths[-1]} | real q and k, {reached[0]} "
        f"rows | {reached[-1]} rows |",
        "|---|---|---|---|---|",
    ]
    for name in results.settings.arms:
        near, far = results.first_logit(name), results.far[name].first_logit_O
        values = (near[0][1], near[-1][1], far[0], far[-1])
        rows.append(f"| {name} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    return (
        f"**D_logit of the first token by length** ({results.settings.states[0]}, "
        f"{_pair(results)}):\n\n" + "\n".join(rows)
    )


def _frequencies(results: Results, arm: str) -> str:
    far = results.far[arm]
    sentences = []
    for whose, bands in (
        (f"the first key at {far.lengths[-1] // 2} to {far.lengths[-1]}", far.first_key_OF[-1]),
        ("other keys of the text", far.other_keys_F),
    ):
        if not bands.sum():
            continue
        share = bands / bands.sum()
        top = np.argsort(-share)[:4]
        inside = far.wavelengths_F <= results.settings.length
        sentences.append(
            f"for {whose}, frequencies {', '.join(f'{f} ({share[f]:.0%})' for f in sorted(top))} "
            f"carry the most, with full turns in "
            f"{', '.join(f'{far.wavelengths_F[f]:.3g}' for f in sorted(top))} positions; the "
            f"{inside.sum()} of {len(share)} that turn within {results.settings.length} positions "
            f"have {share[inside].sum():.0%}"
        )
    return f"**By frequency** ({arm}): {'; '.join(sentences)}." if sentences else ""


def _at_shifts(drift: Drift) -> np.ndarray:
    """D at every shift that is not the reference itself, where it is 0."""
    apart = np.array(drift.shifts) != drift.reference_shift
    return drift.totals[apart]


def _range(values: np.ndarray) -> str:
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def _pair(results: Results) -> str:
    return "shifts {} and {}".format(*results.settings.pair)
