"""This process as one rank of a world that was started: joins the others, runs programs, shares the results.

A program runs in a thread of its own. It may wait in a collective for ever, and nothing can call it back; the
main thread waits for the verdict instead, which rank 0 finds from what the watchers of all ranks tell, and
which is the same on every rank.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.failures import InfrastructureFailed
from sim.faults.fault import Fault
from sim.processes import relay
from sim.processes.parcel import unpack_result
from sim.processes.rank import Seat
from sim.surface.recorder import Recorder, Span, spans_of
from sim.torchrun.judge import START_SECONDS
from sim.torchrun.letters import Done
from sim.torchrun.place import find_place, interface_towards
from sim.torchrun.post import Post, another_connection
from sim.torchrun.share import Share
from sim.torchrun.termination import Termination
from sim.torchrun.watcher import Watcher

T = TypeVar("T")
Watch = Callable[[int, Call], None]

# Ranks meet in one store, again and again: each time under another name.
_meetings = itertools.count()


class Member:
    """One rank of the world that was started."""

    # What is broken here lies with the launcher, which can start all anew: --max-restarts.
    starts_anew = False

    def __init__(self, backend: str | None, timeout: float) -> None:
        place = find_place(backend)
        self.size = place.size
        self._place = place
        self._timeout = timeout
        self._world = f"torchrun:{place.size}"
        self._store: Store | None = None
        self._watcher: Watcher | None = None
        self._seat: Seat | None = None
        self._groups = 0
        self._runs = 0
        self._busy = threading.Lock()

    def execute(
        self, program: Callable[..., T], args: Sequence[Any], watch: Watch | None, faults: Sequence[Fault]
    ) -> tuple[list[T], list[list[Call]], list[tuple[Span, ...]]]:
        """What each rank returned, and called, and when; on every rank."""
        with self._busy, Termination() as termination:
            watcher = self._joined()
            self._runs += 1
            share = Share(self._runs, self._place.rank, watcher, watch)
            with _one_thread():
                try:
                    share.start(lambda: self._sit(share), program, args, faults, self._place)
                    verdict = share.await_verdict(termination)
                except BaseException as raised:  # an interrupt
                    share.give_up(raised)
                    self._leave_group()
                    share.end()
                    raise
                watcher.await_farewell()
            if not isinstance(verdict, Done):
                self._leave_group()
                share.end()
                raise share.raised_by_watch or verdict
            if dist.group.WORLD is not (self._seat and self._seat.group):
                self._seat = None  # the program has destroyed the group, here as everywhere
            return _opened(verdict)

    def close(self) -> None:
        """Leave the group. A later run joins again, as all ranks must."""
        if self._seat is not None:
            self._leave_group()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
            self._store = None
            self._runs = 0

    def _joined(self) -> Watcher:
        if self._watcher is None:
            if dist.is_initialized():
                raise InvalidInput(
                    "a started world",
                    expected="a process in no process group",
                    received="a default group that is initialised",
                    fix="World.started() makes the group, and gives it to the program.",
                )
            self._store = PrefixStore(f"cpkv/{next(_meetings)}", self._meet())
            post = Post(self._store, self._place.rank)
            self._watcher = Watcher(post, self._place.rank, self.size, self._world, self._timeout)
        return self._watcher

    def _meet(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if self._place.backend == "gloo" and sys.platform == "linux":
            interface = interface_towards(host)
            if interface is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            limit = timedelta(seconds=START_SECONDS)
            meeting: Any = rendezvous("env://", self._place.rank, self.size, timeout=limit)
            store: Store = next(meeting)[0]
        except (RuntimeError, ValueError, OSError) as raised:
            raise InfrastructureFailed(
                f"{self._world} does not meet",
                expected=f"a store at {host}:{port} within {START_SECONDS:g} s",
                received=f"{type(raised).__name__}: {raised}".splitlines()[0],
                where=Where(rank=self._place.rank),
                fix="MASTER_ADDR must lead to the first node from every node.",
            ) from raised
        return store

    def _sit(self, share: Share) -> Seat:
        """In the group that all ranks make together, at the first run and after a failed one."""
        if self._seat is None:
            place = self._place
            assert self._store is not None
            recorder = Recorder(time.time_ns)
            relay.register(place.backend, recorder, place.device)
            self._groups += 1
            dist.init_process_group(
                relay.backend_name(place.backend),
                # Over a connection of its own: a rank of a failed run may still wait on another.
                store=PrefixStore(f"group{self._groups}", another_connection(self._store)),
                rank=place.rank,
                world_size=place.size,
                # Ranks may come to a run at different times; after that, its time limit comes first.
                timeout=timedelta(seconds=START_SECONDS + self._timeout),
                device_id=place.device,
            )
            group = dist.group.WORLD
            assert group is not None
            self._seat = Seat(group, recorder)
        return self._seat

    def _leave_group(self) -> None:
        self._seat = None
        if dist.is_initialized():
            # Wherever the program waits in this group, it gets an error. A GPU may take its time.
            leave = threading.Thread(target=_destroy, daemon=True)
            leave.start()
            leave.join(2.0)


def _opened(done: Done) -> tuple[list[Any], list[list[Call]], list[tuple[Span, ...]]]:
    results = [unpack_result(result, rank) for rank, result in enumerate(done.results)]
    return results, done.calls, list(map(spans_of, done.calls, done.times))


def _destroy() -> None:
    for group in list(c10d._world.pg_map):
        group.abort()
    dist.destroy_process_group()


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in every world, so that a rank's sums have the same bits in all."""
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)
