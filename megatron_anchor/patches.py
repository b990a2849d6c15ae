"""What a patch of a host package is: the attribute, what stands in its place, and why.

`training.host_patches` lists those of a training run, `on_cpu` those of a machine without a GPU.
"""

import importlib
import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement

from megatron_anchor.terminal import logger_of

TORCH = "torch>=2.8"
MEGATRON = "megatron-core>=0.19.2,<0.21"

_LOGGER = logger_of(__name__)


class MissingTargetError(AttributeError):
    """The host has no such attribute, or a function with other parameters."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced attribute of a host package."""

    target: str
    """Where it is: `module:attribute.path`."""
    replacement: Callable[[Any], Any]
    """Given the original, returns what stands in its place."""
    reason: str
    """Why it is replaced."""
    lost: str = ""
    """What stops working where the host no longer has the target."""
    parameters: tuple[str, ...] = ()
    """Names of the original's first parameters, where the replacement depends on them."""
    host: str | None = TORCH
    """Package and versions that have the target, as a requirement; None: Python itself."""

    @property
    def module(self) -> str:
        """Name of the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        """Attribute names from the module to the target."""
        return self.target.partition(":")[2].split(".")


def instead(value: Any) -> Callable[[Any], Any]:
    """Return a `replacement` that ignores the original."""
    return lambda _original: value


def owner_of(patch: Patch) -> Any:
    """Return the module or class that holds a patch's target, after importing its module.

    Raises:
        MissingTargetError: says which target, in which host, and what does not work without it.
    """
    try:
        owner: Any = importlib.import_module(patch.module)
        *parents, name = patch.path
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
    except (AttributeError, ModuleNotFoundError) as error:
        of_module = isinstance(error, ModuleNotFoundError)
        if of_module and not f"{patch.module}.".startswith(f"{error.name}."):
            raise  # the module is there, but one that it needs is not
        raise MissingTargetError(_missing(patch, "does not exist")) from error
    if patch.parameters:
        found = tuple(inspect.signature(original).parameters)[: len(patch.parameters)]
        if found != patch.parameters:
            raise MissingTargetError(
                _missing(
                    patch, f"takes ({', '.join(found)}), expected ({', '.join(patch.parameters)})"
                )
            )
    return owner


def _missing(patch: Patch, what: str) -> str:
    host = "Python" if patch.host is None else Requirement(patch.host).name
    without = f"what stops working: {patch.lost}" if patch.lost else f"why it is: {patch.reason}"
    return (
        f"{patch.target}, which megatron_anchor replaces, {what} in this {host} "
        f"({_version_of(patch)}); {without}. Install a version that has it ({patch.host})"
    )


_applied: dict[str, tuple[Any, Any]] = {}
"""Target -> (stand-in, original) of the patches that `apply` put in place."""


def apply(patch: Patch) -> None:
    """Put a patch in place now; a patch of the same target that was applied before is replaced.

    Raises:
        MissingTargetError: see `owner_of`.
    """
    owner, name = owner_of(patch), patch.path[-1]
    found = getattr(owner, name)
    stand_in, original = _applied.get(patch.target, (None, None))
    if found is not stand_in:
        original = found
    stand_in = patch.replacement(original)
    _applied[patch.target] = (stand_in, original)
    setattr(owner, name, stand_in)


@contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Have patches in place for the length of a block.

    Raises:
        MissingTargetError: see `owner_of`; none is in place then.
    """
    places = [(owner_of(patch), patch.path[-1]) for patch in patches]
    originals = [getattr(owner, name) for owner, name in places]
    try:
        for patch, (owner, name), original in zip(patches, places, originals, strict=True):
            setattr(owner, name, patch.replacement(original))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def fits_host(patch: Patch) -> bool:
    """Whether the host is one that the patch was written for; warns when it is not.

    Of Megatron it is one that has the target: its branches carry numbers of other releases.
    """
    if patch.host is None:
        return True
    if patch.host == MEGATRON:
        try:
            owner_of(patch)
        except MissingTargetError as error:
            _LOGGER.warning("%s", error)
            return False
        return True
    found = _version_of(patch)
    fits = Requirement(patch.host).specifier.contains(found, prereleases=True)
    if not fits:
        _LOGGER.warning("%s stays: its row is for %s, found %s", patch.target, patch.host, found)
    return fits


def _version_of(patch: Patch) -> str:
    """Return the version of a patch's host that this process would use."""
    if patch.host is None:
        return platform.python_version()
    name = Requirement(patch.host).name
    if name == "megatron-core":  # a checkout on sys.path may shadow the installed wheel
        return importlib.import_module("megatron.core.package_info").__version__
    return version(name)
