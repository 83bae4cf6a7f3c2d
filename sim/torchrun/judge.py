"""Rank 0's view of a run: hears all ranks, and says how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from refmodel.errors import InvalidInput
from sim.failures import RunFailed, TimedOut
from sim.processes.messages import Failed, Message
from sim.processes.progress import Death, Progress
from sim.torchrun.letters import Begins, Done, Leaves, Read, Verdict

# From the first rank to the last one: torch is being imported, machines are being started.
START_SECONDS = 120.0
# Of a rank that says it is there twice a second. A busy machine may silence it for a while …
LOST_SECONDS = 5.0
# … but not if other ranks have lost their connection to it as well.
MISSED_SECONDS = 1.5
# When one rank fails the others soon follow, or are about to: wait this long before naming the cause.
_SETTLE_SECONDS = 0.3


@dataclass(eq=False)
class Judge:
    """One run of ``size`` ranks."""

    world: str
    size: int
    timeout: float  # seconds, from when all ranks have begun
    heard: Mapping[int, float]  # when each rank was last heard of, in this run or before
    read: set[int] = field(default_factory=set)  # ranks that know the verdict
    _came: set[int] = field(default_factory=set)
    _programs: dict[int, str] = field(default_factory=dict)
    _leaving: set[int] = field(default_factory=set)
    _created: float = field(default_factory=lambda: time.monotonic())
    _begun: float | None = None  # when the last rank began
    _troubled: float | None = None
    is_closed: bool = False  # the verdict is announced

    def __post_init__(self) -> None:
        self._progress = Progress(self.world, self.size)

    def hear(self, rank: int, message: Message | Begins | Leaves | Read) -> None:
        now = time.monotonic()
        self._came.add(rank)
        match message:
            case Begins(program):
                self._programs[rank] = program
                self._progress.begun.add(rank)
                self._progress.loaded.add(rank)
                if len(self._programs) == self.size:
                    self._begun = now
            case Leaves():
                self._leaving.add(rank)
            case Read():
                self.read.add(rank)
            case Failed():
                # Clocks of several machines do not compare.
                self._progress.note(rank, replace(message, when=now))
            case _:
                self._progress.note(rank, message)

    def has_all(self) -> bool:
        """Whether all ranks have begun this run, so that none is in an earlier one."""
        return self._begun is not None

    def is_known_to_all(self) -> bool:
        """Whether all ranks that still live know the verdict."""
        return self.read | self._progress.dead.keys() >= set(range(self.size))

    def verdict(self) -> Verdict | None:
        """How the run ended; None while it goes on."""
        progress, now = self._progress, time.monotonic()
        if progress.complete():
            return Done(
                [progress.returned[rank].result for rank in range(self.size)],
                progress.calls,
                [progress.returned[rank].times for rank in range(self.size)],
            )
        if len(set(self._programs.values())) > 1:
            return self._different_programs()
        self._find_lost(now)
        if progress.settled():
            return progress.verdict(self.timeout)
        if progress.troubled():
            self._troubled = self._troubled or now
            patience = LOST_SECONDS if progress.lacks_cause() else _SETTLE_SECONDS
            return progress.verdict(self.timeout) if now - self._troubled > patience else None
        if self._begun is None:
            return self._not_begun() if now - self._created > START_SECONDS else None
        return progress.verdict(self.timeout) if now - self._begun > self.timeout else None

    def _find_lost(self, now: float) -> None:
        suspected = self._progress.lacks_cause() or bool(self._leaving)
        limit = MISSED_SECONDS if suspected else LOST_SECONDS
        for rank, heard in self.heard.items():
            spoke_last = rank in self._progress.dead or rank in self._progress.failed
            if not spoke_last and now - heard > limit:
                self._progress.dead[rank] = Death(f"not heard of for {now - heard:.1f} s")

    def _not_begun(self) -> RunFailed:
        away = set(range(self.size)) - self._came
        joining = self._came - self._programs.keys()
        received = f"nothing from {_ranks(away)}" if away else f"{_ranks(joining)} not yet in a group"
        return TimedOut(
            f"{self.world} does not begin",
            expected=f"all ranks to come to this run within {START_SECONDS:g} s of the first",
            received=received,
            positions=self._progress.positions(),
            fix="Every process must run the same programs in the same order.",
        )

    def _different_programs(self) -> InvalidInput:
        did: dict[str, set[int]] = {}
        for rank, program in sorted(self._programs.items()):
            did.setdefault(program, set()).add(rank)
        return InvalidInput(
            f"program of {self.world}",
            expected="the same on every rank",
            received=", ".join(f"{program} on {_ranks(ranks)}" for program, ranks in did.items()),
            fix="Every process must run the same programs in the same order.",
        )


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"
