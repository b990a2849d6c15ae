"""Other versions of Megatron, torch and Python: judged by features; and what is promised."""

import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_anchor import compat
from megatron_anchor.errors import UserError
from megatron_anchor.patches import MEGATRON, Patch, fits_host

ROOT = Path(__file__).parents[2]
LOWER = runpy.run_path(str(ROOT / "requirements" / "lower_bounds.py"))["lower_bounds"]


@pytest.fixture
def host_of(monkeypatch):
    """Make the process' Megatron say that it is of a version."""

    def be(version):
        package = types.SimpleNamespace(__version__=version)
        monkeypatch.setattr(compat.importlib, "import_module", lambda name: package)

    return be


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.2+35e739c", "0.20.0rc0", "0.20.3"])
def test_versions_of_this_generation_pass_also_of_a_checkout(version, host_of):
    host_of(version)
    compat.require_supported_megatron()
    assert compat.host_version() == version.partition("+")[0]


@pytest.mark.parametrize("version", ["0.18.9", "0.21.0", "0.21.0rc1", "1.0"])
def test_versions_of_another_generation_are_refused_with_their_number(version, host_of):
    host_of(version)
    with pytest.raises(UserError, match=f"megatron-core {version} .*pip install '{MEGATRON}'"):
        compat.require_supported_megatron()


def test_a_name_that_a_host_lacks_is_named_and_other_imports_fail_as_ever():
    with (
        pytest.raises(UserError, match=r"lacks what .*cannot import name 'gone'.*pip install"),
        compat.imports_of_the_host(),
    ):
        from megatron.core.enums import gone  # noqa: F401
    with (
        pytest.raises(UserError, match=r"lacks what .*No module named 'megatron\.no'"),
        compat.imports_of_the_host(),
    ):
        import megatron.no  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="no_module"), compat.imports_of_the_host():
        import no_module  # noqa: F401


def test_a_row_for_megatron_is_judged_by_its_target_and_not_by_a_number(caplog, monkeypatch):
    target = "megatron.core.enums:ModelType"
    row = {"replacement": len, "reason": "a test", "lost": "the sum", "host": MEGATRON}
    monkeypatch.setattr("megatron.core.package_info.__version__", "7.0")
    assert fits_host(Patch(target=target, **row))
    assert not caplog.text
    assert not fits_host(Patch(target=f"{target}.gone", **row))
    assert "ModelType.gone" in caplog.text
    assert "what stops working: the sum" in caplog.text


def test_lower_bounds_are_those_of_setup_py_and_each_requirement_has_one():
    found = LOWER((ROOT / "setup.py").read_text())
    assert {"torch==2.11", "megatron-core==0.19.2", "numpy==2.0"} <= set(found)
    assert len(found) == len({Requirement(text).name for text in found}) == 14
    with pytest.raises(ValueError, match="'torch' has no lower bound"):
        LOWER("setup(install_requires=['torch'])")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "usage: tools/test_next.sh VENV MEGATRON"),
        ([], "usage: tools/test_next.sh VENV MEGATRON"),
        (["{venv}", ""], "'' is no checkout of Megatron-LM"),
        (["{venv}", "docs"], "'docs' is no checkout of Megatron-LM"),
    ],
)
def test_the_script_for_a_checkout_says_what_it_needs(words, said):
    words = [word.format(venv=sys.prefix) for word in words]
    script = ROOT / "tools" / "test_next.sh"
    done = subprocess.run([script, *words], capture_output=True, text=True, check=False)
    assert said in done.stdout + done.stderr
    assert done.returncode == (0 if words == ["--help"] else 2)
