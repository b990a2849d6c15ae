"""Patches of the host: put in place once, and named where a newer host lacks their target."""

import types
from argparse import Namespace

import pytest

from megatron_anchor.patches import MissingTargetError, Patch, applied, apply, owner_of
from megatron_anchor.training.host_patches import PATCHES, HostPatch, install


@pytest.fixture
def host(monkeypatch):
    """A module `host_of_a_test` with `f(a, b)`, which returns 1."""
    module = types.ModuleType("host_of_a_test")
    module.f = lambda a, b: 1
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return module


def patch_of(target, *, add=1, **fields):
    def plus(original):
        return lambda a, b: original(a, b) + add

    words = {"reason": "a test", "lost": "the sum", "host": "megatron-core>=0.19.2"}
    return Patch(target=f"host_of_a_test:{target}", replacement=plus, **words | fields)


def test_applying_again_replaces_the_first_and_wraps_the_original_once(host):
    apply(patch_of("f"))
    apply(patch_of("f"))
    assert host.f(0, 0) == 2
    apply(patch_of("f", add=10))
    assert host.f(0, 0) == 11
    host.f = lambda a, b: 5  # somebody else's
    apply(patch_of("f"))
    assert host.f(0, 0) == 6


def test_a_block_leaves_everything_as_it_was_also_after_an_error(host):
    original = host.f
    with applied(patch_of("f")):
        assert host.f(0, 0) == 2
    assert host.f is original
    with pytest.raises(KeyError), applied(patch_of("f")):
        raise KeyError
    assert host.f is original
    with pytest.raises(MissingTargetError), applied(patch_of("f"), patch_of("g")):
        pass
    assert host.f is original


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        (patch_of("g"), r"host_of_a_test:g, which .* does not exist"),
        (patch_of("f.g"), r"host_of_a_test:f\.g, which .* does not exist"),
        (patch_of("f", parameters=("a", "c")), r"takes \(a, b\), expected \(a, c\)"),
        (
            Patch(target="host_of_no_test:f", replacement=len, reason="", lost="the sum"),
            "host_of_no_test:f, which .* does not exist in this torch",
        ),
    ],
)
def test_what_a_host_lacks_is_named_with_what_stops_working(host, patch, what):
    with pytest.raises(
        MissingTargetError, match=f"{what}.*stops working: the sum.*Install a version"
    ):
        owner_of(patch)


def test_a_run_that_asked_for_what_is_lost_is_refused_with_all_reasons(host):
    rows = [
        HostPatch(patch_of(name, lost=f"--{name}"), lambda args: args.save_last) for name in "gh"
    ]
    install(Namespace(save_last=False), rows)
    with pytest.raises(ValueError, match=r"(?s)stops working: --g\..*stops working: --h\."):
        install(Namespace(save_last=True), rows)


def test_other_runs_are_warned_and_go_on(host, caplog):
    install(Namespace(), [HostPatch(patch_of("g")), HostPatch(patch_of("f"))])
    assert "host_of_a_test:g, which" in caplog.text
    assert host.f(0, 0) == 2


@pytest.mark.parametrize("row", PATCHES, ids=lambda row: row.patch.target)
def test_the_installed_host_has_every_target(row):
    owner_of(row.patch)
    assert row.patch.reason
    assert row.patch.lost
