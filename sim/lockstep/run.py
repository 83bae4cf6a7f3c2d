"""All ranks in one process, as threads that take turns.

One thread a rank, one of them running at a time (:class:`~sim.lockstep.scheduler.Baton`). torch keeps its
process groups in one place, ``distributed_c10d._world``; each rank has its own, put there whenever the rank
gets its turn. So a rank program is an ordinary torch.distributed program, and a process group of this
process itself is out of sight during a run and untouched after it.

A collective is a meeting: ranks arrive, the last one compares what all have come for (V6), computes once
for everybody, and lets them go on in an order drawn from the seed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from refmodel.collectives import Call, Ledger, recording
from refmodel.errors import InvalidInput, Where
from sim.failures import Deadlock, RankFailed, traceback_text
from sim.ledger import Divergence, diverged, outvoted
from sim.lockstep.backend import BACKEND, DEFAULT_GROUP, Arrival, LockstepGroup, Perform
from sim.lockstep.scheduler import Baton, Unwound

T = TypeVar("T")
Watch = Callable[[int, Call], None]

# The stub lacks thread isolation.
_native: Any = _distributed_c10d


@dataclass(eq=False)
class RankWorld:
    """torch's process-group state of one rank: the attributes of ``distributed_c10d._World``."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)

    def add_default_group(self, group: LockstepGroup) -> None:
        """As ``init_process_group`` would, without a store: there is nobody to find."""
        size = group.size()
        self.default_pg = group
        self.pg_map[group] = (BACKEND, _native.HashStore())
        self.pg_names[group] = group.group_name
        self.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self.pg_backend_config[group] = f"cpu:{BACKEND},cuda:{BACKEND}"
        tag = f"ptd:{group.group_name}"
        self.tags_to_pg = {"": [group], tag: [group]}
        self.pg_to_tag[group] = tag


# One run at a time: torch's state, which is set aside, is one per process.
_process = threading.Lock()
_here = threading.local()


@contextmanager
def _process_set_aside() -> Iterator[None]:
    """torch's process-wide state is the run's within the block, and as it was afterwards."""
    if hasattr(_here, "is_rank"):
        raise InvalidInput(
            "a lockstep run",
            expected="to be started outside of any rank",
            received="a run inside a rank of another",
            fix="Start the inner run in the program that starts the outer one.",
        )
    with _process:
        own_world, own_threads = c10d._world, torch.get_num_threads()
        # Else torch knows a group by its name alone, and the second rank's "0" would be refused.
        _native._set_thread_isolation_mode(True)
        # As in a gloo worker, so that a rank's sums have the same bits in both; new threads inherit it.
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(own_threads)
            _native._set_thread_isolation_mode(False)
            c10d._world = own_world


