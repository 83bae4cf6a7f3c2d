"""What is known of a run on processes while it runs, and in the end why it failed."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.diagnosis.explain import diagnose, explain
from sim.diagnosis.ledger import Comparison, diverged
from sim.failures import InfrastructureFailed, RankFailed, RunFailed, TimedOut
from sim.processes.laggards import find_standstill
from sim.processes.messages import Alive, Begins, Failed, Issues, Loaded, Message, Returned
from sim.processes.parcel import not_sendable, unpack_result
from sim.surface.recorder import Span, spans_of


@dataclass(frozen=True, slots=True)
class Death:
    """A rank whose process is gone.

    >>> print(Death("killed by SIGABRT", last_words="terminate called\\n  what(): no route to host"))
    killed by SIGABRT, saying: terminate called what(): no route to host
    """

    cause: str  # "killed by SIGKILL"
    of_memory: bool = False  # the machine had none left
    last_words: str = ""

    def __str__(self) -> str:
        words = " ".join(self.last_words.split())
        return f"{self.cause}, saying: {words}" if words else self.cause


@dataclass(eq=False)
class Progress:
    """What is known of one program on all ranks."""

    world: str
    size: int
    calls: list[list[Call]] = field(default_factory=list)
    heard: list[list[int]] = field(default_factory=list)  # when, of each call: nanoseconds of this process
    begun: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    lines: dict[int, str] = field(default_factory=dict)  # of the program, where each rank was last seen
    waits: dict[int, bool] = field(default_factory=dict)  # in its last call, of each rank that was asked
    returned: dict[int, Returned] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    dead: dict[int, Death] = field(default_factory=dict)  # in the order in which they were found

    def __post_init__(self) -> None:
        self.calls = [[] for _ in range(self.size)]
        self.heard = [[] for _ in range(self.size)]
        self.comparison = Comparison(self.size)

    def note(self, rank: int, message: Message) -> None:
        match message:
            case Begins():
                self.begun.add(rank)
            case Loaded():
                self.loaded.add(rank)
            case Issues(call):
                self.calls[rank].append(call)
                self.heard[rank].append(time.monotonic_ns())
                self.comparison.issued(rank, call)
            case Alive(line, waits):
                self.lines[rank] = line
                if waits is not None:
                    self.waits[rank] = waits
            case Returned():
                self.returned[rank] = message
                self.comparison.finished(rank)
            case Failed():
                self.failed[rank] = message

    def spans_heard(self) -> tuple[tuple[Span, ...], ...]:
        """Of a run that failed: each call lasts from when it was heard of to the next one, or to now."""
        now = time.monotonic_ns()
        return tuple(
            tuple(map(Span, calls, heard, [*heard[1:], now]))
            for calls, heard in zip(self.calls, self.heard, strict=True)
        )

    def all_loaded(self) -> bool:
        return len(self.loaded) == self.size

    def complete(self) -> bool:
        return len(self.returned) == self.size and not self.troubled()

    def troubled(self) -> bool:
        return bool(self.failed or self.dead) or self.comparison.divergence() is not None

    def lacks_cause(self) -> bool:
        """Whether all that is known is that ranks lost another one: which, and why, may still come."""
        lost = bool(self.failed) and all(failed.lost_connection for failed in self.failed.values())
        return lost and not self.dead and self.comparison.divergence() is None

    def settled(self) -> bool:
        """Whether nothing that may still come can change the verdict."""
        silent = self.size - len(self.returned.keys() | self.failed.keys() | self.dead.keys())
        # Ranks that exchange the wrong data go on, and soon show what it was that one of them did.
        found = diagnose(self.calls, {}) if self.comparison.decided() else None
        is_clear = found is not None and found.fault in ("kind", "detail", "dtype", "shape", "swap")
        return is_clear or (silent == 0 and not self.lacks_cause())

    def verdict(self, timeout: float) -> RunFailed | InvalidInput:
        """Why it failed; the first cause, where one failure has led to others."""
        divergence = self.comparison.divergence()
        # Whoever failed or died may have done so for what another rank did, and would have called on.
        returned = dict.fromkeys(self.returned, "returned")
        if divergence is not None:
            failure: RunFailed = diverged(self.world, divergence, self.positions())
            explain(failure, self.calls, returned)
            return failure
        if self.dead:
            failure = self._death()
            explain(failure, self.calls, {**returned, failure.rank or 0: "died"})
            return failure
        if self.failed:
            # A rank that lost another one is a consequence, also where nothing better is known.
            rank = min(
                self.failed, key=lambda rank: (self.failed[rank].lost_connection, self.failed[rank].when)
            )
            return self._failure(rank, self.failed[rank])
        failure = self._timed_out(timeout)
        silent = set(range(self.size)) - self.returned.keys()
        waiting = [rank for rank in silent if self.waits[rank]] if silent <= self.waits.keys() else None
        explain(failure, self.calls, returned, final=True, waiting=waiting)
        return failure

    def never_started(self, ready: Collection[int], seconds: float) -> InfrastructureFailed:
        """Why not all ranks got ready for a program."""
        missing = [rank for rank in range(self.size) if rank not in ready]
        said = {rank: self.failed[rank].received for rank in missing if rank in self.failed}
        died = {rank: str(self.dead[rank]) for rank in missing if rank in self.dead}
        causes = dict.fromkeys(missing, "silent") | died | said
        return InfrastructureFailed(
            f"{self.world} does not start",
            expected=f"{self.size} processes in one group within {seconds:g} s",
            received=", ".join(f"rank {rank} {cause}" for rank, cause in causes.items()),
            where=Where(rank=missing[0]) if len(missing) == 1 else None,
            fix="What they printed says why.",
        )

    def results(self) -> list[Any]:
        """What each rank returned. InvalidInput if that cannot be had here."""
        return [unpack_result(self.returned[rank].result, rank) for rank in range(self.size)]

    def spans(self) -> list[tuple[Span, ...]]:
        """When each call of each rank was issued, and finished."""
        return [spans_of(calls, self.returned[rank].times) for rank, calls in enumerate(self.calls)]

    def positions(self) -> list[str]:
        waits = find_standstill(self.calls, self.returned).waits
        return [self._position(rank, waits=rank in waits) for rank in range(self.size)]

    def _position(self, rank: int, *, waits: bool) -> str:
        calls = self.calls[rank]
        last = f"last call {calls[-1]}" if calls else "no call yet"
        if rank in self.dead:
            return f"{self.dead[rank].cause}, {last}"
        if rank in self.failed:
            return f"failed, {last}"
        if rank in self.returned:
            return "finished"
        if waits:
            return f"waits in {calls[-1]}"
        return f"{last}, now at {self.lines[rank]}" if rank in self.lines else last

    def _timed_out(self, timeout: float) -> TimedOut:
        if not self.all_loaded():
            missing = [rank for rank in range(self.size) if rank not in self.loaded]
            return TimedOut(
                f"{self.world} does not begin",
                expected=f"all ranks to import the program within {timeout:g} s",
                received=f"{len(self.loaded)} of {self.size}",
                where=Where(rank=missing[0]) if len(missing) == 1 else None,
                positions=self.positions(),
            )
        standstill = find_standstill(self.calls, self.returned)
        awaited = tuple(standstill.awaited)
        return TimedOut(
            f"{self.world} did not finish",
            expected=f"all ranks to return within {timeout:g} s",
            received=f"{len(self.returned)} of {self.size}: {standstill}",
            where=Where(rank=awaited[0]) if len(awaited) == 1 else None,
            positions=self.positions(),
            fix="A rank computes on, waits for something else, or the time limit is too short.",
        )

    def _death(self) -> RunFailed:
        # gloo and NCCL abort a process whose peer is gone, so an abort may be a consequence.
        rank = min(self.dead, key=lambda rank: "SIGABRT" in self.dead[rank].cause)
        death = self.dead[rank]
        what = f"the process of rank {rank} of {self.world} died"
        expected = "the program returns on every rank"
        where = Where(rank=rank, site=self.calls[rank][-1].site if self.calls[rank] else None)
        positions = self.positions()
        if not death.of_memory and rank in self.begun and rank not in self.returned:
            return RankFailed(
                what,
                expected=expected,
                received=death.cause,
                where=where,
                positions=positions,
                traceback=death.last_words,
            )
        received = str(death)
        if death.of_memory:
            received += ", as this machine ran out of memory"
        else:
            what += " after its program" if rank in self.returned else " before its program"
        return InfrastructureFailed(
            what, expected=expected, received=received, where=where, positions=positions
        )

    def _failure(self, rank: int, failed: Failed) -> RunFailed | InvalidInput:
        if failed.problem == "start":
            return InfrastructureFailed(
                f"rank {rank} of {self.world} does not start",
                expected=f"{self.size} processes in one group",
                received=failed.received,
                where=Where(rank=rank),
                positions=self.positions(),
            )
        if failed.problem:
            return not_sendable(failed.problem, failed.received, Where(rank=rank))
        if failed.lost_connection:
            return InfrastructureFailed(
                f"rank {rank} of {self.world} lost its connection to another rank",
                expected="connections that hold while all ranks are alive",
                received=failed.received,
                where=Where(rank=rank),
                positions=self.positions(),
            )
        return RankFailed(
            f"rank {rank} of {self.world} failed",
            expected="the program returns on every rank",
            received=failed.received,
            where=Where(rank=rank),
            positions=self.positions(),
            traceback=failed.traceback,
        )
