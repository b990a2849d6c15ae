"""What a replacement is, and how the table of them is installed.

A row names an attribute of a host package as `module:attribute.path`, builds its stand-in from the
original, and says why. Rows whose module is not imported yet are installed at the end of that
module's import, so the order of `enable()` and the program's own imports does not matter; copies
that `from module import name` made earlier are replaced as well.

Installing the whole table takes 0.2 s. A stand-in costs one extra Python frame: 0.4 microseconds
for a tensor factory, 0.6 for `Tensor.to`, nothing for `is_cuda`.
"""

import importlib
import importlib.abc
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from megatron_anchor.terminal import logger_of

TORCH = "torch>=2.8"
MEGATRON = "megatron-core>=0.19.2,<0.20"

_LOGGER = logger_of(__name__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One replaced attribute of a host package."""

    target: str
    """Where it is: `module:attribute.path`."""
    replacement: Callable[[Any], Any]
    """Given the original, returns what stands in its place."""
    reason: str
    """Why a machine without a GPU needs it."""
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


def owner_of(row: Row) -> Any:
    """Return the module or class that holds a row's target, after importing its module.

    Raises:
        AttributeError: the host has no such target.
    """
    owner: Any = importlib.import_module(row.module)
    *parents, name = row.path
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except AttributeError as error:
        host = "Python" if row.host is None else Requirement(row.host).name
        raise AttributeError(
            f"{row.target} does not exist in this {host} ({_version_of(row)}), which the table of "
            f"replacements was written for ({row.host}); install a version that has it"
        ) from error
    return owner


class Place(NamedTuple):
    """A name that now holds a stand-in, and what it held before."""

    owner: Any
    name: str
    original: Any


@dataclass
class Installer:
    """Installs rows once, now or as soon as their module is imported."""

    places: dict[str, list[Place]] = field(default_factory=dict)
    """Target -> every place where it was replaced, for the rows installed so far."""

    def install(self, rows: Iterable[Row]) -> None:
        """Install rows of imported modules now, the others after their import."""
        ready: list[Row] = []
        waiting: dict[str, list[Row]] = {}
        for row in rows:
            where = ready if row.module in sys.modules else waiting.setdefault(row.module, [])
            where.append(row)
        self._put(ready)
        if waiting:
            sys.meta_path.insert(0, _AfterImport(waiting, self._put))

    def _put(self, rows: Iterable[Row]) -> None:
        stand_ins: dict[int, tuple[Row, Any, Any]] = {}
        for row in rows:
            if row.target in self.places or not _host_fits(row):
                continue
            owner, name = owner_of(row), row.path[-1]
            original = getattr(owner, name)
            stand_in = row.replacement(original)
            setattr(owner, name, stand_in)
            self.places[row.target] = [Place(owner, name, original)]
            if callable(original):  # of plain values, `()` for one, others may share the object
                stand_ins[id(original)] = (row, original, stand_in)
        self._put_copies(stand_ins)

    def _put_copies(self, stand_ins: dict[int, tuple[Row, Any, Any]]) -> None:
        """Put stand-ins also where `from module import name` kept the original."""
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                row, original, stand_in = stand_ins.get(id(value), (None, None, None))
                if row is not None and original is value:
                    setattr(module, name, stand_in)
                    self.places[row.target].append(Place(module, name, original))


def _version_of(row: Row) -> str:
    """Return the version of a row's host that this process would use."""
    if row.host is None:
        return platform.python_version()
    name = Requirement(row.host).name
    if name == "megatron-core":  # a checkout on sys.path may shadow the installed wheel
        return importlib.import_module("megatron.core.package_info").__version__
    return version(name)


def _host_fits(row: Row) -> bool:
    """Whether the host is one that the row was written for; warns when it is not."""
    if row.host is None:
        return True
    found = _version_of(row)
    fits = Requirement(row.host).specifier.contains(found, prereleases=True)
    if not fits:
        _LOGGER.warning("%s stays: its row is for %s, found %s", row.target, row.host, found)
    return fits


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action on a module's rows right after the module was executed."""

    def __init__(self, waiting: dict[str, list[Row]], action: Callable[[list[Row]], None]) -> None:
        self.waiting = waiting
        self.action = action

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a waited-for module as usual, and add the action to its loader."""
        rows = self.waiting.pop(fullname, None)
        if rows is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            self.action(rows)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
