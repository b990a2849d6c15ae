"""Encoding chunks in parallel, in order, with bounded memory, and never waiting for the dead.

`ProcessPool` gives every worker process an engine of its own; `ThreadPool` serves engines that use
all cores by themselves (and runs with one worker). Both yield results in the order of the chunks
and keep at most a fixed amount of work in flight.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection
from typing import Any, Protocol

from megatron_anchor.corpus.encoding import ChunkEncoder, EncodeConfig, EncodedChunk
from megatron_anchor.corpus.readers import Chunk
from megatron_anchor.errors import UserError

_MOST_BYTES = 256 << 20  # of input in flight; a single larger chunk still passes
_CHUNKS_A_WORKER = 2  # one in work, one waiting
_CLOSE_SECONDS = 5.0


class Pool(Protocol):
    """Where chunks are encoded."""

    def map(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Every chunk with its result, in order."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


def make_pool(config: EncodeConfig, *, workers: int) -> Pool:
    """The pool that suits the engine and the number of workers."""
    if workers == 1 or config.recipe.shares_threads:
        return ThreadPool(config)
    return ProcessPool(config, workers=workers)


class ThreadPool:
    """Two threads over one engine: one parses while the other is inside the engine."""

    def __init__(self, config: EncodeConfig) -> None:
        self._encoder = ChunkEncoder(config)
        self._threads = 2 if config.recipe.shares_threads else 1
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="encode")

    def map(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Every chunk with its result, in order."""
        waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
        held = 0
        for chunk in chunks:
            waiting.append((chunk, self._executor.submit(self._encoder, chunk)))
            held += _size(chunk)
            while len(waiting) > self._threads + 1 or held > _MOST_BYTES:
                first, future = waiting.popleft()
                held -= _size(first)
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()

    def close(self) -> None:
        """End the threads; work not begun is dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """One worker process and the chunks that it has been given, in order."""

    def __init__(self, config: EncodeConfig, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.number = number
        self.chunks: deque[Chunk] = deque()
        self.process = context.Process(
            target=_serve, args=(theirs, config), daemon=True, name=f"encode-{number}"
        )
        self.process.start()
        theirs.close()  # so that the worker's death closes the pipe

    def send(self, chunk: Chunk) -> None:
        """Give the worker a chunk; a thread of it takes it at once, so this does not block."""
        self.chunks.append(chunk)
        try:
            self.connection.send(chunk)
        except OSError as error:
            raise self.death() from error

    def receive(self) -> EncodedChunk | None:
        """The worker's next answer; None says that it is ready for its first chunk."""
        try:
            status, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.death() from error
        if status == "failed":
            raise value
        return value

    def death(self) -> UserError:
        """The error that tells how the process ended and on what."""
        self.process.join(_CLOSE_SECONDS)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        work = "at its start"
        if self.chunks:
            work = f"on {self.chunks[0].path}, rows from {self.chunks[0].first_row + 1}"
        return UserError(
            f"worker {self.number} (pid {self.process.pid}) died with {how} while working {work}; "
            "if memory ran out, use fewer --workers. What was finished is kept: add --resume"
        )


class ProcessPool:
    """Worker processes, each with a chunk to work on and another one waiting."""

    def __init__(self, config: EncodeConfig, *, workers: int) -> None:
        self._most_chunks = 4 * workers
        self._workers = [_Worker(config, number) for number in range(workers)]
        try:
            for worker in self._workers:
                worker.receive()  # says that it is ready
        except BaseException:
            self.close()
            raise

    def map(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Every chunk with its result, in order."""
        by_pipe: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        order: deque[Chunk] = deque()
        done: dict[int, EncodedChunk] = {}
        held, ahead = 0, next(chunks, None)
        while ahead is not None or order:
            while ahead is not None and self._has_room(order, held):
                worker = min(self._workers, key=lambda worker: len(worker.chunks))
                if len(worker.chunks) == _CHUNKS_A_WORKER:
                    break
                order.append(ahead)
                held += _size(ahead)
                worker.send(ahead)
                ahead = next(chunks, None)
            for pipe in connection.wait([w.connection for w in self._workers if w.chunks]):
                worker = by_pipe[pipe]
                result = worker.receive()
                assert result is not None
                done[id(worker.chunks.popleft())] = result
            while order and id(order[0]) in done:
                first = order.popleft()
                held -= _size(first)
                yield first, done.pop(id(first))

    def _has_room(self, order: deque[Chunk], held: int) -> bool:
        return not order or (len(order) < self._most_chunks and held < _MOST_BYTES)

    def close(self) -> None:
        """End the processes, by force where they do not listen."""
        for worker in self._workers:
            if worker.chunks:
                worker.process.terminate()
            worker.connection.close()  # an idle worker ends at this
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.1, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _size(chunk: Chunk) -> int:
    payload = chunk.payload
    if isinstance(payload, bytes):
        return len(payload)
    if isinstance(payload, list):
        return sum(len(item) for item in payload if isinstance(item, bytes)) or chunk.bytes_read
    return getattr(payload, "nbytes", 0)


def _serve(pipe: connection.Connection, config: EncodeConfig) -> None:
    """A worker's life: make the engine, answer chunks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        encode = ChunkEncoder(config)
        pipe.send(("ready", None))
        tasks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        threading.Thread(target=_take, args=(pipe, tasks), daemon=True).start()
        while (chunk := tasks.get()) is not None:
            pipe.send(("done", encode(chunk)))
    except (BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        pipe.send(("failed", error))
    except Exception as error:
        pipe.send(("failed", UserError(f"a worker failed: {type(error).__name__}: {error}")))


def _take(pipe: connection.Connection, tasks: queue.SimpleQueue[Chunk | None]) -> None:
    """Take chunks off the pipe as they come; there are never more than the parent allows."""
    try:
        while True:
            tasks.put(pipe.recv())
    except (EOFError, OSError):
        tasks.put(None)
