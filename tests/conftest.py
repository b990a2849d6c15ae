"""Settings of all tests: hypothesis tries the same examples in every run, on slow machines too."""

from importlib.util import find_spec

import pytest
from hypothesis import settings

from megatron_anchor import on_cpu

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if find_spec("transformer_engine"):
    from tests import te_stand_in

    if te_stand_in.is_usable():
        te_stand_in.install()  # before Megatron, which imports Transformer Engine


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_is():
    """`on_cpu.enable` lasts for a process: a test that calls it would change those behind it."""
    yield
    assert not on_cpu._installers, "run what enables on_cpu in a process of its own"
