"""What all groups of a lockstep run share: who waits where, and how a rank waits."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.diagnosis.explain import diagnose, explain
from sim.diagnosis.sentence import SKIP_OR_SWAP
from sim.failures import Deadlock, Diverged, RunFailed
from sim.faults.fault import Fault, InjectedError
from sim.lockstep.lookahead import bound_this_thread, unbound_this_thread
from sim.lockstep.scheduler import Baton, Unwound


class Floor:
    """The ranks of one run, here by their number in the whole world."""

    def __init__(self, baton: Baton, size: int) -> None:
        self.size = size
        self.threads = [0] * size  # of each rank; 0: not begun
        self.finished: set[int] = set()
        self.ledgers: list[list[Call]] = [[] for _ in range(size)]  # of each rank, as they grow
        self._baton = baton
        self._hanging: set[int] = set()
        self._suspected: Diverged | None = None

    def check_turn(self, rank: int) -> None:
        """Refuse whoever is not ``rank``. Ends a look ahead."""
        if self._suspected is not None:
            unbound_this_thread()
            raise self.fail(self._suspected)
        if self.threads[rank] != get_ident():
            caller = next(
                (str(other) for other, thread in enumerate(self.threads) if thread == get_ident()), ""
            )
            raise InvalidInput(
                "a call on a group",
                expected=f"rank {rank}, whose group it is, in the thread that runs its program",
                received=f"rank {caller}" if caller else "another thread",
                where=Where(rank=int(caller) if caller else rank),
                fix="Each rank calls on the groups that it was given or made itself.",
            )

    def wait(self, rank: int, call: Call) -> None:
        """Sleep in ``call`` until somebody wakes ``rank``."""
        self._baton.wait(rank, call)
        if self._suspected is not None:
            self._look_ahead(self._suspected)

    def hang(self, rank: int) -> NoReturn:
        """Sleep for ever, outside of any call."""
        self._hanging.add(rank)
        while True:
            self._baton.wait(rank)

    def wake(self, rank: int) -> None:
        """``rank`` can go on, if it waits."""
        self._baton.wake((rank,))

    def go_on(self, rank: int, woken: Iterable[int] = ()) -> None:
        """``rank`` and the ``woken`` can go on; who does is drawn."""
        self._baton.wake(woken)
        self._baton.pause(rank)

    def poll(self, rank: int) -> None:
        """``rank`` can go on, but to no avail before others have."""
        self._baton.poll(rank)

    def choose(self, options: Sequence[int]) -> int:
        """One of ``options``, drawn."""
        return self._baton.choose(options)

    def fail(self, failure: RunFailed) -> Unwound:
        """End the run for this reason: ``raise floor.fail(...)``."""
        if self._baton.failure is None:
            # Now, as the ledgers may go on while the ranks are unwound.
            self.explain(failure, final=False)
        return self._baton.fail(failure)

    def suspect(self, failure: Diverged, rank: int, last: int, call: Call) -> None:
        """The run has failed; let ``rank`` go on alone until it is known what it did.

        ``last`` is the rank that calls this, in ``call``; all others wait.
        """
        self._suspected = failure
        if rank == last:
            self._look_ahead(failure)
        else:
            self.wake(rank)
            self.wait(last, call)

    def suspected(self) -> Diverged | None:
        """The failure for which a look ahead is under way, with what is known by now."""
        if self._suspected is not None:
            self.fail(self._suspected)
        return self._suspected

    def _look_ahead(self, failure: Diverged) -> None:
        bound_this_thread(lambda: self.fail(failure))

    def odd_one(self) -> int | None:
        """The rank whose next call would tell what it did; None if that is known, or nobody is blamed."""
        found = diagnose(self.ledgers, dict.fromkeys(self.finished, "returned"))
        return found.rank if found is not None and found.fault == SKIP_OR_SWAP else None

    def explain(self, failure: RunFailed, *, final: bool) -> None:
        """Let the failure say which rank did what. ``final``: nobody can go on."""
        if isinstance(failure, (Deadlock, Diverged)):
            ended = dict.fromkeys(self.finished, "returned")
            explain(failure, self.ledgers, ended, final=final, waiting=self.waiting())

    def waiting(self) -> list[int]:
        return sorted(rank for rank, call in self._baton.waiting.items() if call is not None)

    def positions(self) -> list[str]:
        """Where each rank is, in words."""
        return [self._position(rank) for rank in range(self.size)]

    def _position(self, rank: int) -> str:
        call = self._baton.waiting.get(rank)
        if call is not None:
            return f"waits in {call}"
        if rank in self.finished:
            return "finished"
        if rank in self._hanging:
            return "hangs"
        return "ready to go on" if self.threads[rank] else "not begun"


@dataclass(frozen=True, slots=True)
class Means:
    """How a rank that has no process of its own suffers (:class:`sim.faults.fault.Means`)."""

    floor: Floor
    rank: int

    def die(self, fault: Fault) -> NoReturn:
        raise InjectedError(str(fault))

    def hang(self, fault: Fault) -> NoReturn:
        self.floor.hang(self.rank)

    def linger(self) -> None:
        self.floor.poll(self.rank)
