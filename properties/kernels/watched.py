"""The parent of the processes in which a candidate runs: it bounds each call, and survives all of them."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from properties.kernels import faults
from properties.kernels.child import (
    STACK_SIGNAL,
    Begins,
    Done,
    Loaded,
    Message,
    NoRoom,
    Refused,
    Returned,
    Task,
    Troubled,
    serve,
)
from properties.kernels.tried import Counterexample
from refmodel.errors import Finding, InvalidInput
from sim.processes.death import cause_of_death, count_memory_kills

_START_SECONDS = 300.0  # to import a target, which may compile
_KIT_SECONDS = 600.0  # for what the kit itself does between two calls of the candidate
_STACK_SECONDS = 0.5  # for a process to write down where it is
_MOST_PRINTED = 4000  # characters at the end of what a process printed

# Lines of a stack that say nothing about the candidate.
_KIT = "(across|check|child|speed|trial|tried|watched)"
_NOT_THEIRS = re.compile(
    rf'File ".*(/properties/kernels/{_KIT}\.py|/sim/kernels/candidate\.py|/multiprocessing/|/torch/utils/'
    r'_contextlib\.py|/hypothesis/|<string>)"|^Extension modules: '
)
_THREAD = re.compile(r"block: \[[\d,]+\], thread: \[[\d,]+\]")


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that did not answer: what it was at, and how that ended."""

    during: Begins | None  # None: at the kit's own work
    attempts: int  # calls of the candidate before
    kind: str  # of fault: crash or hang
    received: str
    of_memory: bool = False  # the machine ran out of it

    @property
    def counterexample(self) -> Counterexample | None:
        if self.during is None:
            return None
        expected = faults.statement(self.kind)
        finding = Finding(self.kind, "calling it", expected, self.received)
        return Counterexample(self.during.case, self.during.handling, finding)


@dataclass(eq=False, slots=True)
class _Child:
    process: BaseProcess
    pipe: Connection
    output: Path
    loaded: Loaded


@dataclass
class Children:
    """One child at a time; a fresh one after each that failed. ``limit``: seconds a call may take."""

    target: str
    op: str | None = None
    limit: float = 60.0
    _child: _Child | None = None
    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="cpkv-")
    )
    _started: int = 0
    _last: Begins | None = None

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._folder.cleanup()

    def beside(self) -> Children:
        """Others for the same target."""
        return Children(self.target, self.op, self.limit)

    def loaded(self) -> Loaded:
        """What the target has. :class:`InvalidInput` if it cannot be loaded."""
        return self._there().loaded

    def ask(self, task: Task, *, fresh: bool = False) -> Done | Troubled | NoRoom | Ended:
        """Have a task done. :class:`InvalidInput` or ``WorldUnavailable`` if it has no meaning here."""
        if fresh:
            self.end()
        child = self._there()
        with suppress(BrokenPipeError, ConnectionError):  # it died; its sentinel tells
            child.pipe.send(task)
        answer = self._listen(child, self.limit)
        if isinstance(answer, Refused):
            raise answer.error
        if not isinstance(answer, Done) or answer.tried.counterexample is not None:
            self.end()  # nobody knows what it has done to the process
        assert not isinstance(answer, Loaded | Begins | Returned)
        return answer

    def end(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            _kill(child.process, child.pipe)

    def printed(self) -> str:
        """The end of what the latest child printed."""
        return _tail(self._output(self._started)) if self._started else ""

    def _output(self, number: int) -> Path:
        return Path(self._folder.name) / f"{number}.txt"

    def _there(self) -> _Child:
        if self._child is None:
            self._child = self._start()
        return self._child

    def _start(self) -> _Child:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "properties.kernels.child"])
        self._started += 1
        output = self._output(self._started)
        output.touch()
        ours, theirs = context.Pipe()
        # Not a daemon: ranks of a world are its children. It ends when this process does.
        process = context.Process(target=serve, args=(self.target, self.op, str(output), theirs))
        process.start()
        theirs.close()
        child = _Child(process, ours, output, Loaded({}, ()))
        answer = self._listen(child, _START_SECONDS)
        if isinstance(answer, Loaded):
            child.loaded = answer
            return child
        _kill(process, ours)
        if isinstance(answer, Refused):
            raise answer.error
        received = answer.received if isinstance(answer, Ended) else str(answer)
        raise InvalidInput(
            f"target {self.target}", expected="a module that can be imported", received=received
        )

    # -- listening -----------------------------------------------------------------------------------------

    def _listen(self, child: _Child, limit: float) -> Loaded | Refused | Done | Troubled | NoRoom | Ended:
        """Until it answers, or ends, or takes too long."""
        kills = count_memory_kills()
        during: Begins | None = None
        attempts = 0
        until = time.monotonic() + max(limit, _KIT_SECONDS)
        while True:
            ready = wait([child.pipe, child.process.sentinel], max(0.0, until - time.monotonic()))
            message = _heard(child.pipe) if ready else None
            if isinstance(message, Begins):
                during, attempts = message, attempts + 1
                until = time.monotonic() + limit
            elif isinstance(message, Returned):
                during = None
                until = time.monotonic() + _KIT_SECONDS
            elif message is not None:
                return message
            elif not ready:
                return Ended(during or self._last, attempts, faults.HANG, self._stuck(child, limit))
            else:
                child.process.join()
                cause = cause_of_death(child.process.exitcode)
                of_memory = "SIGKILL" in cause and count_memory_kills() > kills
                said = _tail(child.output)
                received = f"{cause}\n{said}" if said else cause
                return Ended(during or self._last, attempts, faults.CRASH, received, of_memory)
            self._last = during or self._last

    def _stuck(self, child: _Child, limit: float) -> str:
        """Where it is, in its own words."""
        before = child.output.stat().st_size
        assert child.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(child.process.pid, STACK_SIGNAL)
        until = time.monotonic() + _STACK_SECONDS
        while child.output.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.01)
        return f"nothing within {limit:g} s\n{_tail(child.output)}".rstrip()


def _heard(pipe: Connection) -> Message | None:
    """The next thing that was said; None if there is nothing, and will not be."""
    try:
        if pipe.poll():
            message: Message = pipe.recv()
            return message
    except (EOFError, ConnectionError):
        pass
    return None


def _kill(process: BaseProcess, pipe: Connection) -> None:
    process.kill()
    process.join()
    process.close()
    pipe.close()


def _tail(output: Path) -> str:
    """The end of a file, without what is not theirs, and each line once: threads of a GPU say the same."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if not _NOT_THEIRS.search(line)]
    return "\n".join({_THREAD.sub("", line): line for line in lines}.values())[-_MOST_PRINTED:].strip()
