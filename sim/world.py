"""What a rank program runs on.

A program is an ordinary ``torch.distributed`` program, ``program(group, *args)``, with the default process
group initialised and passed as ``group``. It does not know its world; its results must not depend on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.diagnosis.explain import check_calls
from sim.failures import InfrastructureFailed, RetryWarning, WorldUnavailable
from sim.faults.fault import Fault, check_faults, check_happened
from sim.lockstep.run import LockstepRun, Outcome
from sim.lockstep.schedule import Schedule, randomly
from sim.lockstep.self_check import self_check
from sim.machine import (
    LARGEST_GLOO,
    LARGEST_LOCKSTEP,
    missing_for_cuda,
    missing_for_gloo,
    missing_for_nccl,
    missing_for_torchrun,
)
from sim.processes.pool import Pool
from sim.surface.recorder import Span
from sim.torchrun.member import Member

T = TypeVar("T")
Watch = Callable[[int, Call], None]

KINDS = ("lockstep", "lockstep-cuda", "gloo", "nccl", "torchrun")
_LONGEST_TIMEOUT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Run(Generic[T]):
    """A finished run: what each rank returned, and the collectives it called, in rank order."""

    results: tuple[T, ...]
    ledgers: tuple[tuple[Call, ...], ...]
    spans: tuple[tuple[Span, ...], ...] = ()  # when each call was issued, and finished
    retried: bool = False  # at the second attempt, as what it ran on had broken in the first
    schedule: str = ""  # the token that replays it; of lockstep only


class _Executor(Protocol):
    # Whether a run after a failed one meets nothing of what that ran on.
    starts_anew: bool

    def execute(
        self, program: Callable[..., Any], args: Sequence[Any], watch: Watch | None, faults: Sequence[Fault]
    ) -> tuple[list[Any], list[list[Call]], list[tuple[Span, ...]]] | Outcome: ...

    def close(self) -> None: ...


class World:
    """``size`` ranks of one kind, made by :meth:`lockstep`, :meth:`gloo`, :meth:`nccl` or :meth:`started`.

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
    def lockstep(
        cls, size: int, *, seed: int = 0, schedule: Schedule | None = None, device: str = "cpu"
    ) -> World:
        """All ranks in this process, one running at a time, in the order of a schedule.

        ``schedule`` is one of :mod:`sim.lockstep.schedule`; None draws every choice from ``seed``. Every run
        with one schedule is the same, whatever ran before. ``device`` "cuda" binds this process's current
        GPU to all groups (``refmodel.collectives.device_of``): the ranks share it.

        All ranks get the *same* argument objects: a program must not write into them. Deadlocks and
        diverging calls are reported at once. torch computes with one thread within the run, as in a gloo
        worker, so that results have the same bits; each rank has a torch generator of its own, which starts
        as in a new process. Runs of several threads of this process take turns.

        Raises InvalidInput unless 1 ≤ size ≤ 1024; WorldUnavailable for "cuda" without a GPU.
        """
        _check_size("lockstep", size, LARGEST_LOCKSTEP)
        kind = "lockstep" if device == "cpu" else f"lockstep-{device}"
        return cls(kind, size, _Lockstep(size, schedule or randomly(seed), _bound_device(device)))

    @classmethod
    def gloo(cls, size: int, *, timeout: float = 60.0) -> World:
        """One process a rank, on this machine, in a gloo group.

        The processes start at the first run, serve all runs, and end with :meth:`close`, with this object
        or with this process; after a failed run the next one starts new ones. Program, arguments and
        results travel by pickle, the program by its name. ``timeout`` bounds each run, in seconds from
        when all ranks have imported the program.

        Raises InvalidInput unless 1 ≤ size ≤ 64 and 0 < timeout ≤ one day; WorldUnavailable if torch was
        built without gloo or this system has no forkserver.
        """
        _check_size("gloo", size, LARGEST_GLOO)
        _check_timeout(timeout)
        _check_available("gloo", "torch with gloo", missing_for_gloo())
        return cls("gloo", size, Pool("gloo", size, timeout))

    @classmethod
    def nccl(cls, size: int, *, timeout: float = 60.0) -> World:
        """One process and one GPU a rank, on this machine, in an NCCL group.

        As :meth:`gloo`. Rank r has GPU r, as its current device and as ``group.bound_device_id``. Tensors in
        arguments and results travel by value and arrive on the CPU.

        Raises InvalidInput unless size ≥ 1 and 0 < timeout ≤ one day; WorldUnavailable if there are fewer
        GPUs than ranks, or no NCCL.
        """
        _check_size("nccl", size, LARGEST_GLOO)
        _check_timeout(timeout)
        _check_available("nccl", "a GPU a rank and torch with NCCL", missing_for_nccl())
        gpus = torch.cuda.device_count()
        if size > gpus:
            raise WorldUnavailable(
                "nccl on this machine",
                expected=f"{size} GPUs, one a rank",
                received=f"{gpus} GPU{'' if gpus == 1 else 's'}",
                fix=f"Run up to {gpus} ranks here, more under torchrun or on lockstep.",
            )
        return cls("nccl", size, Pool("nccl", size, timeout))

    @classmethod
    def started(cls, *, backend: str | None = None, timeout: float = 60.0) -> World:
        """The world that this process was started in, as one of its ranks: by torchrun, say.

        Every process makes it and runs the same programs in the same order, each as its own rank; each gets
        the results and ledgers of all. A failure of one rank is raised on all. ``backend`` is "gloo" or
        "nccl"; None takes NCCL where each process of a machine can have a GPU.

        Raises WorldUnavailable if RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not set or torch lacks the
        backend; InvalidInput for another backend or timeout, or if this process already is in a process
        group.
        """
        _check_timeout(timeout)
        _check_available("torchrun", "a process that torchrun started", missing_for_torchrun())
        member = Member(backend, timeout)
        return cls("torchrun", member.size, member)

    @classmethod
    def parse(cls, text: str, *, seed: int = 0, schedule: Schedule | None = None) -> World:
        """The world of a name such as "lockstep:4" or "gloo:2"; the rest is for :meth:`lockstep`.

        "lockstep-cuda:8" is lockstep with its tensors on this machine's GPU.
        "torchrun:8" is the world that was started, if it has 8 ranks; "torchrun" whatever it has.

        Raises InvalidInput for any other text or size, and as the constructor of that kind.
        """
        kind, _, size = text.partition(":")
        if kind not in KINDS or not ((size.isascii() and size.isdigit()) or text == "torchrun"):
            raise InvalidInput(
                "world",
                expected=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, a colon and a number of ranks",
                received=repr(text),
                where=Where(path="world"),
                fix='For example "lockstep:4".',
            )
        match kind:
            case "lockstep":
                return cls.lockstep(int(size), seed=seed, schedule=schedule)
            case "lockstep-cuda":
                return cls.lockstep(int(size), seed=seed, schedule=schedule, device="cuda")
            case "gloo":
                return cls.gloo(int(size))
            case "nccl":
                return cls.nccl(int(size))
            case _:
                return cls._started_with(int(size) if size else None)

    @classmethod
    def _started_with(cls, size: int | None) -> World:
        world = cls.started()
        if size is not None and size != world.size:
            raise InvalidInput(
                "ranks of torchrun",
                expected=f"{world.size}, as were started",
                received=size,
                where=Where(path="world"),
                fix="Start as many processes as the program has ranks.",
            )
        return world

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

    def execute(
        self,
        program: Callable[..., T],
        *args: Any,
        watch: Watch | None = None,
        faults: Sequence[Fault] = (),
    ) -> Run[T]:
        """Results, ledgers and spans of each rank.

        ``watch(rank, call)`` is called in this process for each call that a rank is about to issue; what it
        raises ends the run and is raised here. ``faults`` are what the ranks suffer.

        Raises :class:`~sim.failures.RunFailed`, always one of: RankFailed (a rank raised or died),
        Diverged (V6), Deadlock (lockstep), TimedOut and InfrastructureFailed (processes). Raises
        InvalidInput if program, arguments or results cannot travel (processes), or if the run is started
        inside a rank (lockstep). Nothing of a failed run is left running, and the world can be used again.

        Where processes or their connections break, and not the program, it is run once more, from its
        start and with new processes: then RetryWarning says so, ``retried`` is set, and ``watch`` hears its
        calls from #0 again. A program that failed, or that diverged, is never run again.
        """
        check_faults(faults, self.size)
        retried = False
        try:
            outcome = self._executor.execute(program, args, watch, faults)
        except InfrastructureFailed as failure:
            if not self._executor.starts_anew:
                raise
            warnings.warn(RetryWarning(f"{self} runs {_name(program)} again: {failure}"), stacklevel=2)
            retried = True
            outcome = self._executor.execute(program, args, watch, faults)
        return self._finished(outcome, retried)

    def self_check(self, program: Callable[..., T], *args: Any) -> Run[T]:
        """Run twice by one schedule, and compare what every rank calls, sends and returns.

        Raises Nondeterministic if something that the schedule does not control had a say, and names the
        first call that differs; otherwise as :meth:`execute`. Of lockstep only: InvalidInput in other worlds.
        """
        if not isinstance(self._executor, _Lockstep):
            raise InvalidInput(
                "world of a self-check",
                expected="lockstep, whose schedules can be replayed",
                received=str(self),
                where=Where(path="world"),
            )
        return self._finished(self._executor.self_check(program, args), retried=False)

    def _finished(
        self, outcome: tuple[list[Any], list[list[Call]], list[tuple[Span, ...]]] | Outcome, retried: bool
    ) -> Run[Any]:
        if not isinstance(outcome, Outcome):
            outcome = Outcome(*outcome)
        check_happened(outcome.results)
        check_calls(str(self), outcome.calls)
        calls, spans = tuple(map(tuple, outcome.calls)), tuple(outcome.spans)
        return Run(tuple(outcome.results), calls, spans, retried, outcome.schedule)

    def close(self) -> None:
        """End what the world keeps running between runs. A later run starts it again."""
        self._executor.close()


