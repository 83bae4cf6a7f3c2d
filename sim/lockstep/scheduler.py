"""The baton: rank threads of one process, exactly one running at a time, in an order that is drawn."""

from __future__ import annotations

import ctypes
import os
import threading
from _thread import LockType, allocate_lock
from bisect import bisect, insort
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sim.lockstep.schedule import Choices, Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from refmodel.collectives import Call

# A signal that comes just before the caller falls asleep does not wake it: so often it looks up.
_ATTENTION_SECONDS = 0.5
# How long an interrupted rank may take to come to its next call before it is interrupted as well.
_GRACE_SECONDS = 1.0
# Asking this often whether something is finished, while no rank can do anything about it, is a deadlock.
_MOST_IDLE_POLLS = 10_000


class Unwound(BaseException):  # not an Exception: a program's own handlers must not catch it
    """Ends a rank at its waiting point, because the run has failed elsewhere."""


class Baton:
    """Passes the right to run among ``size`` threads.

    A rank that waits is asleep on a lock of its own; handing over is one release and one acquire. The next
    rank is drawn from those that can go on, with ``draw`` and nothing else; ``choices`` is what was drawn.
    ``on_switch(left, next)`` runs when the turn goes from one rank to another, or to the first from None.
    ``on_stuck()`` gives the failure to report when no rank can go on.

    Once ``failure`` is set, every rank gets its turn once more and :class:`Unwound` is raised there: also
    the ``finally`` blocks of a failed run execute one rank at a time.
    """

    def __init__(
        self,
        size: int,
        *,
        draw: Draw,
        on_switch: Callable[[int | None, int], None],
        on_stuck: Callable[[], BaseException],
    ) -> None:
        self.failure: BaseException | None = None
        self.choices = Choices()
        self.steps = 0  # times that somebody could have been given the turn
        # Who sleeps, and in which call. In the order in which they came: that must not depend on hashes.
        self.waiting: dict[int, Call | None] = {}
        self._turns: list[LockType] = [_held_lock() for _ in range(size)]
        self._ready = list(range(size))  # in order of ranks
        self._polling: list[int] = []
        self._idle_polls = 0
        self._running = size - 1  # rank 0 is next
        self._alive = size
        self._done = _held_lock()
        self._draw = draw
        self._on_switch = on_switch
        self._on_stuck = on_stuck

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run ``bodies``, one a rank, to their end, each in a thread of its own.

        Leaves no thread behind, also when this thread is interrupted: then the ranks are unwound first.
        A body must not raise; it reports a failure by setting ``failure``.
        """
        # daemon: should a second interrupt break the unwinding, the interpreter can still exit.
        threads = [
            threading.Thread(target=self._live, args=(rank, body), name=f"rank {rank}", daemon=True)
            for rank, body in enumerate(bodies)
        ]
        started = False
        with _one_processor():
            try:
                for thread in threads:
                    thread.start()
                started = True
                self._pass_on(None)
                while not self._done.acquire(timeout=_ATTENTION_SECONDS):
                    pass
            except BaseException as interruption:
                self.failure = self.failure or interruption
                if not started:
                    self._forget([rank for rank, thread in enumerate(threads) if thread.ident is None])
                self._unwind(threads)
                raise
            finally:
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()

    def wait(self, rank: int, call: Call | None = None) -> None:
        """Sleep, in this call if in any, until another rank wakes this one and it is drawn."""
        self.waiting[rank] = call
        self._hand_over(rank)

    def wake(self, ranks: Iterable[int]) -> None:
        """Those of ``ranks`` that wait can go on."""
        waiting, ready = self.waiting, self._ready
        for rank in ranks:
            if rank in waiting:
                del waiting[rank]
                ready.append(rank)
        ready.sort()
        self._idle_polls = 0

    def pause(self, rank: int) -> None:
        """Offer the turn to any rank that can go on, this one included."""
        if self._ready:
            insort(self._ready, rank)
            self._hand_over(rank)

    def poll(self, rank: int) -> None:
        """Let all others go as far as they can: this one has asked for something that is not there yet."""
        if not self._ready:
            self._idle_polls += 1
            if self._idle_polls > _MOST_IDLE_POLLS:
                raise self.fail(self._on_stuck())
        self._polling.append(rank)
        self._hand_over(rank)

    def choose(self, options: Sequence[int]) -> int:
        """One of ``options``, drawn."""
        if len(options) == 1:
            return options[0]
        place = self._drawn(options, 0)
        if self.failure is not None:
            raise Unwound
        return options[place]

    def fail(self, failure: BaseException) -> Unwound:
        """End the run for this reason, unless it already ends for another: ``raise baton.fail(...)``."""
        self.failure = self.failure or failure
        return Unwound()

    def _live(self, rank: int, body: Callable[[], None]) -> None:
        _push_nobody_aside()
        self._turns[rank].acquire()
        try:
            if self.failure is None:
                body()
        finally:
            self._alive -= 1
            if self._alive:
                self._pass_on(rank)
            else:
                self._done.release()

    def _hand_over(self, rank: int) -> None:
        chosen = self._next()
        if chosen != rank:
            self._give(rank, chosen)
            self._turns[rank].acquire()
        if self.failure is not None:
            raise Unwound

    def _pass_on(self, rank: int | None) -> None:
        self._give(rank, self._next())

    def _give(self, rank: int | None, chosen: int) -> None:
        self._on_switch(rank, chosen)
        self._running = chosen
        self._turns[chosen].release()

    def _next(self) -> int:
        self.steps += 1
        ready = self._ready
        if self.failure is None:
            if len(ready) == 1:
                return ready.pop()
            if not ready:
                return self._next_of_none()
            # From the next rank in order on, so that the choice of 0 is that one.
            first = bisect(ready, self._running)
            place = self._drawn(ready, first)
            if self.failure is None:
                return ready.pop((first + place) % len(ready))
        # All may go on now: into Unwound.
        self.wake([*self.waiting])
        for rank in self._polling:
            insort(ready, rank)
        self._polling.clear()
        return ready.pop(0)

    def _next_of_none(self) -> int:
        if self._polling:
            self._ready, self._polling = sorted(self._polling), []
        else:
            self.failure = self._on_stuck()
        return self._next()

    def _drawn(self, options: Sequence[int], first: int) -> int:
        """The place of the one chosen, noted; if there is none, ``failure`` is set."""
        try:
            place = self._draw(options, first)
        except BaseException as refused:  # by a token that does not fit
            self.failure = self.failure or refused
            return 0
        self.choices.radices.append(len(options))
        self.choices.digits.append(place)
        return place

    def _forget(self, ranks: Iterable[int]) -> None:
        """These ranks never started."""
        for rank in ranks:
            self._ready.remove(rank)
            self._alive -= 1
        if self._alive:
            self._pass_on(None)
        else:
            self._done.release()

    def _unwind(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the ranks to end; interrupt one that computes on without coming to a call."""
        while not self._done.acquire(timeout=_GRACE_SECONDS):
            identity = threads[self._running].ident
            if identity is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(identity), ctypes.py_object(Unwound)
                )


@contextmanager
def _one_processor() -> Iterator[None]:
    """Within the block this thread, and those it starts, stay on the processor that it is on.

    As only one of the threads runs at a time, they lose nothing by sharing it, and a handover between
    two processors with cold caches takes more than twice as long.
    """
    own = _stay_here()
    try:
        yield
    finally:
        if own is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, own)


def _stay_here() -> set[int] | None:
    """The processors that this thread might be on until now; None where there is no saying, or no staying."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    except (OSError, AttributeError, ValueError):  # no such call; or it says −1, which is no processor
        return None
    return own


def _push_nobody_aside() -> None:
    """A rank that is woken should not run before the one that woke it, and is about to sleep, does so.

    Under SCHED_BATCH it does not, which takes half the time.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _held_lock() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock
