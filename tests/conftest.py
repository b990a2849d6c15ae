"""Settings of all tests: hypothesis tries the same examples in every run, on slow machines too."""

from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if find_spec("transformer_engine"):
    from tests import te_stand_in

    if te_stand_in.is_usable():
        te_stand_in.install()  # before Megatron, which imports Transformer Engine
