"""The whole measurement: every arm on every text, under both kinds of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from megatron_anchor.precision.arms import ARMS, Arm
from megatron_anchor.precision.far import FirstTokenProbe
from megatron_anchor.precision.measurement import Drift, measure
from megatron_anchor.precision.models import LayeredModel, ModelFolder
from megatron_anchor.precision.settings import Settings
from megatron_anchor.precision.texts import Text
from megatron_anchor.terminal import escaped


@dataclass(frozen=True)
class Far:
    """The first token's logit far away, and errors by frequency."""

    lengths: np.ndarray
    first_logit_O: np.ndarray
    """D_logit at `lengths`."""
    first_key_OF: np.ndarray
    """Mean error of a logit of the first key that a frequency brings, by doubling."""
    other_keys_F: np.ndarray
    wavelengths_F: np.ndarray
    """Positions of a full turn."""


@dataclass(frozen=True)
class Results:
    """Everything that was measured."""

    model: str
    shape: str
    settings: Settings
    texts: tuple[str, ...]
    drifts: tuple[Drift, ...]
    long: dict[str, Drift]
    """By arm, the run for the lengths above `settings.length`; empty where there are none."""
    far: dict[str, Far]

    def drift(self, arm: str, states: str) -> Drift:
        """Find one."""
        return next(d for d in self.drifts if (d.arm, d.states) == (arm, states))

    def first_logit(self, arm: str) -> list[tuple[int, float]]:
        """D_logit of the pair of shifts at every length, under the first kind of states."""
        states = self.settings.states[0]
        short = self.drift(arm, states)
        return [
            (
                length,
                float(
                    (short if length <= self.settings.length else self.long[arm]).first_logit_up_to(
                        length
                    )[0]
                ),
            )
            for length in sorted(self.settings.lengths)
        ]


def run(
    source: ModelFolder,
    texts: Sequence[Text],
    settings: Settings,
    *,
    name: str,
    progress: bool = True,
) -> Results:
    """Measure.

    Args:
        source: the model.
        texts: each of `settings.tokens` tokens.
        settings: arms, shifts, lengths.
        name: of the model, for titles.
        progress: show a bar; its unit is a layer of a text.
    """
    is_long = settings.tokens > settings.length
    long_texts = texts[: settings.num_long_texts] if is_long else []
    short = [text.tokens_S[: settings.length] for text in texts[: settings.num_texts]]
    layers = len(settings.states) * len(short) + len(long_texts)
    drifts, long, far = [], {}, {}
    with tqdm(
        total=source.model.layers * layers * len(settings.arms),
        unit="layer",
        disable=not progress,
    ) as bar:
        model: LayeredModel | None = None
        loaded = None
        for arm in sorted((ARMS[a] for a in settings.arms), key=_weights):
            bar.set_description(escaped(arm.name))
            if loaded != _weights(arm):
                model = None  # frees one model before the next is loaded
                model = LayeredModel(source, arm, seed=settings.seed, device=settings.device)
                loaded = _weights(arm)
            assert model is not None
            for states in settings.states:
                # Queries and keys are the same under both: those of the reference shift.
                probe = _probe(source, arm, settings) if states == settings.states[-1] else None
                drift = measure(
                    model,
                    arm,
                    short,
                    shifts=settings.shifts,
                    reference_shift=settings.shift2,
                    states=states,
                    probe=probe,
                    done=bar.update,
                )
                drifts.append(drift)
            assert probe is not None
            far[arm.name] = _far(probe, texts=len(short))
            if long_texts:
                long[arm.name] = measure(
                    model,
                    arm,
                    [text.tokens_S for text in long_texts],
                    shifts=settings.shifts[:1],
                    reference_shift=settings.shift2,
                    states=settings.states[0],
                    done=bar.update,
                )
    shape = source.model
    words = f"{shape.family}, {shape.layers} layers, {shape.heads} heads of {shape.head}"
    return Results(name, words, settings, tuple(t.name for t in texts), tuple(drifts), long, far)


def _weights(arm: Arm) -> tuple[str, bool]:
    """Arms for which this is equal share a loaded model."""
    return str(arm.dtype), arm.random_weights


def _probe(source: ModelFolder, arm: Arm, settings: Settings) -> FirstTokenProbe:
    inv_freq_F, factor = source.inverse_frequencies(angle_dtype=arm.angle_dtype)
    return FirstTokenProbe(
        arm,
        inv_freq_F.to(settings.device),
        attention_factor=factor,
        shifts=settings.pair,
        reach=settings.reach,
        seed=settings.seed,
    )


def _far(probe: FirstTokenProbe, *, texts: int) -> Far:
    first, others = probe.bands()
    wavelengths = 2 * np.pi / probe.inv_freq_F.cpu().double().numpy()
    return Far(probe.lengths, probe.first_logit(texts=texts), first, others, wavelengths)
