"""Results as files: JSON with the sums, CSV with every number, both whole or not there at all."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron_anchor.errors import UserError
from megatron_anchor.precision.findings import findings
from megatron_anchor.precision.run import Results
from megatron_anchor.whole_files import atomic_write_text

COLUMNS = (
    *("quantity", "arm", "states", "shift1", "shift2", "length"),
    *("layer", "head", "key", "frequency", "value"),
)


def as_json(results: Results) -> dict[str, Any]:
    """Sums by shift, layer and length; numbers to six digits."""
    arms: dict[str, dict[str, Any]] = {}
    for drift in results.drifts:
        total = drift.totals
        entry = arms.setdefault(drift.arm, {})
        entry[drift.states] = {
            "D": _numbers(total),
            "D_spread_over_texts": _numbers(drift.by_text_TC.std(0)),
            "mean_weight_difference": _numbers(total / drift.logits / results.settings.length),
            "first_token_attention": _number(drift.first_weight_LH.mean()),
            "first_token": _numbers(drift.first_key_CLH.sum((1, 2))),
            "by_layer": _numbers(drift.by_head_CLH[0].sum(1)),
        }
    for name, far in results.far.items():
        arms[name] |= {
            "D_logit": {str(n): _number(value) for n, value in results.first_logit(name)},
            "D_logit_far": {
                str(n): _number(value)
                for n, value in zip(far.lengths, far.first_logit_O, strict=True)
            },
            "first_key_by_frequency": _numbers(far.first_key_OF[-1]),
            "other_keys_by_frequency": _numbers(far.other_keys_F),
        }
    wavelengths = next(iter(results.far.values())).wavelengths_F
    return {
        "model": results.model,
        "shape": results.shape,
        "settings": asdict(results.settings),
        "texts": results.texts,
        "wavelengths": _numbers(wavelengths),
        "arms": arms,
        "findings": findings(results),
    }


def rows(results: Results) -> Iterator[dict[str, Any]]:
    """Every number, one a row; columns that do not apply are left out."""
    shift2, length = results.settings.shift2, results.settings.length
    for drift in results.drifts:
        same = {"arm": drift.arm, "states": drift.states, "shift2": shift2, "length": length}
        for shift, total in zip(drift.shifts, drift.totals, strict=True):
            yield {"quantity": "D", **same, "shift1": shift, "value": total}
        same["shift1"] = drift.shifts[0]
        for layer, heads in enumerate(drift.by_head_CLH[0]):
            for head, value in enumerate(heads):
                yield {"quantity": "D", **same, "layer": layer, "head": head, "value": value}
        for key, value in enumerate(drift.by_key_CS[0]):
            yield {"quantity": "D", **same, "key": key, "value": value}
    for arm, far in results.far.items():
        same = {"arm": arm, "shift1": results.settings.shifts[0], "shift2": shift2}
        for size, value in results.first_logit(arm):
            yield {"quantity": "D_logit", **same, "length": size, "value": value}
        for size, value, bands in zip(
            far.lengths, far.first_logit_O, far.first_key_OF, strict=True
        ):
            yield {"quantity": "D_logit far", **same, "length": size, "value": value}
            for frequency, band in enumerate(bands):
                yield {
                    "quantity": "logit of first key",
                    **same,
                    "length": size,
                    "frequency": frequency,
                    "value": band,
                }
        for frequency, band in enumerate(far.other_keys_F):
            yield {
                "quantity": "logit of other keys",
                **same,
                "frequency": frequency,
                "value": band,
            }


def check_writable(prefix: str) -> None:
    """Check, before a long measurement, that files can be written beside `prefix`.

    Raises:
        UserError: if they cannot.
    """
    if prefix.endswith(("/", os.sep)) or Path(prefix).is_dir():
        raise UserError(
            f"--out {prefix} names a folder, expected the beginning of file names, as in "
            f"{Path(prefix) / 'drift'}"
        )
    folder = Path(prefix).resolve().parent
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--out {prefix}: {folder}: {error.strerror}") from error


def write_json(path: Path, results: Results) -> None:
    """Write the sums."""
    write_text(path, json.dumps(as_json(results), indent=1) + "\n")


def write_csv(path: Path, results: Results) -> None:
    """Write every number."""
    with atomic_write_text(path, newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows(results):
            writer.writerow(row | {"value": f"{row['value']:.6g}"})


def write_text(path: Path, text: str) -> None:
    """Write a file, or nothing."""
    with atomic_write_text(path) as file:
        file.write(text)


def _number(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in values]
