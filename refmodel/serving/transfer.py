"""What the ranks of a prefill group send to decode: whole pages, each by its position (laws T1–T5).

Decode holds every page of a request under its own page numbers, so a rank sends pairs (local page, page
position), and the position chooses where a page goes. :mod:`refmodel.serving.receiver` is the other side.

>>> ends = (100, False), (200, False), (250, True)
>>> [len(chunk_pages(start, end, is_last, 64)) for start, (end, is_last) in zip((0, 1, 3), ends)]
[1, 2, 1]
>>> [[tuple(pair) for pair in pairs([4, 9, 12], 0, rank, 4)] for rank in range(4)]
[[(1, 0), (3, 2)], [(2, 1)], [], []]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, at_least, check_in_range, num_pages
from refmodel.layout.ownership import local_page, owner
from refmodel.storage.pages import words
from refmodel.storage.shard import Shard


class Pair(NamedTuple):
    """One page to send: where its owner keeps it, and which page of the request it is."""

    local_page: int
    position: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends of one chunk. With ``is_last`` it is the rank's final signal, pages or not (T3)."""

    request: int
    rank: int  # of the prefill group
    chunk: int  # number of the chunk, from 0: every rank sends one message a chunk
    is_last: bool
    first_page: int  # page positions of the chunk, those of all ranks: [first_page, stop_page)
    stop_page: int
    pairs: tuple[Pair, ...]  # of the KV cache, rising positions
    index_pairs: tuple[Pair, ...]  # of the index cache: the same pages (T4)

    def __post_init__(self) -> None:
        where = Where(rank=self.rank, request=str(self.request))
        at_least(0, self.rank, "rank of a message")
        at_least(0, self.chunk, "chunk number of a message")
        at_least(
            at_least(0, self.first_page, "first page of a message"), self.stop_page, "stop page of a message"
        )
        if any(pair.local_page < 1 for pair in self.pairs):
            raise InvalidInput(
                "pages of a message",
                expected="local pages >= 1; local page 0 is the dummy page",
                received=min(pair.local_page for pair in self.pairs),
                where=where,
            )
        sent = [pair.position for pair in self.pairs]
        rising = all(one < next_one for one, next_one in pairwise(sent))
        if not rising or not all(position in self.positions for position in sent):
            raise InvalidInput(
                "page positions of a message",
                expected=f"rising, in {self.positions}",
                received=sent,
                where=where,
            )

    @property
    def positions(self) -> range:
        """Page positions of the chunk."""
        return range(self.first_page, self.stop_page)

    def fingerprint(self) -> tuple[int, ...]:
        """All of it, as integers."""
        head = (self.request, self.rank, self.chunk, int(self.is_last), self.first_page, self.stop_page)
        sent = [number for pair in self.pairs + self.index_pairs for number in pair]
        return (*head, len(self.pairs), *sent)


