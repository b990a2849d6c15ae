"""Megatron's --window-size and --window-attn-skip-freq: which layer has which window."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from megatron_anchor.windows import FULL, LayerKind, LayerWindows, Window


def layer_window(settings: Any, layer_number: int, *, keeps_anchor: bool) -> Window | None:
    """The window of a layer, None where it sees all of a document before it.

    Args:
        settings: Megatron's arguments or its TransformerConfig; both have these names.
        layer_number: 1-based.
        keeps_anchor: see `Window`.
    """
    size, frequency = settings.window_size, settings.window_attn_skip_freq
    if not is_layer_window_attention(size, frequency, layer_number) or size[0] < 0:
        return None
    # Megatron counts the keys on either side of the query's own.
    return Window(size=size[0] + 1, keeps_anchor=keeps_anchor)


def layer_windows(settings: Any, *, layers: int, keeps_anchor: bool) -> LayerWindows:
    """The windows of all layers.

    Args:
        settings: see `layer_window`.
        layers: number of layers.
        keeps_anchor: see `Window`.
    """
    numbers = range(1, layers + 1)
    windows = Counter(layer_window(settings, n, keeps_anchor=keeps_anchor) for n in numbers)
    if set(windows) <= {None}:
        return FULL
    return LayerWindows(tuple(LayerKind(window, count) for window, count in windows.items()))
