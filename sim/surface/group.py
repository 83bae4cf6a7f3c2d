"""The one surface between a rank program and whatever carries its calls: a process group of our own.

``torch.distributed`` calls its methods, in every world. Each call becomes an :class:`Operation`, is written
into the rank's ledger, and goes to a *transport*: lockstep's meeting place, or a relay to a group of torch.

    program → torch.distributed → Surface: build, check → disturb → ledger → transport
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.failures import WorldUnavailable
from sim.surface.operations import BUILD, Build, Operation
from sim.surface.recorder import Recorder, entry
from sim.surface.work import Completed, IssuedWork, Joined, Pending


class Transport(Protocol):
    """Carries operations. What is asynchronous may come back unfinished; the rest is finished on return."""

    def __call__(self, operation: Operation, call: Call) -> Pending | None: ...


class Surface(dist.ProcessGroup):
    """A group as one of its members sees it.

    ``name`` may be left to torch, which gives one to every group it makes. ``device`` is bound to the
    group, for programs that ask where to put their tensors.
    """

    # What torch asks of a backend before it tries something special.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        recorder: Recorder,
        transport: Transport,
        backend: str,
        name: str = "",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this constructor
        self._rank = rank
        self._size = size
        self._recorder = recorder
        self._transport = transport
        self._backend = backend
        self._name = name
        self._coalesced: list[Pending] | None = None
        if device is not None:
            self.bound_device_id = device

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        """Nothing here shows it."""

    def getBackendName(self) -> str:  # noqa: N802  # torch's spelling
        return self._backend

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """``destroy_process_group`` calls it; whoever made the transport ends it."""

    def abort(self) -> None:
        """As :meth:`shutdown`."""

    def __repr__(self) -> str:
        return f"<{self._backend} group {self._name}, rank {self._rank} of {self._size}>"

    def issue(self, operation: Operation) -> dist.Work | None:
        """Record and carry it, or what ``disturb`` makes of it. None if it is finished."""
        recorder = self._recorder
        if recorder.disturb is None:
            return self._issue(operation)
        issued = [self._issue(replacement) for replacement in recorder.disturb(operation)]
        works = [work for work in issued if work is not None]
        if len(works) == 1:
            return works[0]
        pending = Joined(works) if works else Completed(operation)
        return IssuedWork(pending, operation.received) if operation.is_async else None

    def _issue(self, operation: Operation) -> dist.Work | None:
        if self._coalesced is not None and not operation.is_async:
            # Within a coalescing block nothing is waited for, and everything at its end.
            operation = operation._replace(is_async=True)
        recorder = self._recorder
        sequence, ends = len(recorder.calls), recorder.ends
        call = entry(operation, sequence, self._name, self._size, self._rank)
        recorder.calls.append(call)
        recorder.begins.append(recorder.clock())
        ends.append(None)
        if recorder.listener is not None:
            recorder.listener(call)
        pending = None if operation.is_lost else self._transport(operation, call)
        if operation.is_async:
            return self._issued(operation, sequence, pending)
        if pending is not None:
            pending.wait()
        ends[sequence] = recorder.clock()
        return None

    def _issued(self, operation: Operation, sequence: int, pending: Pending | None) -> dist.Work | None:
        """The program's part in what it has not waited for."""
        recorder, ends = self._recorder, self._recorder.ends

        def finished() -> None:
            ends[sequence] = recorder.clock()

        if pending is None:
            pending = Completed(operation)
            finished()
        if self._coalesced is not None:
            self._coalesced.append(pending)
            # Nobody may wait for one part; torch's own backends return nothing of use either.
            return None
        return IssuedWork(pending, operation.received, finished)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return IssuedWork(Joined(works), ())


def _method(build: Build, own_name: str) -> Callable[..., dist.Work | None]:
    def method(self: Surface, *arguments: Any, **named: Any) -> dist.Work | None:
        if named:
            arguments = (*arguments, *named.values())
        return self.issue(build(self._rank, self._size, own_name, arguments))

    method.__name__ = method.__qualname__ = own_name
    return method


for _name, (_build, _own_name) in BUILD.items():
    setattr(Surface, _name, _method(_build, _own_name))


def _refusing(name: str) -> Callable[..., None]:
    def refuse(self: Surface, *arguments: object, **named: object) -> None:
        raise WorldUnavailable(
            f"{name} of a process group",
            expected="a collective, or a message from rank to rank",
            received=name,
            fix="Make groups with torch.distributed.new_group.",
        )

    return refuse


# Left alone, these would fail inside torch with a message about a missing backend.
for _name in ("split_group", "merge_remote_group"):
    setattr(Surface, _name, _refusing(_name))


@contextmanager
def outsiders_refused() -> Iterator[None]:
    """Within the block, a call on a group that the rank is not in raises; torch itself only warns."""
    warn = c10d._warn_not_in_group

    def refuse(op_name: Any) -> None:
        default = c10d._world.default_pg
        raise InvalidInput(
            f"{op_name} on a group",
            expected="a group that the calling rank is in",
            received="a group of other ranks",
            where=Where(rank=None if default is None else default.rank()),
            fix="Where new_group returned GroupMember.NON_GROUP_MEMBER, do not call.",
        )

    c10d._warn_not_in_group = refuse
    try:
        yield
    finally:
        c10d._warn_not_in_group = warn
