"""Where the ranks of a group meet: collectives are done once for all, when the last one has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from refmodel.collectives import Call
from refmodel.errors import Where
from sim.diagnosis.ledger import Divergence, diverged, outvoted
from sim.failures import Diverged, WorldUnavailable
from sim.lockstep import exchange
from sim.lockstep.floor import Floor
from sim.surface.operations import Operation


class _Meeting:
    """One collective of a group, while not all ranks have received what is theirs."""

    __slots__ = ("arrivals", "missing", "received", "waiting")

    def __init__(self, size: int) -> None:
        self.arrivals: list[tuple[Operation, Call] | None] = [None] * size
        self.missing = size
        self.waiting: list[int] = []  # members asleep until the others have come
        self.received: exchange.Received | None = None  # of those who have not waited for it yet

    def all_arrivals(self) -> list[tuple[Operation, Call]]:
        """In order of ranks."""
        return [arrival for arrival in self.arrivals if arrival is not None]


class Meetings:
    """The collectives of one group. Ranks are those of the group; ``members`` are their world ranks."""

    def __init__(self, world: str, members: Sequence[int], floor: Floor) -> None:
        self._world = world
        self._members = members
        self._floor = floor
        self._size = len(members)
        # A rank may be ahead of others by any number of calls that it has not waited for.
        self._open: deque[_Meeting] = deque()
        self._over = 0
        self._places = [0] * self._size

    def attend(self, rank: int, operation: Operation, call: Call) -> Attendance | None:
        """Arrive. Returns when all have met and the collective is done, or at once if it is asynchronous."""
        place = self._places[rank] - self._over
        self._places[rank] += 1
        if place == len(self._open):
            self._open.append(_Meeting(self._size))
        meeting = self._open[place]
        meeting.arrivals[rank] = operation, call
        meeting.missing -= 1
        member = self._members[rank]
        if meeting.missing == 0:
            self._open.popleft()  # the first: everybody has come to those before it
            self._over += 1
            arrivals = meeting.all_arrivals()
            if not _agree([other for _, other in arrivals]):
                self._diverge(meeting, arrivals, member, call)
            else:
                self._do(meeting, arrivals)
                self._floor.go_on(member, meeting.waiting)
        elif operation.is_async:
            self._floor.go_on(member)
        else:
            meeting.waiting.append(member)
            self._floor.wait(member, call)
        return Attendance(self._floor, meeting, rank, member) if operation.is_async else None

    def _do(self, meeting: _Meeting, arrivals: list[tuple[Operation, Call]]) -> None:
        operations = [operation for operation, _ in arrivals]
        misfit = exchange.unequal(operations)
        if misfit is not None:
            raise self._floor.fail(self._misfit(arrivals[misfit[0]][1], *misfit))
        device = operations[0].tensors[0].device if operations[0].tensors else None
        # Ranks may have queued their work on streams of their own.
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        # Inference mode lets tensors of either mode be written, and keeps the copies out of autograd.
        with torch.inference_mode():
            try:
                received = exchange.perform(operations)
            except (RuntimeError, KeyError) as impossible:
                raise self._floor.fail(self._unsupported(arrivals[0], impossible)) from impossible
            for operation, values in zip(operations, received, strict=True):
                if not operation.is_async:
                    deliver(values, operation.received)
            if any(operation.is_async for operation in operations):
                meeting.received = exchange.kept(operations, received)
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)

    def _diverge(
        self, meeting: _Meeting, arrivals: list[tuple[Operation, Call]], last: int, call: Call
    ) -> None:
        """Fail; or return to the program of the odd rank, if what that calls next says more."""
        failure = self._divergence([call for _, call in arrivals])
        odd = self._floor.odd_one()
        if odd is None or (odd != last and odd not in meeting.waiting):
            raise self._floor.fail(failure)
        operation, _ = arrivals[self._members.index(odd)]
        with torch.inference_mode():
            for tensor in operation.received:
                tensor.zero_()
        self._floor.suspect(failure, odd, last, call)

    def _divergence(self, calls: Sequence[Call]) -> Diverged:
        by_member = sorted(zip(self._members, calls, strict=True))
        odd = outvoted({member: call.key for member, call in by_member})
        sequence = max(call.sequence for call in calls)
        positions = self._floor.positions()
        for member, call in by_member:
            positions[member] = f"waits in {call}"
        return diverged(self._world, Divergence(sequence, odd, tuple(by_member)), positions)

    def _misfit(self, call: Call, sender: int, receiver: int, sent: str, expected: str) -> Diverged:
        return Diverged(
            f"the ranks of {self._world} diverge",
            expected=f"rank {self._members[sender]} to send what rank {self._members[receiver]} expects",
            received=f"{sent} where {expected} are expected, in {call}",
            where=Where(site=call.site),
            positions=self._floor.positions(),
            fix="What each rank sends to each other must be known to both.",
        )

    def _unsupported(self, arrival: tuple[Operation, Call], impossible: BaseException) -> WorldUnavailable:
        return WorldUnavailable(
            f"a collective on {self._world}",
            expected="a reduction that torch has for this type on this device",
            received=f"{arrival[1].what}: {impossible}",
            where=Where(site=arrival[1].site),
        )


def _agree(calls: Sequence[Call]) -> bool:
    """Whether these calls have one key."""
    # Mostly they are equal in all but their sequence, which is cheaper to see than to build their keys.
    rest = calls[0][1:]
    if all(call[1:] == rest for call in calls):
        return True
    key = calls[0].key
    return all(call.key == key for call in calls)


class Attendance:
    """One rank at a meeting that it has not waited for. What it receives is written when it does."""

    def __init__(self, floor: Floor, meeting: _Meeting, rank: int, member: int) -> None:
        self._floor = floor
        self._meeting = meeting
        self._rank = rank
        self._member = member
        self._is_written = False

    def wait(self) -> None:
        arrival = self._meeting.arrivals[self._rank]
        assert arrival is not None
        if self._meeting.missing:
            self._meeting.waiting.append(self._member)
            self._floor.wait(self._member, arrival[1])
        self._write(arrival[0])

    def is_completed(self) -> bool:
        arrival = self._meeting.arrivals[self._rank]
        assert arrival is not None
        if self._meeting.missing:
            self._floor.poll(self._member)
        if self._meeting.missing:
            return False
        self._write(arrival[0])
        return True

    def _source_rank(self) -> int:
        return -1

    def _write(self, operation: Operation) -> None:
        if not self._is_written and self._meeting.received is not None:
            with torch.inference_mode():
                deliver(self._meeting.received[self._rank], operation.received)
        self._is_written = True


def deliver(values: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Write ``values`` into the tensors of the one who receives them."""
    for value, tensor in zip(values, received):  # noqa: B905  # a root sends, and receives nothing
        tensor.copy_(value if value.shape == tensor.shape else value.view(tensor.shape))
