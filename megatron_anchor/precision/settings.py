"""What a measurement is asked to do, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_anchor.errors import UserError
from megatron_anchor.precision.arms import ARMS
from megatron_anchor.precision.far import FIRST_DOUBLING
from megatron_anchor.precision.measurement import STATES


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field a flag; the defaults are the paper's (section 2.2, figure 1)."""

    arms: tuple[str, ...] = tuple(ARMS)
    states: tuple[str, ...] = STATES
    num_texts: int = 50
    length: int = 4096
    """Tokens of a text for D."""
    shifts: tuple[int, ...] = (0, 4, 8, 32, 64, 128, 256, 500, 750, 1000, 1250, 1500, 1750, 2000)
    """shift1; the first of them makes the pair that tokens, heads and lengths are shown for."""
    shift2: int = 16
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """For D_logit; those above `length` are measured by a run of their own."""
    num_long_texts: int | None = None
    """Texts of that run; None: as many as the others."""
    reach: int = 131072
    """Distance up to which the first token is followed with queries and keys of real layers."""
    add_bos: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for flag in ("arms", "states", "shifts", "lengths"):
            values = getattr(self, flag)
            if not values or len(set(values)) < len(values):
                raise UserError(f"--{flag} {_list(values)}: expected each once, at least one")
        for flag, known in (("arms", tuple(ARMS)), ("states", STATES)):
            for name in getattr(self, flag):
                if name not in known:
                    raise UserError(f"--{flag} {name}: choose from {', '.join(known)}")
        smallest = {"num_texts": 1, "length": 2, "shift2": 0, "seed": 0}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}: expected at least {least}")
        if self.num_long_texts is not None and self.num_long_texts < 1:
            raise UserError(f"--num-long-texts {self.num_long_texts}: expected at least 1")
        if min(self.shifts) < 0 or min(self.lengths) < 1:
            raise UserError(
                f"--shifts {_list(self.shifts)}, --lengths {_list(self.lengths)}: expected shifts "
                "of at least 0 and lengths of at least 1"
            )
        if self.shift2 == self.shifts[0]:
            raise UserError(
                f"--shifts begins with {self.shifts[0]}, which is --shift2: their difference is 0 "
                "by definition; put another one first"
            )
        if self.reach < FIRST_DOUBLING or self.reach & (self.reach - 1):
            raise UserError(
                f"--reach {self.reach}: expected a power of two from {FIRST_DOUBLING} on"
            )

    @property
    def pair(self) -> tuple[int, int]:
        """The shifts that tokens, heads, lengths and frequencies are shown for."""
        return self.shifts[0], self.shift2

    @property
    def tokens(self) -> int:
        """What a text must have."""
        return max(self.length, *self.lengths)


def _list(values: tuple[object, ...]) -> str:
    return " ".join(map(str, values))
