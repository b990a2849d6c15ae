"""SIGTERM to all processes of a job: those that a save needs live on."""

from __future__ import annotations

import signal
import threading
import time

import psutil
import pytest
import torch

from megatron_anchor.patches import applied
from megatron_anchor.training.kept_children import PATCHES, sigterm_blocked


@pytest.fixture
def told_to_end():
    """Send SIGTERM to every process that the test started; give how many there were."""
    before = set(psutil.Process().children(recursive=True))

    def send() -> int:
        started = set(psutil.Process().children(recursive=True)) - before
        for process in started:
            process.terminate()
        time.sleep(0.3)
        return len([process for process in started if process.is_running()])

    yield send
    for process in set(psutil.Process().children(recursive=True)) - before:
        process.kill()


def test_the_manager_of_the_checkpoint_writers_lives_on(told_to_end, monkeypatch):
    with applied(*PATCHES):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        monkeypatch.setattr(filesystem_async, "_results_queue", None)
        queue = filesystem_async.get_write_results_queue(mp_mode="fork")
        assert told_to_end() >= 1
        queue.put(3)
        assert queue.get(timeout=20) == 3
        monkeypatch.setattr(filesystem_async, "_results_queue", None)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index


def test_workers_that_read_samples_live_on(told_to_end):
    with applied(*PATCHES):
        samples = iter(torch.utils.data.DataLoader(Numbers(), num_workers=2, batch_size=None))
        first = [next(samples) for _ in range(3)]
        assert told_to_end() >= 2
        assert first + list(samples) == list(range(100))


def test_a_signal_that_comes_meanwhile_is_delivered_after():
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    try:
        with sigterm_blocked():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert not got
        assert got == [1]
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, before)
