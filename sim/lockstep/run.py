"""All ranks in one process, as threads that take turns.

One thread a rank, one of them running at a time (:class:`~sim.lockstep.scheduler.Baton`). torch keeps its
process groups in one place, ``distributed_c10d._world``; each rank has its own, put there whenever the rank
gets its turn. So a rank program is an ordinary torch.distributed program, and a process group of this
process itself is out of sight during a run and untouched after it.

A collective is a meeting (:mod:`sim.lockstep.meeting`): ranks arrive, the last one computes for everybody,
and all go on in an order that the schedule draws.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from refmodel.collectives import Call
from refmodel.errors import Where
from sim.diagnosis.ledger import first_divergence
from sim.failures import Deadlock, RankFailed, RunFailed, traceback_text
from sim.faults.fault import Fault, disturber, suffered
from sim.lockstep.backend import BACKEND, DEFAULT_GROUP, Groups, here
from sim.lockstep.floor import Floor, Means
from sim.lockstep.process import RankWorld, native, process_set_aside
from sim.lockstep.schedule import Schedule, check_finished
from sim.lockstep.scheduler import Baton, Unwound
from sim.surface.recorder import Listener, Recorder, Span, spans_of

T = TypeVar("T")
Watch = Callable[[int, Call], None]

_STORE_PATIENCE = timedelta(seconds=1)
# With which torch starts in every process.
_TORCH_SEED = 67280421310721
# Bound once: both are called at every handover.
_numbers_now, _set_numbers = torch.default_generator.get_state, torch.default_generator.set_state


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run was, in rank order. ``schedule`` is the token that replays it."""

    results: list[Any]
    calls: list[list[Call]]
    spans: list[tuple[Span, ...]]
    schedule: str = ""


class LockstepRun:
    """One run of ``program`` on ``size`` ranks.

    ``device`` is bound to all groups: one GPU, or None for the CPU. ``faults`` are what the ranks suffer.
    """

    def __init__(
        self,
        size: int,
        schedule: Schedule,
        program: Callable[..., Any],
        *,
        device: torch.device | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.size = size
        self.name = f"{BACKEND}:{size}"
        self._program = program
        self._program_name = name_of(program)
        self._draw = schedule.draw(size, self._program_name)
        self._baton = Baton(size, draw=self._draw, on_switch=self._switch, on_stuck=self._stuck)
        self._floor = Floor(self._baton, size)
        self._worlds = [RankWorld() for _ in range(size)]
        # Who waits for a key of the store keeps the turn: nobody could set it.
        self._store = native.HashStore()
        self._store.set_timeout(_STORE_PATIENCE)
        self._numbers = [torch.Generator().manual_seed(_TORCH_SEED).get_state()] * size
        self._disturbers = [disturber(faults, rank, Means(self._floor, rank)) for rank in range(size)]
        clock = partial(getattr, self._baton, "steps")  # of C: it is read twice a call
        self.recorders = [Recorder(clock, disturb=disturbs) for disturbs in self._disturbers]
        self._floor.ledgers = [recorder.calls for recorder in self.recorders]
        self._groups = Groups(self.name, self._floor, self.recorders, device)

    def execute(self, args: Sequence[Any], watch: Watch | None) -> Outcome:
        """Results and calls. Raises what ended the run, which knows the schedule that led there."""
        results: dict[int, Any] = {}
        if watch is not None:
            for rank, recorder in enumerate(self.recorders):
                recorder.listener = self._listener(rank, watch)

        def body(rank: int) -> None:
            with self._being(rank) as group:
                results[rank] = suffered(self._disturbers[rank], self._program, group, *args)

        with process_set_aside():
            self._baton.run([partial(body, rank) for rank in range(self.size)])
        schedule = self._baton.choices.token(self.size, self._program_name)
        if self._baton.failure is not None:
            if isinstance(self._baton.failure, RunFailed):
                self._baton.failure.schedule = schedule
                self._baton.failure.spans = tuple(self._spans(until=self._baton.steps))
            raise self._baton.failure
        check_finished(self._draw)
        return Outcome(
            [results[rank] for rank in range(self.size)],
            [recorder.calls for recorder in self.recorders],
            self._spans(),
            schedule,
        )

    def _spans(self, until: int | None = None) -> list[tuple[Span, ...]]:
        return [spans_of(recorder.calls, recorder.times(until)) for recorder in self.recorders]

    @contextmanager
    def _being(self, rank: int) -> Iterator[dist.ProcessGroup]:
        """Within the block this thread is ``rank``; whatever ends the block ends the rank, and no more."""
        here.groups = self._groups
        self._floor.threads[rank] = threading.get_ident()
        group = self._groups.member(DEFAULT_GROUP, tuple(range(self.size)), rank)
        self._worlds[rank].add_default_group(group, self._store)
        native._register_process_group(group.group_name, group)
        try:
            # Else a backward pass on CUDA would leave this thread, and with it the rank.
            with torch.autograd.set_multithreading_enabled(False):
                yield group
            self._floor.finished.add(rank)
        except Unwound:
            pass
        except BaseException as raised:
            self._baton.fail(self._floor.suspected() or self._rank_failure(rank, raised))
        finally:
            self._floor.threads[rank] = -1  # the number may come to be another thread's
            native._unregister_all_process_groups()

    def _switch(self, left: int | None, coming: int) -> None:
        c10d._world = self._worlds[coming]  # type: ignore[assignment]  # as torch's own threaded groups do
        # A process each would have random numbers of its own, and so has a rank.
        if left is not None:
            self._numbers[left] = _numbers_now()
        _set_numbers(self._numbers[coming])

    def _listener(self, rank: int, watch: Watch) -> Listener:
        def hear(call: Call) -> None:
            try:
                watch(rank, call)
            except BaseException as raised:
                # The watcher's failure is the caller's own, not the rank's.
                raise self._baton.fail(raised) from raised

        return hear

    def _rank_failure(self, rank: int, raised: BaseException) -> RankFailed:
        positions = self._floor.positions()
        positions[rank] = "failed"
        failure = RankFailed(
            f"rank {rank} of {self.name} failed",
            expected="the program returns on every rank",
            received=f"{type(raised).__name__}: {raised}",
            where=Where(rank=rank),
            positions=positions,
            traceback=traceback_text(raised, skip=__name__),
        )
        failure.__cause__ = raised
        return failure

    def _stuck(self) -> RunFailed:
        return self._floor.suspected() or self._deadlock()

    def _deadlock(self) -> Deadlock:
        """Names the rank that called less, or something else, where the ledgers tell."""
        divergence = first_divergence(self._floor.ledgers, self._floor.finished)
        received = f"{len(self._floor.waiting())} of {self.size} ranks waiting, nobody left to come"
        odd = divergence.odd[0] if divergence is not None and divergence.odd else None
        deadlock = Deadlock(
            f"{self.name} is stuck",
            expected="all ranks come to each collective, and each message is sent and received",
            received=f"{received}: {divergence}" if divergence is not None else received,
            where=Where(rank=odd),
            positions=self._floor.positions(),
            fix="A rank that has nothing to contribute calls the collective all the same (V6).",
        )
        self._floor.explain(deadlock, final=True)
        return deadlock


def name_of(program: Callable[..., Any]) -> str:
    """By which a schedule token knows its program: "sim.serving.program.serve"."""
    inner = program
    while isinstance(inner, partial):
        inner = inner.func
    kind = type(inner)
    module = getattr(inner, "__module__", None) or kind.__module__
    return f"{module}.{getattr(inner, '__qualname__', kind.__qualname__)}"
