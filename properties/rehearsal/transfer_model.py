"""Transfers to decode as the model knows them: the fate of each chunk's message of a rank (laws T1–T4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refmodel.layout.geometry import num_pages
from refmodel.layout.ownership import owner
from sim.engine.request import Request
from sim.histories.history import Gap, History, Send

Message = tuple[int, int]  # chunk, rank


@dataclass(slots=True)
class Sent:
    """What was sent of one request, and what of it came."""

    tokens: int  # that decode was told of, and then those that it sampled
    chunks: list[range] = field(default_factory=list)  # page positions of each
    came: dict[Message, set[int]] = field(default_factory=dict)  # positions that it brought
    lost: dict[Message, set[int]] = field(default_factory=dict)
    late: dict[Message, set[int]] = field(default_factory=dict)
    is_over: bool = False  # the last chunk was sent
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_over and not self.lost and not self.late

    @property
    def is_under_way(self) -> bool:
        return not self.is_cancelled and not self.is_done

    def copy(self) -> Sent:
        return Sent(
            self.tokens, [*self.chunks], {**self.came}, {**self.lost}, {**self.late}, self.is_over, False
        )


class TransferModel:
    """The transfers of all requests that have not left. Each method but :meth:`missing` does a step."""

    def __init__(self, history: History) -> None:
        self.W, self.P = history.world_size, history.page_size
        self.overlap = int(history.bigram)  # a page waits until the token behind it is known
        self.decode_pages = history.decode_pages or self.W * history.pages_per_lane
        self.sent: dict[str, Sent] = {}

    def is_there(self, name: str) -> bool:
        """Whether decode has a request whole, and goes on with it by itself (T5)."""
        return name in self.sent and self.sent[name].is_done and not self.sent[name].is_cancelled

    def may_decode(self, names: Sequence[str]) -> bool:
        """Whether decode has a page for each of these that opens one."""
        return sum(self.sent[name].tokens % self.P == 0 for name in names) <= self.free()

    def is_under_way(self, name: str) -> bool:
        """Whether a request's pages must stay what they are."""
        return name in self.sent and self.sent[name].is_under_way

    def free(self) -> int:
        """Pages that decode has left."""
        held = [num_pages(sent.tokens, self.P) for sent in self.sent.values() if not sent.is_cancelled]
        return self.decode_pages - sum(held)

    def may_begin(self, request: Request) -> bool:
        """Whether decode makes pages ready for a request: as large as here, and enough of them (T4)."""
        return num_pages(len(request.ids), self.P) <= self.free()

    def send(self, wanted: Send, request: Request) -> Sent | None:
        """A chunk of a request goes out from all ranks. None if it must be refused."""
        if wanted.request not in self.sent and not self.may_begin(request):
            return None
        sent = self.sent.get(wanted.request, Sent(len(request.ids)))
        end = request.valid if wanted.tokens is None else wanted.tokens
        first, is_last = sent.chunks[-1].stop if sent.chunks else 0, end == len(request.ids)
        if sent.is_over or sent.is_cancelled or not max(1, first * self.P) <= end <= request.valid:
            return None
        fates = [*wanted.lose, *wanted.repeat, *wanted.late]
        known = len(set(fates)) == len(fates) and all(rank < self.W for rank in fates)
        if not known or (is_last and wanted.late):
            return None
        after = sent.copy()
        closed = max(first, (end - self.overlap) // self.P)
        positions = range(first, num_pages(end, self.P) if is_last else closed)
        after.is_over = is_last
        after.came |= after.late
        after.late = {}
        for rank in range(self.W):
            fate = after.lost if rank in wanted.lose else after.late if rank in wanted.late else after.came
            mine = {i for i in positions if owner(request.pages[i], self.W) == rank}
            fate[len(sent.chunks), rank] = mine
        after.chunks.append(positions)
        return after

    def resend(self, name: str, ranks: list[int]) -> Sent | None:
        """What was lost of some ranks arrives. None if it must be refused."""
        sent = self.sent.get(name)
        if sent is None or sent.is_cancelled or not set(ranks) <= {rank for _, rank in sent.lost}:
            return None
        after = sent.copy()
        for key in [key for key in after.lost if key[1] in ranks]:
            after.came[key] = after.lost.pop(key)
        return after

    def missing(self, sent: Sent) -> list[Gap]:
        """What decode must say that it waits for: of each chunk it can know of, each rank not heard (T3)."""
        heard = {chunk for chunk, _ in sent.came}
        last = len(sent.chunks) - 1
        if not (sent.is_over and last in heard):
            last = max(heard, default=-1) + 1  # decode knows of one more, if not how long it is
        gaps = [(c, rank) for c in range(last + 1) for rank in range(self.W) if (c, rank) not in sent.came]
        return [Gap(rank, chunk, self._open(sent, chunk, heard)) for chunk, rank in gaps]

    def _open(self, sent: Sent, chunk: int, heard: set[int]) -> list[int]:
        """Positions of a chunk that no rank brought; of one not heard of, those between its neighbours."""
        start = max((sent.chunks[c].stop for c in heard if c < chunk), default=0)
        stop = min((sent.chunks[c].start for c in heard if c > chunk), default=num_pages(sent.tokens, self.P))
        positions = sent.chunks[chunk] if chunk in heard else range(start, stop)
        there = {i for (c, _), brought in sent.came.items() if c == chunk for i in brought}
        return [i for i in positions if i not in there]
