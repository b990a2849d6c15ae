"""Run a function on several ranks of one gloo group, forked from one warm process.

Importing torch and Megatron costs each rank seconds; a fork server imports them once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

_FIRST_PORT, _PORTS = 12_000, 20_000
_numbers = itertools.count()

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.preload"])


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank with torchrun's environment set.

    Args:
        function: importable function; its result must pickle.
        world_size: number of ranks.
        args: passed to each.
        timeout: seconds until the ranks are killed.

    Returns:
        Results in the order of ranks.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or on time-out.
    """
    port = free_port()
    results = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(rank, world_size, port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        collected: dict[int, Any] = {}
        while len(collected) < world_size:
            rank, result, error = results.get(timeout=timeout)
            if error:
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{error}")
            collected[rank] = pickle.loads(result)
    except queue.Empty:
        raise RuntimeError(f"{world_size} ranks did not finish in {timeout} s") from None
    finally:
        for process in processes:
            process.join(5 if len(collected) == world_size else 0)
            process.kill()
    return [collected[rank] for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, port: int, results: Any, function: Callable[..., Any], args: tuple
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        # Pickled by value here: the queue itself would share tensors' memory with a rank that ends.
        results.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:  # reported to the parent, which raises
        results.put((rank, None, traceback.format_exc()))


def free_port() -> int:
    """A port that no other test takes until it is listened to.

    The kernel gives a port that is free now, and gives it again to the next who asks. So ports are
    tried below those that it gives, each process from a place of its own, in turn.
    """
    for number in _numbers:
        port = _FIRST_PORT + (os.getpid() * 64 + number) % _PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the numbers do not end")
