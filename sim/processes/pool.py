"""A pool of processes, one a rank, in one gloo group: started once, fed programs, killed as a whole.

The ledgers of the ranks are compared here while a program runs: two ranks that call different collectives
are reported within a fraction of a second, where gloo itself would wait for its time limit, abort the
process, or exchange the wrong data.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from refmodel.collectives import Call
from refmodel.errors import Where
from sim.failures import WorldUnavailable
from sim.processes.parcel import pack, unpack
from sim.processes.progress import Progress, not_sendable
from sim.processes.worker import Issues, Message, serve

T = TypeVar("T")
Watch = Callable[[int, Call], None]

# Two cores start 8 ranks in 3 s; a busy machine takes its time.
_START_SECONDS = 120.0
# When one rank fails the others soon follow, or are about to: wait this long before naming the cause.
_SETTLE_SECONDS = 0.2


@dataclass(eq=False, slots=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection

    def hear(self) -> Iterator[Message]:
        """What it has said and nobody has heard."""
        with suppress(EOFError, ConnectionError):  # it died; its sentinel tells
            while self.pipe.poll():
                yield unpack(self.pipe.recv_bytes())


class GlooPool:
    """``size`` processes in one gloo group, started at the first run and again after a failed one.

    ``timeout`` in seconds bounds each run. The processes end with :meth:`close`, with this object, with
    this process, and with any failed run, whichever comes first.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._world = f"gloo:{size}"
        self._workers: list[_Worker] = []
        self._end: Callable[[], object] = lambda: None
        self._busy = threading.Lock()

    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None
    ) -> tuple[list[T], list[list[Call]]]:
        """The result and the calls of each rank, in rank order."""
        payload = _packed(program, args)
        with self._busy, self._ended_on_failure():
            if not self._workers:
                self._start()
            return self._feed(pack((sys.path, payload)), watch)

    def close(self) -> None:
        """End the processes. A later run starts new ones."""
        self._end()
        self._workers = []

    @contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        # Whatever went wrong, an interrupt included: nobody knows what the ranks are waiting for now.
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "sim.processes.worker"])
        folder = tempfile.mkdtemp(prefix="cpkv-")
        workers = self._workers
        self._end = weakref.finalize(self, _end, workers, folder, os.getpid())
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self._size, folder, theirs),
                name=f"{self._world} rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            workers.append(_Worker(rank, process, ours))
        self._await_ready()

    def _await_ready(self) -> None:
        progress = Progress(self._world, self._size)
        ready: set[int] = set()

        def hear(rank: int, message: Message) -> None:
            ready.add(rank)

        self._listen(progress, hear, _START_SECONDS, lambda: len(ready) == self._size)
        if len(ready) < self._size:
            missing = sorted(set(range(self._size)) - ready)
            raise WorldUnavailable(
                f"{self._world} does not start",
                expected=f"{self._size} processes in one gloo group within {_START_SECONDS:g} s",
                received=", ".join(f"rank {rank} {progress.dead.get(rank, 'silent')}" for rank in missing),
                fix='A script needs `if __name__ == "__main__":` around what it runs, as workers import it.',
            )

    def _feed(self, case: bytes, watch: Watch | None) -> tuple[list[Any], list[list[Call]]]:
        progress = Progress(self._world, self._size)

        def hear(rank: int, message: Message) -> None:
            progress.note(rank, message)
            if watch is not None and isinstance(message, Issues):
                watch(rank, message.call)

        for worker in self._workers:
            with suppress(ConnectionError):  # it died; its sentinel tells
                worker.pipe.send_bytes(case)
        self._listen(progress, hear, self._timeout, progress.complete)
        if not progress.complete():
            raise progress.verdict(self._timeout)
        return [_unpacked(progress.returned[rank], rank) for rank in range(self._size)], progress.calls

    def _listen(
        self,
        progress: Progress,
        hear: Callable[[int, Message], None],
        seconds: float,
        complete: Callable[[], bool],
    ) -> None:
        """Hear all ranks until the case is complete, or its failure settled, or time is up."""
        until = time.monotonic() + seconds
        troubled = False
        with _selecting(self._workers) as selector:
            while not complete() and not progress.settled():
                if not troubled and progress.troubled():
                    troubled = True
                    until = min(until, time.monotonic() + _SETTLE_SECONDS)
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return
                for worker in {key.data for key, _ in selector.select(remaining)}:
                    alive = worker.process.is_alive()  # asked first: then all it said is in the pipe
                    for message in worker.hear():
                        hear(worker.rank, message)
                    if not alive:
                        progress.dead[worker.rank] = _cause_of_death(worker.process)
                        selector.unregister(worker.pipe)
                        selector.unregister(worker.process.sentinel)


def _end(workers: list[_Worker], folder: str, owner: int) -> None:
    """Kill the processes and remove what they met at."""
    if os.getpid() != owner:  # a fork of the owner, at its exit
        return
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _selecting(workers: Sequence[_Worker]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
            selector.register(worker.process.sentinel, selectors.EVENT_READ, worker)
        yield selector


def _cause_of_death(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _packed(program: Callable[..., object], args: Sequence[Any]) -> bytes:
    """Program and arguments as bytes: the program by its name, tensors by value."""
    try:
        return pack((program, tuple(args)))
    except Exception as raised:
        parts = {"program": program} | {f"argument {number}": arg for number, arg in enumerate(args)}
        culprits = [what for what, part in parts.items() if not _can_be_packed(part)]
        received = f"{type(raised).__name__}: {raised}"
        raise not_sendable(", ".join(culprits), received, Where()) from raised


def _can_be_packed(part: object) -> bool:
    try:
        pack(part)
    except Exception:
        return False
    return True


def _unpacked(result: bytes, rank: int) -> Any:
    try:
        return unpack(result)
    except Exception as raised:
        raise not_sendable("result", f"{type(raised).__name__}: {raised}", Where(rank=rank)) from raised
