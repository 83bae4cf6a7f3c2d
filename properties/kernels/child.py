"""The process in which a candidate runs. It says what it is about to do, so that a crash has a place.

What it says, a parent hears (:mod:`properties.kernels.watched`); what the candidate prints goes to a file.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

import torch

from properties.kernels.across import try_case
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.kernels.cases.collective import AcrossCase
from properties.kernels.handling import PLAIN, Handling
from properties.kernels.selection import corners, fits
from properties.kernels.speed import Speed, largest, speed
from properties.kernels.trial import Trial
from properties.kernels.tried import Attempt, Counterexample, Search, Tried
from refmodel.errors import Finding, InvalidInput
from refmodel.ops.declare import Capabilities
from sim.failures import WorldUnavailable
from sim.gate.runs import Worlds
from sim.gate.setting import Setting, kind_and_size
from sim.kernels.candidate import Candidate
from sim.kernels.loading import named
from sim.kernels.target import Target, load_target

STACK_SIGNAL = signal.SIGUSR1  # the process writes down where it is


@dataclass(frozen=True, slots=True)
class Task:
    """What a child is asked for."""

    op: str
    device: str = "cpu"
    world: str = ""  # of collectives; empty: lockstep, of as many ranks as a case has
    examples: int = 0
    seed: int = 0
    only: tuple[tuple[Case, Handling | None], ...] = ()  # these cases, in this way or in all of them
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The target is there."""

    capabilities: dict[str, Capabilities]  # by operation
    near_misses: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked for has no meaning, or no world."""

    error: InvalidInput | WorldUnavailable


@dataclass(frozen=True, slots=True)
class Begins:
    """The candidate is called now."""

    case: Case
    handling: Handling


@dataclass(frozen=True, slots=True)
class Returned:
    """It has returned, or raised."""


@dataclass(frozen=True, slots=True)
class Done:
    """All that was asked for."""

    tried: Tried
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Troubled:
    """The kit itself failed: nothing is said about the candidate."""

    text: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The memory of the GPU does not suffice: whose fault that is, nobody knows."""

    text: str


Message = Loaded | Refused | Begins | Returned | Done | Troubled | NoRoom


def serve(target: str, op: str | None, output: str, pipe: Connection) -> None:
    """Load the target, then do one task after the other until the pipe closes."""
    _write_to(Path(output))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        found = load_target(target, op)
    except InvalidInput as error:
        pipe.send(Refused(error))
        return
    pipe.send(Loaded({name: one.capabilities for name, one in found.candidates.items()}, found.near_misses))
    with Worlds(Setting()) as worlds:
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(_Work(found, task, pipe, worlds).answer())


def _write_to(output: Path) -> None:
    """Whatever this process prints, and where it was when it died, goes to that file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    faulthandler.enable(all_threads=False)
    faulthandler.register(STACK_SIGNAL, all_threads=False)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@dataclass
class _Work:
    """One task."""

    target: Target
    task: Task
    pipe: Connection
    worlds: Worlds

    def answer(self) -> Message:
        try:
            return self._done()
        except (InvalidInput, WorldUnavailable) as error:
            return Refused(error)
        except torch.OutOfMemoryError as error:
            return NoRoom(str(error))
        except Exception:  # of the kit, or of a case: the candidate's are findings
            return Troubled(traceback.format_exc())
        finally:
            if self.task.device == "cuda":  # others share the GPU
                torch.cuda.empty_cache()

    def _done(self) -> Done:
        tried = self._only() if self.task.only else self._search().run()
        timed = tried.counterexample is None and self.task.timed and not self.candidate.op.collective
        return Done(tried, self._speed() if timed else None)

    def _only(self) -> Tried:
        tried = Tried(0, 0)
        for case, way in self.task.only:
            if way is None:
                tried = self._search().replay(case)
            else:
                finding = self._attempt(case, way)
                found = None if finding is None else Counterexample(case, way, finding)
                tried = Tried(tried.cases + 1, tried.attempts + 1, found)
            if tried.counterexample is not None:
                break
        return tried

    def _speed(self) -> Speed:
        capabilities = self.candidate.capabilities
        cases = [case for case, _ in self.task.only] or corners(self.kind, capabilities)
        if self.task.device == "cuda" and not self.task.only:
            cases = [case for case in (self.kind.large(),) if case and fits(case, capabilities)] or cases
        case = largest(cases)
        with self._announced(case, PLAIN):
            return speed(self.candidate, case, self.task.device)

    @property
    def kind(self) -> type[Case]:
        return CASES[self.task.op]

    @property
    def candidate(self) -> Candidate:
        return self.target.candidates[self.task.op]

    def _search(self) -> Search:
        return Search(self.candidate, self.kind, self._attempt, self.task.examples, self.task.seed)

    @cached_property
    def _attempt(self) -> Attempt:
        return self._across if self.candidate.op.collective else self._alone

    def _alone(self, case: Case, handling: Handling) -> Finding | None:
        trial = Trial(self.candidate, self.task.device, lambda: self._announced(case, handling))
        return trial.alone(case) if case == self.kind.huge() else trial.once(case, handling)

    def _across(self, case: Case, handling: Handling) -> Finding | None:
        across = cast("AcrossCase", case)
        simulated = "lockstep-cuda" if self.task.device == "cuda" else "lockstep"
        kind, size = kind_and_size(self.task.world or simulated)
        if size is not None:
            across = across.on(size)
        world = self.worlds.get(kind, across.world)
        by_name = None if kind.startswith("lockstep") else named(self.target.name, self.task.op)
        return try_case(
            self.candidate,
            across,
            world,
            handling,
            named=by_name,
            running=lambda: self._announced(across, handling),
        )

    @contextmanager
    def _announced(self, case: Case, handling: Handling) -> Iterator[None]:
        self.pipe.send(Begins(case, handling))
        try:
            yield
        except BaseException:
            if self.task.device == "cuda" and _is_lost():
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            raise
        finally:
            self.pipe.send(Returned())


def _is_lost() -> bool:
    """Whether this process can no longer use its GPU: after an illegal access all that follows fails, too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
