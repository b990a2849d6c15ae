"""The table of kernels in docs/attention-backends.md, made from what the code refuses by.

`flash.RELEASES` holds the facts of flash-attn, so its rows are written from there; the others' are
here, next to the rules that they state. A test holds the page against `as_markdown`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from megatron_anchor.attention.backends import te_rules
from megatron_anchor.attention.backends.flash import RELEASES, Release
from megatron_anchor.attention.backends.flex import LARGEST_HEAD_DIM, SMALLEST_HEAD_DIM


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One row; the names of the fields are the heads of the columns."""

    kernel: str
    how_to_get_it: str
    trains_on: str
    head_dims: str
    sliding_window: str
    anchor_in_window: str
    sinks: str
    read_in: str
    """Where the facts are from."""


def rows() -> list[Kernel]:
    """All kernels, in the order in which ``auto`` prefers them."""
    return [_transformer_engine(), *map(_flash, RELEASES), *OTHERS]


def as_markdown() -> str:
    """The table of the page."""
    names = [field.name.replace("_", " ") for field in fields(Kernel)]
    lines = [names, ["---"] * len(names), *(list(astuple(row)) for row in rows())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _transformer_engine() -> Kernel:
    before = "; ".join(
        f"from {since} on: before {first}" if since != "0" else f"flash-attn 2 before {first}"
        for since, first in te_rules.FLASH_2_BEFORE
    )
    return Kernel(
        kernel="`te`",
        how_to_get_it="`pip install 'megatron-anchor[te]'`; in NVIDIA's containers",
        trains_on=f"sm80 with flash-attn ({before}); sm90 and newer",
        head_dims="sm90: to 256; newer: to 128, with flash-attn to 256 (flash-attn 4: from "
        f"{te_rules.FLASH_4_256} on)",
        sliding_window="yes, but for p2p and a2a+p2p",
        anchor_in_window="no",
        sinks="no",
        read_in="2.20.2, its code; 2.21.0, its release notes",
    )


def _flash(release: Release) -> Kernel:
    sinks = "yes"
    if release.sink_parameter:
        sinks = "sm90; sm100 to sm110, but for 256"
    elif release.first_lse != "0":
        sinks = f"from {release.first_lse} on"
    anchor = "no" if not release.anchor_in_window else sinks
    first = release.first_window
    return Kernel(
        kernel=f"`flash`: flash-attn {release.number}",
        how_to_get_it=_install(release),
        trains_on=_devices(release),
        head_dims=_head_dims(release),
        sliding_window="yes" if first == "0" else f"from {first} on",
        anchor_in_window=anchor,
        sinks=sinks,
        read_in=release.source,
    )


def _install(release: Release) -> str:
    command, _, note = release.install.partition("; ")
    return f"`{command}`" + (f"; {note}" if note else "")


def _devices(release: Release) -> str:
    (first, end), newer = release.capabilities, release.first_versions[1:]
    if end[0] == first[0]:
        text = _sm(first)
    elif end >= (99, 0):
        text = f"{_sm(first)} and newer"
    else:
        text = f"{_sm(first)} to sm{end[0] - 1}x"
    return text + "".join(f" ({_sm(since)} from {version} on)" for since, version in newer)


def _head_dims(release: Release) -> str:
    limits = [(max(since, release.capabilities[0]), n) for since, n in release.largest_head_dims]
    if len(limits) == 1:
        text = f"to {limits[0][1]}"
    else:
        text = "; ".join(
            f"from {_sm(since)} on: to {n}" if since != limits[0][0] else f"{_sm(since)}: to {n}"
            for since, n in limits
        )
    for more in release.more_widths:
        widths = f"{more.keys}" if more.keys == more.values else f"{more.keys} x {more.values}"
        since, end = more.capabilities
        text += f", {_sm(since)} to sm{end[0] - 1}x also {widths}"
        text += "" if more.first_version == "0" else f" from {more.first_version} on"
    if release.unequal_widths is None:
        return f"{text}; values of another width are filled up with zeros"
    (first_key, last_key), (first_value, last_value) = release.unequal_widths
    if (first_key, last_key) == (first_value, last_value):
        return f"{text}; keys and values may differ"
    return (
        f"{text}; keys of {first_key} to {last_key} with values of {first_value} to {last_value}, "
        "else values are filled up with zeros"
    )


def _sm(capability: tuple[int, int]) -> str:
    return "sm{}{}".format(*capability)


OTHERS = (
    Kernel(
        kernel="`varlen`",
        how_to_get_it="torch from 2.10 on",
        trains_on="sm80 and newer",
        head_dims="to 256; values of another width are filled up with zeros; grouped keys and "
        "values are copied where torch lacks `enable_gqa` (2.10; 2.12 and 2.13 have it)",
        sliding_window="where torch has `window_size` (2.12 and 2.13; not 2.10)",
        anchor_in_window="yes",
        sinks="yes",
        read_in="torch 2.13.0, its code; 2.10 and 2.12, their documentation",
    ),
    Kernel(
        kernel="`flex`",
        how_to_get_it="in torch",
        trains_on="sm80 and newer",
        head_dims=f"{SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}; keys and values may differ",
        sliding_window="yes",
        anchor_in_window="yes",
        sinks="yes",
        read_in="torch 2.13.0, its code",
    ),
    Kernel(
        kernel="`sdpa`",
        how_to_get_it="in torch",
        trains_on="everywhere",
        head_dims="any; values of another width are filled up with zeros",
        sliding_window="yes",
        anchor_in_window="yes",
        sinks="yes",
        read_in="torch 2.13.0, run on the CPU",
    ),
)
