"""Where the ranks of a group meet: collectives are done once for all, when the last one has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

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

    __slots__ = ("calls", "missing", "operations", "received", "somebody_receives_later", "waiting")

    def __init__(self, size: int) -> None:
        self.operations: list[Operation] = [_NONE] * size
        self.calls: list[Call] = [_NO_CALL] * size
        self.missing = size
        self.somebody_receives_later = False
        self.waiting: list[int] = []  # members asleep until the others have come
        self.received: exchange.Received | None = None  # of those who have not waited for it yet


# In the place of a rank that has not come.
_NONE = Operation("", "", ())
_NO_CALL = Call(-1, "", "", (), "", "", 0, 0)


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
        # One for all collectives, since making it costs more than it does: nobody waits within it.
        self._unrecorded = torch.inference_mode()

    def attend(self, rank: int, operation: Operation, call: Call) -> Attendance | None:
        """Arrive. Returns when all have met and the collective is done, or at once if it is asynchronous."""
        place = self._places[rank] - self._over
        self._places[rank] += 1
        if place == len(self._open):
            self._open.append(_Meeting(self._size))
        meeting = self._open[place]
        meeting.operations[rank] = operation
        meeting.calls[rank] = call
        meeting.missing -= 1
        member = self._members[rank]
        if operation.is_async:
            meeting.somebody_receives_later = True
        if meeting.missing == 0:
            self._open.popleft()  # the first: everybody has come to those before it
            self._over += 1
            if not _agree(meeting.calls):
                self._diverge(meeting, member, call)
            else:
                self._do(meeting)
                self._floor.go_on(member, meeting.waiting)
        elif operation.is_async:
            self._floor.go_on(member)
        else:
            meeting.waiting.append(member)
            self._floor.wait(member, call)
        return Attendance(self._floor, meeting, rank, member) if operation.is_async else None

    def _do(self, meeting: _Meeting) -> None:
        operations = meeting.operations
        misfit = exchange.unequal(operations)
        if misfit is not None:
            raise self._floor.fail(self._misfit(meeting.calls[misfit[0]], *misfit))
        tensors = operations[0].tensors
        on_gpu = tensors[0].device if tensors and tensors[0].is_cuda else None
        # Ranks may have queued their work on streams of their own.
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)
        # Inference mode lets tensors of either mode be written, and keeps the copies out of autograd.
        with self._unrecorded:
            try:
                received = exchange.perform(operations, in_place=not meeting.somebody_receives_later)
            except (RuntimeError, KeyError) as impossible:
                raise self._floor.fail(self._unsupported(meeting.calls[0], impossible)) from impossible
            if meeting.somebody_receives_later:
                now = [rank for rank, operation in enumerate(operations) if not operation.is_async]
                deliver([received[rank] for rank in now], [operations[rank] for rank in now])
                meeting.received = exchange.kept(operations, received)
            else:
                deliver(received, operations)
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)

    def _diverge(self, meeting: _Meeting, last: int, call: Call) -> None:
        """Fail; or return to the program of the odd rank, if what that calls next says more."""
        failure = self._divergence(meeting.calls)
        odd = self._floor.odd_one()
        if odd is None or (odd != last and odd not in meeting.waiting):
            raise self._floor.fail(failure)
        with torch.inference_mode():
            for tensor in meeting.operations[self._members.index(odd)].received:
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

    def _unsupported(self, call: Call, impossible: BaseException) -> WorldUnavailable:
        return WorldUnavailable(
            f"a collective on {self._world}",
            expected="a reduction that torch has for this type on this device",
            received=f"{call.what}: {impossible}",
            where=Where(site=call.site),
        )


def _agree(calls: Sequence[Call]) -> bool:
    """Whether these calls have one key."""
    # Mostly they are equal altogether, which is cheaper to see than to build their keys.
    if calls.count(calls[0]) == len(calls):
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
        if self._meeting.missing:
            self._meeting.waiting.append(self._member)
            self._floor.wait(self._member, self._meeting.calls[self._rank])
        self._write()

    def is_completed(self) -> bool:
        if self._meeting.missing:
            self._floor.poll(self._member)
        if self._meeting.missing:
            return False
        self._write()
        return True

    def _source_rank(self) -> int:
        return -1

    def _write(self) -> None:
        if not self._is_written and self._meeting.received is not None:
            with torch.inference_mode():
                deliver([self._meeting.received[self._rank]], [self._meeting.operations[self._rank]])
        self._is_written = True


def deliver(received: exchange.Received, operations: Sequence[Operation]) -> None:
    """Write what each rank receives into its tensors, all in one call of torch."""
    sources, targets = list(chain.from_iterable(received)), [t for o in operations for t in o.received]
    if not targets:
        return
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:  # shaped otherwise
        views = [source.view(target.shape) for source, target in zip(sources, targets, strict=True)]
        torch._foreach_copy_(targets, views)
