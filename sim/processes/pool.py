"""A pool of processes, one a rank, in one gloo or NCCL group: started once, fed programs, killed as a whole.

The ledgers of the ranks are compared here while a program runs: two ranks that call different collectives
are reported within a fraction of a second, where gloo and NCCL themselves would wait for a time limit, abort
the process, or exchange the wrong data.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import shutil
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
from refmodel.errors import InvalidInput, Where
from sim.failures import RunFailed
from sim.faults.fault import Fault
from sim.processes.death import cause_of_death, count_memory_kills
from sim.processes.laggards import line_of_stack, waits_by_stack
from sim.processes.messages import Alive, Issues, Message, Ready
from sim.processes.parcel import pack, pack_case, unpack
from sim.processes.progress import Death, Progress
from sim.processes.words import last_words, pass_on_words
from sim.processes.worker import STACK_SIGNAL, serve, stack_file
from sim.surface.recorder import Span

T = TypeVar("T")
Watch = Callable[[int, Call], None]

# Two cores start 8 ranks in 3 s; a busy machine takes its time.
_START_SECONDS = 120.0
# To import a program, before its own time limit begins.
_LOAD_SECONDS = 60.0
# When one rank fails the others soon follow, or are about to: wait this long before naming the cause.
_SETTLE_SECONDS = 0.2
# When ranks have lost another one, it is known at once which, unless the machine is very busy.
_CAUSE_SECONDS = 1.0
# The exit code of a worker that found it would start workers itself.
_STARTS_ON_IMPORT = 64
# For a process to write down where it is, however deep it waits.
_ASK_SECONDS = 0.4


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


class Pool:
    """``size`` processes in one group of ``kind``, started at the first run and again after a failed one.

    ``timeout`` in seconds bounds each run. The processes end with :meth:`close`, with this object, with
    this process, and with any failed run, whichever comes first.
    """

    # What broke a run may be gone with its processes.
    starts_anew = True

    def __init__(self, kind: str, size: int, timeout: float) -> None:
        self._kind = kind
        self._size = size
        self._timeout = timeout
        self._world = f"{kind}:{size}"
        self._workers: list[_Worker] = []
        self._folder = ""
        self._end: Callable[[], object] = lambda: None
        self._busy = threading.Lock()

    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None, faults: Sequence[Fault]
    ) -> tuple[list[T], list[list[Call]], list[tuple[Span, ...]]]:
        """What each rank returned, and called, and when."""
        payload = pack_case(program, args, faults)
        with self._busy, self._ended_on_failure():
            if not self._workers:
                self._start()
            progress = self._feed(pack((sys.path, payload)), watch)
            results = progress.results()
            pass_on_words(self._folder, self._size)
        if not all(returned.serves_on for returned in progress.returned.values()):
            self.close()  # the program has destroyed the group
        return results, progress.calls, progress.spans()

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
        # A worker of another pool that still imports the script which started it; Python looks there too.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_STARTS_ON_IMPORT)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "sim.processes.worker"])
        self._folder = tempfile.mkdtemp(prefix="cpkv-")
        workers = self._workers
        self._end = weakref.finalize(self, _end, workers, self._folder, os.getpid())
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(self._kind, rank, self._size, self._folder, theirs),
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
            progress.note(rank, message)
            if isinstance(message, Ready):
                ready.add(rank)

        self._listen(progress, hear, _START_SECONDS, lambda: len(ready) == self._size)
        if any(worker.process.exitcode == _STARTS_ON_IMPORT for worker in self._workers):
            raise _starts_on_import(self._world)
        if len(ready) < self._size:
            raise progress.never_started(ready, _START_SECONDS)

    def _feed(self, case: bytes, watch: Watch | None) -> Progress:
        progress = Progress(self._world, self._size)

        def hear(rank: int, message: Message) -> None:
            progress.note(rank, message)
            if watch is not None and isinstance(message, Issues):
                watch(rank, message.call)

        for worker in self._workers:
            with suppress(ConnectionError):  # it died; its sentinel tells
                worker.pipe.send_bytes(case)
        self._listen(progress, hear, _LOAD_SECONDS, progress.all_loaded)
        if progress.all_loaded():
            self._listen(progress, hear, self._timeout, progress.complete)
        if not progress.complete():
            if not progress.troubled():
                self._ask_where(progress)
            failure = progress.verdict(self._timeout if progress.all_loaded() else _LOAD_SECONDS)
            if isinstance(failure, RunFailed):
                failure.spans = progress.spans_heard()
            raise failure
        return progress

    def _ask_where(self, progress: Progress) -> None:
        """Time is up: let the ranks that have not returned write down where they are."""
        asked = {
            worker.rank: stack_file(self._folder, worker.rank)
            for worker in self._workers
            if worker.rank not in progress.returned and worker.process.is_alive()
        }
        for rank in asked:
            identity = self._workers[rank].process.pid
            assert identity is not None
            with suppress(ProcessLookupError):  # it has just died
                os.kill(identity, STACK_SIGNAL)
        until = time.monotonic() + _ASK_SECONDS
        while asked and time.monotonic() < until:
            time.sleep(_ASK_SECONDS / 20)
            for rank, file in list(asked.items()):
                stack = file.read_text()
                line = line_of_stack(stack)
                if line:
                    progress.note(rank, Alive(line, waits_by_stack(stack)))
                    del asked[rank]

    def _listen(
        self,
        progress: Progress,
        hear: Callable[[int, Message], None],
        seconds: float,
        complete: Callable[[], bool],
    ) -> None:
        """Hear all ranks until the case is complete, or its failure settled, or time is up."""
        until = time.monotonic() + seconds
        memory_kills = count_memory_kills()
        noticed = False
        with _selecting(self._workers) as selector:
            while not complete() and not progress.settled():
                if not noticed and progress.troubled():
                    noticed = True
                    patience = _CAUSE_SECONDS if progress.lacks_cause() else _SETTLE_SECONDS
                    until = min(until, time.monotonic() + patience)
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return
                for worker in {key.data for key, _ in selector.select(remaining)}:
                    alive = worker.process.is_alive()  # asked first: then all it said is in the pipe
                    for message in worker.hear():
                        hear(worker.rank, message)
                    if not alive:
                        cause = cause_of_death(worker.process.exitcode)
                        of_memory = "SIGKILL" in cause and count_memory_kills() > memory_kills
                        words = last_words(self._folder, worker.rank)
                        progress.dead[worker.rank] = Death(cause, of_memory, words)
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


def _starts_on_import(world: str) -> InvalidInput:
    script = getattr(sys.modules["__main__"], "__file__", None)
    return InvalidInput(
        f"the script that starts {world}",
        expected='`if __name__ == "__main__":` around what it runs, as the process of each rank imports it',
        received="a script that starts a world when it is imported",
        where=Where(path=script),
    )


@contextmanager
def _selecting(workers: Sequence[_Worker]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
            selector.register(worker.process.sentinel, selectors.EVENT_READ, worker)
        yield selector
