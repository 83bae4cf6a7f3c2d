"""The transfer of one request to decode, both sides: who sends what, and what became of it (laws T1–T4).

Each rank has the senders of all ranks and decode's receiver, so all ranks know which message brings what and
which was lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, check_in_range
from refmodel.layout.ownership import logical_page
from refmodel.serving.receiver import Missing, Receiver, Registration
from refmodel.serving.transfer import Message, Phase, Sender
from sim.engine.request import Request
from sim.histories.history import Gap, Send


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message that decode accepted, and decode's page for each of its pairs."""

    message: Message
    pages: tuple[int, ...]


Key = tuple[int, int]  # chunk and rank of a message


class Transfer:
    """Both sides of the transfer of one request. :class:`Transfers` changes a copy of it, then keeps that."""

    def __init__(self, request: Request, grid: Grid, registration: Registration, overlap: int) -> None:
        self.grid = grid
        self.registration = registration
        self.senders = [Sender(request.number, rank, grid, overlap) for rank in range(grid.world_size)]
        self.receiver = Receiver(registration, grid)
        self.cancelled = False
        self.chunks = 0
        self.lost: dict[Key, Message] = {}
        self.late: dict[Key, Message] = {}  # they come behind the messages of the next chunk

    @property
    def under_way(self) -> bool:
        """Whether decode waits for something."""
        return not self.cancelled and not self.receiver.done()

    # -- what happens ------------------------------------------------------------------------------------

    def send(self, request: Request, wanted: Send) -> list[Parcel]:
        """A message of each rank, with pages or without (T1–T3); what of them reaches decode."""
        end = request.valid if wanted.tokens is None else wanted.tokens
        is_last = end == len(request.ids)
        _check_fates(wanted, self.grid.world_size, is_last)
        messages = [
            sender.send(request.pages, end, is_last=is_last, written=request.valid) for sender in self.senders
        ]
        self.chunks += 1
        came = [
            message
            for message in messages
            if message.rank not in (*wanted.lose, *wanted.late)
            for _ in range(2 if message.rank in wanted.repeat else 1)
        ]
        came.extend(self.late.values())
        self.lost |= {_key(message): message for message in messages if message.rank in wanted.lose}
        self.late = {_key(message): message for message in messages if message.rank in wanted.late}
        return self._give(came)

    def resend(self, ranks: Sequence[int]) -> list[Parcel]:
        """What was lost of these ranks arrives after all."""
        again = [message for message in self.lost.values() if message.rank in ranks]
        for rank in ranks:
            if all(message.rank != rank for message in again):
                raise InvalidInput(
                    "message to send again",
                    expected="a rank of which one was lost",
                    received=f"rank {rank}",
                    where=Where(rank=rank),
                )
        parcels = self._give(again)
        self.lost = {key: message for key, message in self.lost.items() if message.rank not in ranks}
        return parcels

    def _give(self, messages: Sequence[Message]) -> list[Parcel]:
        given: set[Key] = set()
        parcels = []
        for message in messages:
            repeated = _key(message) in given
            given.add(_key(message))
            if repeated and self.receiver.done():
                continue  # decode has closed the transfer: it would refuse the repeat
            if pages := self.receiver.accept(message):
                parcels.append(Parcel(message, pages))
        return parcels

    def cancel(self) -> None:
        """The end, without success: both sides abort."""
        self.receiver.abort()
        for sender in self.senders:
            if sender.phase is Phase.OPEN:
                sender.abort()
        self.cancelled = True

    # -- what must hold ----------------------------------------------------------------------------------

    def check(self, name: str, request: Request) -> Iterator[Finding]:
        """Where T3 and T5 do not hold: success, what is missing, pages that are on their way."""
        broken = [*(each for sender in self.senders for each in sender.check()), *self.receiver.check()]
        yield from (replace(each, where=replace(each.where, request=name)) for each in broken)
        if self.cancelled:
            return
        waiting = self.lost | self.late
        complete = self.senders[0].phase is Phase.FINISHED and not waiting
        if self.receiver.done() != complete:
            yield Finding("T3", "success", str(complete), str(not complete), Where(request=name))
        yield from self._check_missing(name, waiting)
        for message in waiting.values():
            for local, position in message.pairs:
                page = logical_page(local, message.rank, self.grid.world_size)
                if request.pages[position] != page:
                    where = Where(rank=message.rank, request=name, position=position)
                    yield Finding("T5", "page on its way", str(page), str(request.pages[position]), where)

    def _check_missing(self, name: str, waiting: Mapping[Key, Message]) -> Iterator[Finding]:
        """Decode names each message that was lost, up to the chunk behind the last it has heard of."""
        ranks = range(self.grid.world_size)
        heard = [c for c in range(self.chunks) if any((c, rank) not in waiting for rank in ranks)]
        named = {(gap.chunk, gap.rank): gap.positions for gap in self.receiver.missing()}
        for key, message in waiting.items():
            lost = tuple(pair.position for pair in message.pairs)
            if message.chunk <= max(heard, default=-1) + 1 and not set(lost) <= set(named.get(key, ())):
                yield Finding(
                    "T3",
                    f"positions missing of chunk {message.chunk}",
                    f"at least {list(lost)}",
                    str(list(named.get(key, ()))),
                    Where(rank=message.rank, request=name),
                )

    def compare_missing(self, name: str, expected: Sequence[Gap] | None) -> list[Finding]:
        """What decode says is missing, beside what was worked out by hand (T3)."""
        received = self.receiver.missing()
        named = [Missing(gap.rank, gap.chunk, tuple(gap.positions)) for gap in expected or ()]
        if expected is None or list(received) == named:
            return []
        return [Finding("T3", "messages missing", in_words(named), in_words(received), Where(request=name))]

    def fingerprint(self) -> tuple[object, ...]:
        """All state, as integers."""
        senders = tuple(sender.fingerprint() for sender in self.senders)
        fate = tuple(self.lost), tuple(self.late), int(self.cancelled), self.chunks
        return senders, self.receiver.fingerprint(), fate


def _key(message: Message) -> Key:
    return message.chunk, message.rank


def in_words(gaps: Sequence[Missing]) -> str:
    """In words."""
    said = [f"rank {gap.rank}, chunk {gap.chunk}, positions {list(gap.positions)}" for gap in gaps]
    return "; ".join(said) or "nothing"


def _check_fates(wanted: Send, world_size: int, is_last: bool) -> None:
    """Each rank's message has one fate, and what is late has something to come behind."""
    fates = [*wanted.lose, *wanted.repeat, *wanted.late]
    for rank in fates:
        check_in_range(rank, world_size, "rank of a message", Where(rank=rank))
    if len(set(fates)) != len(fates):
        raise InvalidInput("ranks to lose, repeat or delay", expected="each once", received=fates)
    if is_last and wanted.late:
        raise InvalidInput(
            "late messages",
            expected="none of the last chunk, which no other follows",
            received=f"ranks {list(wanted.late)}",
            fix="Lose them, and send them again.",
        )
