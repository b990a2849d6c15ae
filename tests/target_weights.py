"""Corpora with weights for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_anchor.indexed.weights import WeightsManifest, describe_weights, weights_path


def write_weights(prefix: str | Path, weights: Any, *, dtype: str = "float32") -> WeightsManifest:
    """Give the corpus at `prefix` the weights of its tokens, in the order of the .bin."""
    numbers = np.asarray(weights, dtype=np.dtype(dtype).newbyteorder("<"))
    weights_path(prefix).write_bytes(numbers.tobytes())
    return describe_weights(prefix, dtype=dtype)
