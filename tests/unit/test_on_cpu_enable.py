"""`enable()` and the installer: once, in any order of imports, never by import, never on GPUs."""

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_anchor import on_cpu
from megatron_anchor.on_cpu.installer import Installer
from megatron_anchor.patches import Patch, instead, owner_of

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    """Run code in a fresh process and return what it printed."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_changes_nothing_and_enabling_twice_is_enabling_once() -> None:
    out = run_python(
        """
        import atexit, os, sys
        import megatron_anchor.on_cpu as on_cpu
        assert "torch" not in sys.modules
        import torch
        from torch.cuda import current_device as early_copy
        from torch.distributed import new_group

        def attributes():
            return {
                row.target: getattr(patches.owner_of(row), row.path[-1])
                for row in rows.ROWS
                if not row.target.startswith("megatron")
            }

        from megatron_anchor import patches
        from megatron_anchor.on_cpu import rows
        environment = dict(os.environ)
        patches.owner_of(rows.ROWS[0])
        before = attributes()
        assert torch.cuda.is_available() is False
        assert dict(os.environ) == environment

        on_cpu.enable()
        after = attributes()
        assert not [target for target in before if after[target] is before[target]]
        assert early_copy() == 0, "a copy made before is replaced as well"
        assert new_group is torch.distributed.distributed_c10d.new_group
        assert torch.distributed.new_group is torch.distributed.distributed_c10d.new_group
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"

        finders = list(sys.meta_path)
        on_cpu.enable()
        again = attributes()
        assert not [target for target in after if again[target] is not after[target]]
        assert sys.meta_path == finders
        print("done")
        """
    )
    assert out == "done\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is not imported yet, with `f` and `C.g`, both returning 1."""
    name = "on_cpu_host_of_a_test"
    code = "def f():\n    return 1\n\nclass C:\n    def g(self):\n        return 1\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    sys.modules.pop(name, None)


def two() -> int:
    return 2


def row_of(target: str, **fields: str | None) -> Patch:
    return Patch(
        target=target, replacement=instead(two), reason="a test", **{"host": None, **fields}
    )


def test_rows_of_a_later_import_are_installed_after_it(host: str) -> None:
    installer = Installer()
    installer.install([row_of(f"{host}:f")])
    assert not installer.places
    module = __import__(host)
    assert module.f is two
    assert list(installer.places) == [f"{host}:f"]


def test_rows_of_an_earlier_import_are_installed_at_once_with_its_copies(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(host)
    other = types.ModuleType("on_cpu_other_of_a_test")
    other.copied = module.f
    monkeypatch.setitem(sys.modules, other.__name__, other)
    Installer().install([row_of(f"{host}:f")])
    assert module.f is other.copied is two


def test_a_plain_value_is_replaced_in_its_own_place_only(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(host)
    other = types.ModuleType("on_cpu_other_of_a_test")
    module.empty = other.empty = ()
    monkeypatch.setitem(sys.modules, other.__name__, other)
    Installer().install([row_of(f"{host}:empty")])
    assert module.empty is two
    assert other.empty == ()


def test_an_installed_row_is_not_wrapped_again(host: str) -> None:
    installer = Installer()
    row = Patch(
        target=f"{host}:f", replacement=lambda f: lambda: f() + 1, reason="a test", host=None
    )
    installer.install([row])
    module = __import__(host)
    installer.install([row])
    assert module.f() == 2


def test_a_host_of_another_version_is_left_alone_with_a_warning(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = __import__(host)
    Installer().install([row_of(f"{host}:f", host="torch<2")])
    assert module.f() == 1
    assert f"{host}:f stays: its row is for torch<2, found 2." in caplog.text


def test_a_missing_target_names_the_row_the_host_and_the_remedy(host: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"{host}:C\.h, .* does not exist .* Install a version"
    ):
        owner_of(row_of(f"{host}:C.h"))


def test_enable_refuses_where_cuda_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match=r"CUDA works on this machine \(8 devices\).*--force"):
        on_cpu.enable()
    assert dict(os.environ) == environment
