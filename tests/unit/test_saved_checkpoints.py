"""What a run finds in its checkpoint folder, and leaves there when it cannot write."""

import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.training import checkpointing as host

from megatron_anchor import compat
from megatron_anchor.training import saved_checkpoints
from megatron_anchor.training.saved_checkpoints import (
    WholeTrackers,
    explaining_failures,
    failed_save,
    refusals,
    whole_checkpoints,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of iterations 4 and 8, an unfinished one of 12, and a tracker."""
    for iteration in (4, 8, 12):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
        (tmp_path / f"iter_{iteration:07d}" / "__0_0.distcp").write_bytes(b"")
    for iteration in (4, 8):
        (tmp_path / f"iter_{iteration:07d}" / "metadata.json").write_text("{}")
    (tmp_path / compat.TRACKER).write_text("8")
    return tmp_path


def test_the_tracker_is_the_one_that_megatron_writes(folder: Path) -> None:
    assert Path(host.get_checkpoint_tracker_filename(str(folder))).name == compat.TRACKER


def test_a_tracker_that_cannot_be_written_stays_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "maybe_msc", WholeTrackers(host.maybe_msc))
    tracker = folder / compat.TRACKER
    with host.maybe_msc.open(str(tracker), "w") as stream:
        assert tracker.read_text() == "8", "readers see the old one until the new one is there"
        stream.write("12")
    assert tracker.read_text() == "12"
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match="No space"),
        host.maybe_msc.open(str(tracker), "w") as stream,
    ):
        stream.write("16")
    assert tracker.read_text() == "12"
    assert {path.name for path in folder.glob("*latest*")} == {compat.TRACKER}
    with host.maybe_msc.open(str(tracker), "r") as stream:
        assert stream.read() == "12"
    with host.maybe_msc.open(str(folder / "other.txt"), "w") as stream:
        stream.write("any other file is Megatron's own affair")
    assert host.maybe_msc.os is os


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("", r"holds '', expected the number of an iteration .*whole are: 4, 8\), or remove it"),
        ("1 2", r"holds '1 2', expected the number of an iteration"),
        ("\0\0", r"holds '\\x00\\x00', expected the number of an iteration"),
        ("16", r"names iteration 16, which has no folder there: .*\(whole are: 4, 8\)"),
    ],
)
def test_a_tracker_that_leads_nowhere_is_refused_with_the_whole_checkpoints(
    folder: Path, tracker: str, message: str
) -> None:
    (folder / compat.TRACKER).write_text(tracker)
    [reason] = refusals(Namespace(load=str(folder)))
    with pytest.raises(ValueError, match=message):
        raise ValueError(reason)


@pytest.mark.parametrize("tracker", ["8", "8\n", "release", None])
def test_a_tracker_that_leads_somewhere_or_none_is_accepted(
    folder: Path, tracker: str | None
) -> None:
    if tracker is None:
        (folder / compat.TRACKER).unlink()
    else:
        (folder / compat.TRACKER).write_text(tracker)
    assert not list(refusals(Namespace(load=str(folder))))
    assert not list(refusals(Namespace(load=None)))


def test_a_failed_save_says_what_is_left(folder: Path) -> None:
    text = failed_save(str(folder), 12, RuntimeError("CheckpointException\nfirst\nlast line\n"))
    assert "iteration 12 could not be saved" in text
    assert "(RuntimeError: last line)" in text
    assert "The checkpoint of iteration 8 is whole" in text
    assert f"{folder}/iter_0000012 is unfinished" in text
    (folder / compat.TRACKER).unlink()
    full = failed_save(str(folder), 12, OSError(28, "x"))
    assert "No checkpoint was saved there before: make room" in full
    (folder / compat.TRACKER).write_text("release")
    assert "The checkpoint release is whole" in failed_save(str(folder), 12, OSError(28, "x"))


def test_a_failed_save_asks_for_room_only_where_there_may_be_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remedy(error: BaseException) -> bool:
        return "make room" in failed_save(str(folder), 12, error)

    def caused(error: BaseException, cause: BaseException) -> BaseException:
        error.__cause__ = cause
        return error

    usage = SimpleNamespace(total=10**12, free=10**11)
    monkeypatch.setattr(saved_checkpoints.shutil, "disk_usage", lambda _: usage)
    assert not remedy(EOFError("the manager ended"))
    assert not remedy(TypeError("cannot pickle"))
    assert not remedy(caused(RuntimeError("writer"), PermissionError(13, "denied")))
    assert remedy(caused(RuntimeError("writer"), OSError(28, "No space left on device")))
    assert remedy(RuntimeError("[Errno 28] No space left on device"))
    assert remedy(OSError(122, "quota"))
    usage.free = 10**6
    assert remedy(RuntimeError("PytorchStreamWriter failed"))


def test_a_save_that_fails_before_its_folder_is_there_says_why(folder: Path) -> None:
    text = failed_save(str(folder / "a" / "b"), 12, PermissionError(13, "Permission denied"))
    assert "(PermissionError: [Errno 13] Permission denied)" in text
    assert "No checkpoint was saved there before: remove the cause" in text
    assert "unfinished" not in text


def test_without_a_folder_nothing_is_saved_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.training import training

    def save(*_: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(training, "get_args", lambda: Namespace(save=None))
    explaining_failures(save)(3, None)
    assert "without --save, iteration 3 is not saved" in capsys.readouterr().out


def test_whole_checkpoints_are_those_with_their_last_file(folder: Path) -> None:
    assert whole_checkpoints(folder) == [4, 8]
