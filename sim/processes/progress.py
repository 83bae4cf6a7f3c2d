"""What is known of a run on processes while it runs, and in the end why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.failures import RankFailed, RunFailed, TimedOut
from sim.ledger import Comparison, diverged
from sim.processes.worker import Failed, Issues, Message, Returned


@dataclass(eq=False)
class Progress:
    """What is known of one program on all ranks."""

    world: str
    size: int
    calls: list[list[Call]] = field(default_factory=list)
    returned: dict[int, bytes] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = [[] for _ in range(self.size)]
        self.comparison = Comparison(self.size)

    def note(self, rank: int, message: Message) -> None:
        match message:
            case Issues(call):
                self.calls[rank].append(call)
                self.comparison.issued(rank, call)
            case Returned(result):
                self.returned[rank] = result
                self.comparison.finished(rank)
            case Failed():
                self.failed[rank] = message

    def complete(self) -> bool:
        return len(self.returned) == self.size and not self.troubled()

    def troubled(self) -> bool:
        return bool(self.failed or self.dead) or self.comparison.divergence() is not None

    def settled(self) -> bool:
        """Whether nothing that may still come can change the verdict."""
        silent = self.size - len(self.returned.keys() | self.failed.keys() | self.dead.keys())
        return self.comparison.decided() or silent == 0

    def verdict(self, timeout: float) -> RunFailed | InvalidInput:
        """Why it failed; the first cause, where one failure has led to others."""
        divergence = self.comparison.divergence()
        if divergence is not None:
            return diverged(self.world, divergence, self.positions())
        if self.dead:
            return self._death(min(self.dead))
        if self.failed:
            rank = min(self.failed, key=lambda rank: self.failed[rank].when)
            return self._failure(rank, self.failed[rank])
        return TimedOut(
            f"{self.world} did not finish",
            expected=f"all ranks to return within {timeout:g} s",
            received=f"{len(self.returned)} of {self.size}",
            positions=self.positions(),
            fix="A rank computes on, or waits in a collective issued past refmodel.collectives.",
        )

    def positions(self) -> list[str]:
        return [self._position(rank) for rank in range(self.size)]

    def _position(self, rank: int) -> str:
        calls = self.calls[rank]
        last = f"last call {calls[-1]}" if calls else "no call yet"
        if rank in self.dead:
            return f"{self.dead[rank]}, {last}"
        if rank in self.failed:
            return f"failed, {last}"
        return "finished" if rank in self.returned else last

    def _death(self, rank: int) -> RankFailed:
        return RankFailed(
            f"the process of rank {rank} of {self.world} died",
            expected="the program returns on every rank",
            received=self.dead[rank],
            where=Where(rank=rank, site=self.calls[rank][-1].site if self.calls[rank] else None),
            positions=self.positions(),
        )

    def _failure(self, rank: int, failed: Failed) -> RunFailed | InvalidInput:
        if failed.problem:
            return not_sendable(failed.problem, failed.received, Where(rank=rank))
        return RankFailed(
            f"rank {rank} of {self.world} failed",
            expected="the program returns on every rank",
            received=failed.received,
            where=Where(rank=rank),
            positions=self.positions(),
            traceback=failed.traceback,
        )


def not_sendable(what: str, received: str, where: Where) -> InvalidInput:
    return InvalidInput(
        f"{what} between processes",
        expected="a value that pickle can send and its receiver can import",
        received=received,
        where=where,
        fix="Define programs at the top level of an importable module, without closures; "
        "send and return plain values and tensors.",
    )
