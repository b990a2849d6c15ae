"""Settings of all tests: hypothesis tries the same examples in every run, on slow machines too."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