def chunk_pages(start_page: int, end: int, is_last: bool, page_size: int) -> range:
    """Page positions to send when a chunk ends at token ``end`` and pages below ``start_page`` are sent (T1).

    The open page of a chunk waits; the last chunk sends its tail page as it is, and no page beyond it.
    :class:`InvalidInput` if the chunk ends before what was sent.
    """
    at_least(0, start_page, "first page of a chunk")
    at_least(start_page * page_size, end, "end of a chunk in tokens")
    return range(start_page, num_pages(end, page_size) if is_last else end // page_size)


def closed_tokens(end: int, overlap: int) -> int:
    """Leading tokens whose keys are known when a chunk ends at token ``end``.

    ``overlap``: tokens beyond a page that its keys need (L8). A page with an open key is not in the tree yet,
    and may come to be bound to another of the same tokens (L6): a message that names it would be stale.

    >>> closed_tokens(8, overlap=0), closed_tokens(8, overlap=1)
    (8, 7)
    """
    return max(0, end - overlap)


def pairs(pages: Sequence[int], first_position: int, rank: int, world_size: int) -> tuple[Pair, ...]:
    """The pairs of those logical ``pages`` that ``rank`` owns; none is normal (T2).

    The pages lie at positions ``first_position``, + 1, …. :class:`InvalidInput` for a dummy page.
    """
    for position, page in enumerate(pages, first_position):
        if page < world_size:
            raise InvalidInput(
                "page to send",
                expected=f"a logical page >= W = {world_size}; lower ones are dummies",
                received=page,
                where=Where(rank=rank, position=position),
            )
    return tuple(
        Pair(local_page(page, world_size), position)
        for position, page in enumerate(pages, first_position)
        if owner(page, world_size) == rank
    )


def destination_pages(pages: Sequence[int], sent: Sequence[Pair]) -> tuple[int, ...]:
    """Decode's page for each pair: of its ``pages`` [pages of the request], the one at that position (T2).

    >>> destination_pages([30, 10, 20], [Pair(1, 0), Pair(3, 2)])
    (30, 20)
    """
    return tuple(pages[pair.position] for pair in sent)


class Phase(IntEnum):
    """How far a sender is."""

    OPEN = 0
    FINISHED = 1  # the last chunk is sent
    ABORTED = 2


class Sender:
    """One rank's side of the transfer of one request.

    :meth:`send` and :meth:`abort` change it, nothing else. All ranks of the group call them alike, chunk by
    chunk. A message stays valid until the pages it names are freed. A call that fails changes nothing (X3).
    ``overlap``: tokens beyond a page that its keys need, 1 of a tree that keys by pairs (L8): such a page
    waits for the next chunk, as an open one does.
    """

    def __init__(self, request: int, rank: int, grid: Grid, overlap: int = 0) -> None:
        check_in_range(rank, grid.world_size, "rank of a sender", Where(rank=rank, request=str(request)))
        self._overlap = at_least(0, overlap, "tokens beyond a page that its keys need")
        self._request = request
        self._rank = rank
        self._grid = grid
        self._sent: list[range] = []  # page positions of each chunk so far, those of all ranks
        self._phase = Phase.OPEN

    @property
    def phase(self) -> Phase:
        return self._phase

    def send(self, pages: Sequence[int], end: int, *, is_last: bool, written: int) -> Message:
        """The message of the chunk that ends at token ``end``.

        ``pages``: logical pages of the request by position, at least as far as the chunk goes. ``written``:
        tokens whose forward is finished in all layers; what is not there yet is not sent (T5).
        :class:`InvalidInput` if the chunk ends behind them, after the last chunk, after an abort.
        """
        self._require_open()
        if end > written:
            raise InvalidInput(
                "end of a chunk to send",
                expected=f"at most {written}, the tokens whose forward is finished",
                received=end,
                where=self._where,
            )
        P, sent = self._grid.page_size, self._next_page
        at_least(max(1, sent * P), end, "end of a chunk in tokens")
        closed = end if is_last else max(sent * P, closed_tokens(end, self._overlap))
        positions = chunk_pages(sent, closed, is_last, P)
        if len(pages) < positions.stop:
            raise InvalidInput(
                "pages of a request to send",
                expected=f"at least {positions.stop} for {end} tokens",
                received=len(pages),
                where=self._where,
            )
        chunk = pages[positions.start : positions.stop]
        mine = pairs(chunk, positions.start, self._rank, self._grid.world_size)
        message = Message(
            request=self._request,
            rank=self._rank,
            chunk=len(self._sent),
            is_last=is_last,
            first_page=positions.start,
            stop_page=positions.stop,
            pairs=mine,
            index_pairs=mine,
        )
        self._sent.append(positions)
        self._phase = Phase.FINISHED if is_last else Phase.OPEN
        return message

    def abort(self) -> None:
        """No more messages. :class:`InvalidInput` after the last chunk or an abort."""
        self._require_open()
        self._phase = Phase.ABORTED

    def _require_open(self) -> None:
        if self._phase is not Phase.OPEN:
            raise InvalidInput(
                "transfer of a request",
                expected="one that is open",
                received=self._phase.name.lower(),
                where=self._where,
                fix="A request is sent once: by its last chunk or an abort it is over (T3).",
            )

    @property
    def _next_page(self) -> int:
        return self._sent[-1].stop if self._sent else 0

    @property
    def _where(self) -> Where:
        return Where(rank=self._rank, request=str(self._request))

    def check(self) -> tuple[Finding, ...]:
        """Where chunks do not follow each other from page 0 on (T3). None, unless broken."""
        return tuple(
            Finding("T3", "chunk sent", f"page positions from {before.stop}", str(after), self._where)
            for before, after in pairwise([range(0), *self._sent])
            if before.stop != after.start
        )

    def fingerprint(self) -> tuple[int, ...]:
        """All state, as integers."""
        grid = (self._grid.world_size, self._grid.page_size)
        stops = (span.stop for span in self._sent)
        return (self._request, self._rank, *grid, int(self._phase), *stops)


def take_pages(shard: Shard, sent: Sequence[Pair]) -> torch.Tensor:
    """The bytes of a message's pages, uint8 [pairs, page bytes], slots past the valid length included."""
    locals_ = [pair.local_page for pair in sent]
    _check_pages(locals_, shard)
    return shard.take(_index(locals_, shard))


def put_pages(decode: Shard, pages: Sequence[int], taken: torch.Tensor) -> None:
    """Write whole pages, uint8 [n, page bytes], at decode's ``pages`` [n].

    Decode's cache is a shard of one rank: W = 1, so that its page numbers are its own. :class:`InvalidInput`,
    with nothing written, for pages it has not and for pages of another size.
    """
    expected = [len(pages), decode.pages.shape[1]]
    if list(taken.shape) != expected:
        raise InvalidInput("pages to write, in bytes", expected=expected, received=list(taken.shape))
    _check_pages(pages, decode)
    words(decode.pages)[_index(pages, decode)] = words(taken)


def _check_pages(pages: Sequence[int], shard: Shard) -> None:
    stop = shard.pages.shape[0]
    outside = [page for page in pages if not 1 <= page < stop]
    if outside:
        raise InvalidInput(
            "page of a shard",
            expected=f"1 … {stop - 1}; 0 is the dummy page",
            received=outside[0],
            where=Where(rank=shard.rank),
        )


def _index(pages: Sequence[int], shard: Shard) -> torch.Tensor:
    """Page numbers on the shard's device, without waiting for what is queued there (S7)."""
    return torch.tensor(pages, dtype=torch.int64).to(shard.pages.device, non_blocking=True)