@dataclass(frozen=True, slots=True)
class _Lockstep:
    size: int
    schedule: Schedule
    device: torch.device | None

    starts_anew = False

    def execute(
        self, program: Callable[..., Any], args: Sequence[Any], watch: Watch | None, faults: Sequence[Fault]
    ) -> Outcome:
        run = LockstepRun(self.size, self.schedule, program, device=self.device, faults=faults)
        return run.execute(args, watch)

    def self_check(self, program: Callable[..., Any], args: Sequence[Any]) -> Outcome:
        def make(schedule: Schedule) -> LockstepRun:
            return LockstepRun(self.size, schedule, program, device=self.device)

        return self_check(make, self.schedule, args)

    def close(self) -> None:
        """Nothing is kept between runs."""


def _bound_device(device: str) -> torch.device | None:
    if device not in ("cpu", "cuda"):
        raise InvalidInput(
            "device of lockstep",
            expected='"cpu" or "cuda"',
            received=repr(device),
            where=Where(path="device"),
        )
    if device == "cpu":
        return None
    _check_available("lockstep-cuda", "a GPU", missing_for_cuda())
    return torch.device("cuda", torch.cuda.current_device())


def _check_size(kind: str, size: int, largest: int) -> None:
    # bool is an int, and World.gloo(True) is a mistake.
    if type(size) is not int or not 1 <= size <= largest:
        raise InvalidInput(
            f"ranks of {kind}",
            expected=f"an integer from 1 to {largest}",
            received=repr(size),
            where=Where(path="size"),
        )


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout <= _LONGEST_TIMEOUT_SECONDS:
        raise InvalidInput(
            "timeout",
            expected=f"seconds, above 0 and at most {_LONGEST_TIMEOUT_SECONDS:g}",
            received=timeout,
            where=Where(path="timeout"),
        )


def _check_available(kind: str, expected: str, missing: str) -> None:
    if missing:
        raise WorldUnavailable(f"{kind} on this machine", expected=expected, received=missing)


def _name(program: Callable[..., object]) -> str:
    return getattr(program, "__qualname__", repr(program))
