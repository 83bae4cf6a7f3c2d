"""What a rank program runs on.

A program is an ordinary ``torch.distributed`` program, ``program(group, *args)``, with the default process
group initialised and passed as ``group``. It does not know its world; its results must not depend on it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim import ledger
from sim.failures import WorldUnavailable
from sim.lockstep.run import LockstepRun
from sim.processes.pool import GlooPool

T = TypeVar("T")
Watch = Callable[[int, Call], None]

# Threads, one running at a time: this many start and stop in under a second.
LARGEST_LOCKSTEP = 1024
# Processes of about 100 MB each, every one connected to every other.
LARGEST_GLOO = 64
_LONGEST_TIMEOUT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """A finished run: what each rank returned, and the collectives it called, in rank order."""

    results: tuple[T, ...]
    ledgers: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True, slots=True)
class Available:
    """Whether this machine can run a kind of world."""

    kind: str
    available: bool
    largest: int  # ranks; 0 if not available
    note: str  # what the ranks are, or what is missing


class _Executor(Protocol):
    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None
    ) -> tuple[list[T], list[list[Call]]]: ...

    def close(self) -> None: ...


class World:
    """``size`` ranks of one kind. Make one with :meth:`lockstep`, :meth:`gloo` or :meth:`parse`.

    >>> def who(group):
    ...     return f"rank {group.rank()} of {group.size()}"
    >>> with World.lockstep(2) as world:
    ...     world.run(who)
    ['rank 0 of 2', 'rank 1 of 2']
    """

    def __init__(self, kind: str, size: int, executor: _Executor) -> None:
        self.kind = kind
        self.size = size
        self._executor = executor

    @classmethod
    def lockstep(cls, size: int, *, seed: int = 0) -> World:
        """All ranks in this process, one running at a time, in an order drawn from ``seed``.

        Every run with one seed has one schedule, whatever ran before. All ranks get the *same* argument
        objects: a program must not write into them. Deadlocks and diverging calls are reported at once.
        torch computes with one thread within the run, as in a gloo worker, so that results have the same
        bits. Runs of several threads of this process take turns.

        Raises InvalidInput unless 1 ≤ size ≤ 1024.
        """
        _check_size("lockstep", size, LARGEST_LOCKSTEP)
        return cls("lockstep", size, _Lockstep(size, seed))

    @classmethod
    def gloo(cls, size: int, *, timeout: float = 60.0) -> World:
        """One process a rank, on this machine, in a gloo group.

        The processes start at the first run, serve all runs, and end with :meth:`close`, with this object
        or with this process; after a failed run the next one starts new ones. Program, arguments and
        results travel by pickle, the program by its name. ``timeout`` bounds each run, in seconds.

        Raises InvalidInput unless 1 ≤ size ≤ 64 and 0 < timeout ≤ one day; WorldUnavailable if torch was
        built without gloo or this system has no forkserver.
        """
        _check_size("gloo", size, LARGEST_GLOO)
        if not 0 < timeout <= _LONGEST_TIMEOUT_SECONDS:
            raise InvalidInput(
                "timeout",
                expected=f"seconds, above 0 and at most {_LONGEST_TIMEOUT_SECONDS:g}",
                received=timeout,
                where=Where(path="timeout"),
            )
        missing = _missing_for_gloo()
        if missing:
            raise WorldUnavailable("gloo on this machine", expected="torch with gloo", received=missing)
        return cls("gloo", size, GlooPool(size, timeout))

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> World:
        """The world of a name such as "lockstep:4" or "gloo:2"; ``seed`` is that of a lockstep schedule.

        Raises InvalidInput for any other text or size.
        """
        kind, _, size = text.partition(":")
        if kind not in ("lockstep", "gloo") or not (size.isascii() and size.isdigit()):
            raise InvalidInput(
                "world",
                expected='"lockstep:" or "gloo:" and a number of ranks',
                received=repr(text),
                where=Where(path="world"),
                fix='For example "lockstep:4".',
            )
        return cls.lockstep(int(size), seed=seed) if kind == "lockstep" else cls.gloo(int(size))

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}"

    def __repr__(self) -> str:
        return f"<World {self}>"

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Callable[..., T], *args: Any) -> list[T]:
        """What ``program(group, *args)`` returns on each rank, in rank order. Raises as :meth:`execute`."""
        return list(self.execute(program, *args).results)

    def execute(self, program: Callable[..., T], *args: Any, watch: Watch | None = None) -> Run[T]:
        """Results and ledgers of each rank.

        ``watch(rank, call)`` is called in this process for each call that a rank is about to issue; what it
        raises ends the run and is raised here.

        Raises :class:`~sim.failures.RunFailed`, always one of: RankFailed (a rank raised or died),
        Diverged (V6), Deadlock (lockstep), TimedOut and WorldUnavailable (gloo). Raises InvalidInput if
        program, arguments or results cannot travel (gloo), or if the run is started inside a rank
        (lockstep). Nothing of a failed run is left running, and the world can be used again.
        """
        results, ledgers = self._executor.execute(program, args, watch)
        divergence = ledger.first_divergence(ledgers)
        if divergence is not None:
            raise ledger.diverged(str(self), divergence)
        return Run(tuple(results), tuple(tuple(calls) for calls in ledgers))

    def close(self) -> None:
        """End what the world keeps running between runs. A later run starts it again."""
        self._executor.close()


@dataclass(frozen=True, slots=True)
class _Lockstep:
    size: int
    seed: int

    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None
    ) -> tuple[list[T], list[list[Call]]]:
        return LockstepRun(self.size, self.seed).execute(program, args, watch)

    def close(self) -> None:
        """Nothing is kept between runs."""


def available() -> tuple[Available, ...]:
    """What this machine can run, of all kinds of worlds."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    missing = _missing_for_gloo()
    return (
        Available("lockstep", True, LARGEST_LOCKSTEP, "threads of one process, one running at a time"),
        Available("gloo", False, 0, missing)
        if missing
        else Available("gloo", True, LARGEST_GLOO, f"processes, on {processors} processors"),
        Available("nccl", False, 0, _missing_for_nccl()),
    )


def _missing_for_gloo() -> str:
    if not dist.is_gloo_available():
        return "torch was built without gloo"
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "this system cannot start processes by forkserver"
    return ""


def _missing_for_nccl() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if not dist.is_nccl_available():
        return "torch was built without NCCL"
    return "this version has no NCCL world"


def _check_size(kind: str, size: int, largest: int) -> None:
    # bool is an int, and World.gloo(True) is a mistake.
    if type(size) is not int or not 1 <= size <= largest:
        raise InvalidInput(
            f"ranks of {kind}",
            expected=f"an integer from 1 to {largest}",
            received=repr(size),
            where=Where(path="size"),
        )