class LockstepRun:
    """One run of one program on ``size`` ranks."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._name = f"{BACKEND}:{size}"
        self._baton = Baton(size, seed=seed, on_turn=self._enter, on_stuck=self._deadlock)
        self._worlds = [RankWorld() for _ in range(size)]
        self._ledgers = [Ledger() for _ in range(size)]
        self._threads: list[int] = [0] * size
        self._arrivals: dict[int, Arrival] = {}
        self._finished: set[int] = set()

    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None
    ) -> tuple[list[T], list[list[Call]]]:
        """The result and the calls of each rank, in rank order."""
        results: dict[int, T] = {}
        if watch is not None:
            for rank, ledger in enumerate(self._ledgers):
                ledger.listener = self._listener(rank, watch)

        def body(rank: int) -> None:
            with self._being(rank) as group:
                results[rank] = program(group, *args)

        with _process_set_aside():
            self._baton.run([partial(body, rank) for rank in range(self.size)])
        if self._baton.failure is not None:
            raise self._baton.failure
        return [results[rank] for rank in range(self.size)], [ledger.calls for ledger in self._ledgers]

    def meet(self, rank: int, arrival: Arrival, perform: Perform) -> None:
        """Arrive, and return when all ranks have and ``perform`` has been done for all of them."""
        self._arrivals[rank] = arrival
        if len(self._arrivals) < self.size:
            self._baton.wait(rank)
            return
        arrivals = [self._arrivals[other] for other in range(self.size)]
        if any(other.signature != arrival.signature for other in arrivals):
            raise self._baton.fail(self._divergence(arrivals))
        # Inference mode lets tensors of either mode be written, and keeps the copies out of autograd.
        with torch.inference_mode():
            perform(arrivals)
        self._arrivals.clear()
        self._baton.wake(range(self.size))
        self._baton.pause(rank)

    @contextmanager
    def _being(self, rank: int) -> Iterator[dist.ProcessGroup]:
        """Within the block this thread is ``rank``; whatever ends the block ends the rank, and no more."""
        _here.is_rank = True
        self._threads[rank] = threading.get_ident()
        group = LockstepGroup(rank, self.size, self.meet)
        self._worlds[rank].add_default_group(group)
        _native._register_process_group(group.group_name, group)
        try:
            # Else a backward pass on CUDA would leave this thread, and with it the rank.
            with torch.autograd.set_multithreading_enabled(False), recording(self._ledgers[rank]):
                yield group
            self._finished.add(rank)
        except Unwound:
            pass
        except BaseException as raised:
            self._baton.fail(self._rank_failure(rank, raised))
        finally:
            _native._unregister_all_process_groups()

    def _enter(self, rank: int) -> None:
        c10d._world = self._worlds[rank]  # type: ignore[assignment]  # as torch's own threaded groups do

    def _listener(self, rank: int, watch: Watch) -> Callable[[Call], None]:
        def hear(call: Call) -> None:
            try:
                watch(rank, call)
            except BaseException as raised:
                # The watcher's failure is the caller's own, not the rank's.
                raise self._baton.fail(raised) from raised

        return hear

    def _rank_failure(self, rank: int, raised: BaseException) -> RankFailed:
        failure = RankFailed(
            f"rank {rank} of {self._name} failed",
            expected="the program returns on every rank",
            received=f"{type(raised).__name__}: {raised}",
            where=Where(rank=rank),
            positions=["failed" if other == rank else self._position(other) for other in range(self.size)],
            traceback=traceback_text(raised, skip=__name__),
        )
        failure.__cause__ = raised
        return failure

    def _deadlock(self) -> Deadlock:
        waiting = sorted(self._arrivals)
        return Deadlock(
            f"{self._name} is stuck",
            expected="all ranks come to each collective",
            received=f"{len(waiting)} of {self.size} ranks waiting, nobody left to come",
            positions=[self._position(rank) for rank in range(self.size)],
            fix="A rank that has nothing to contribute calls the collective all the same (V6).",
        )

    def _divergence(self, arrivals: list[Arrival]) -> BaseException:
        calls = tuple((rank, self._as_call(rank, arrival)) for rank, arrival in enumerate(arrivals))
        odd = outvoted({rank: arrival.signature for rank, arrival in enumerate(arrivals)})
        sequence = max(call.sequence for _, call in calls)
        positions = [f"waits in {self._describe(rank)}" for rank in range(self.size)]
        return diverged(self._name, Divergence(sequence, odd, calls), positions)

    def _position(self, rank: int) -> str:
        if rank in self._arrivals:
            return f"waits in {self._describe(rank)}"
        if rank in self._finished:
            return "finished"
        return "ready to go on" if self._threads[rank] else "not begun"

    def _describe(self, rank: int) -> str:
        return str(self._as_call(rank, self._arrivals[rank]))

    def _as_call(self, rank: int, arrival: Arrival) -> Call:
        """The ledger's entry, or one like it for a collective that was issued past the ledger."""
        signature, call = arrival.signature, arrival.call
        kind = f"{signature.kind} {signature.detail}".rstrip()
        sent = arrival.sent
        return Call(
            sequence=len(self._ledgers[rank].calls) if call is None else call.sequence,
            site=call.site if call is not None else _line_of(self._threads[rank]),
            kind=kind,
            shape=tuple(signature.shape),
            dtype="" if sent is None else str(sent.dtype).removeprefix("torch."),
            group=DEFAULT_GROUP,
            group_size=self.size,
            num_bytes=0 if sent is None else sent.numel() * sent.element_size(),
        )


# Frames of these modules stand between a program and its meeting.
_PLUMBING = ("torch.", "sim.lockstep", "refmodel.collectives", "contextlib")


def _line_of(thread: int) -> str:
    """Where in the program a rank's thread is, "test_ring.py:88". Costs nothing until something fails."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PLUMBING):
        frame = frame.f_back
    if frame is None:
        return "somewhere"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
