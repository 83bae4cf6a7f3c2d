"""What decode accepts of the ranks of a prefill group (laws T2–T4, X1).

Every rank sends one message a chunk, also an empty one; the last is its final signal. So while a request is
not done, it is known whose message is missing. Messages come in any order.

>>> from refmodel.serving.transfer import Sender
>>> receiver = Receiver(Registration(request=0, tokens=150, pages=(30, 10, 20), page_size=64), Grid(2, 64))
>>> one, other = (
...     Sender(0, rank, Grid(2, 64)).send([4, 9, 12], 150, is_last=True, written=150) for rank in (0, 1)
... )
>>> receiver.accept(one), receiver.done()
((30, 20), False)
>>> receiver.missing()
(Missing(rank=1, chunk=0, positions=(1,)),)
>>> receiver.accept(other), receiver.done()
((10,), True)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, at_least, num_pages
from refmodel.serving.transfer import Message, destination_pages


@dataclass(frozen=True, slots=True)
class Registration:
    """What decode has made ready for a request: as many pages of KV and of index as its tokens need (T4)."""

    request: int
    tokens: int  # of the prompt, >= 1
    pages: tuple[int, ...]  # [ceil(tokens / P)] decode's pages by position
    page_size: int  # decode's P

    def __post_init__(self) -> None:
        at_least(1, self.page_size, "decode's page size P")
        needed = num_pages(at_least(1, self.tokens, "tokens of a registration"), self.page_size)
        if len(set(self.pages)) != needed or len(self.pages) != needed:
            raise InvalidInput(
                "pages of a registration",
                expected=f"{needed} different ones for {self.tokens} tokens",
                received=list(self.pages),
                where=Where(request=str(self.request)),
            )


def _cut(message: Message) -> str:
    last = ", the last" if message.is_last else ""
    return f"pages {message.first_page} to {message.stop_page}{last}"


@dataclass(frozen=True, slots=True)
class Missing:
    """A message that has not come."""

    rank: int
    chunk: int  # the one after those seen, if no rank's last has come
    positions: tuple[int, ...]  # page positions of the chunk that no rank has brought


class Receiver:
    """Decode's side of the transfer of one request.

    :meth:`accept` and :meth:`abort` change it, nothing else. What ``accept`` returns never changes later.
    A message that is refused changes nothing (X3).
    """

    def __init__(self, registration: Registration, prefill: Grid) -> None:
        if registration.page_size != prefill.page_size:
            raise InvalidInput(
                "page size P of prefill and decode",
                expected=f"decode's {registration.page_size}",
                received=prefill.page_size,
                where=Where(request=str(registration.request)),
                fix="Pages are sent whole: start both servers with one page size (X1).",
            )
        self._registration = registration
        self._world_size = prefill.world_size
        self._messages: dict[tuple[int, int], Message] = {}  # by (chunk, rank)
        self._aborted = False
        self._repeats = 0

    @property
    def repeats(self) -> int:
        """Messages that came again and were ignored."""
        return self._repeats

    def accept(self, message: Message) -> tuple[int, ...]:
        """Decode's page for each pair of the message: where its bytes are to go, in every cache and layer.

        None for a repeat of a message, which is counted. :class:`InvalidInput` for one that contradicts what
        came before or what decode has registered, and for any after success or an abort.
        """
        self._require_open(message)
        if self._is_repeat(message):
            self._repeats += 1
            return ()
        self._check_index(message)
        self._check_chunk(message)
        self._check_positions(message)
        self._messages[message.chunk, message.rank] = message
        return destination_pages(self._registration.pages, message.pairs)

    def abort(self) -> None:
        """Accept nothing more. :class:`InvalidInput` after success or an abort."""
        self._require_open(None)
        self._aborted = True

    def done(self) -> bool:
        """Success: every message of every rank has come, its final signal too (T3)."""
        last = self._last_chunk()
        return last is not None and len(self._messages) == (last + 1) * self._world_size

    def missing(self) -> tuple[Missing, ...]:
        """Messages that have not come, by chunk and rank; none when :meth:`done`."""
        spans, last = self._spans(), self._last_chunk()
        chunks = range(max(spans, default=-1) + 2 if last is None else last + 1)
        return tuple(
            Missing(rank, chunk, self._open_positions(chunk, spans))
            for chunk in chunks
            for rank in range(self._world_size)
            if (chunk, rank) not in self._messages
        )

    # -- what is known of the chunks -------------------------------------------------------------------

    def _spans(self) -> dict[int, range]:
        """Page positions of each chunk of which a message has come."""
        return {chunk: message.positions for (chunk, _), message in self._messages.items()}

    def _last_chunk(self) -> int | None:
        """Number of the last chunk, once some rank's has come."""
        return next((m.chunk for m in self._messages.values() if m.is_last), None)

    def _bounds(self, chunk: int, spans: dict[int, range]) -> range:
        """Page positions between the chunks that are known before and after this one."""
        start = max((span.stop for c, span in spans.items() if c < chunk), default=0)
        stop = min((span.start for c, span in spans.items() if c > chunk), default=self._num_pages)
        return range(start, stop)

    def _arrived(self, chunk: int) -> set[int]:
        """Page positions of a chunk that some rank has brought."""
        ranks = range(self._world_size)
        came = [self._messages[chunk, r] for r in ranks if (chunk, r) in self._messages]
        return {pair.position for message in came for pair in message.pairs}

    def _open_positions(self, chunk: int, spans: dict[int, range]) -> tuple[int, ...]:
        arrived = self._arrived(chunk)
        span = spans.get(chunk, self._bounds(chunk, spans))
        return tuple(position for position in span if position not in arrived)

    @property
    def _num_pages(self) -> int:
        return len(self._registration.pages)

    # -- refusals --------------------------------------------------------------------------------------

    def _require_open(self, message: Message | None) -> None:
        """Refuse what comes too late or is not for this receiver."""
        if self._aborted or self.done():
            raise InvalidInput(
                "transfer of a request",
                expected="one that is open",
                received="aborted" if self._aborted else "done",
                where=self._where(message),
            )
        if message and (message.request != self._registration.request or message.rank >= self._world_size):
            raise InvalidInput(
                "message to a receiver",
                expected=f"request {self._registration.request}, ranks 0 … {self._world_size - 1}",
                received=f"request {message.request}, rank {message.rank}",
                where=self._where(message),
            )

    def _is_repeat(self, message: Message) -> bool:
        """Whether this very message has come; another with its rank and chunk is refused."""
        before = self._messages.get((message.chunk, message.rank), message)
        if before != message:
            raise InvalidInput(
                f"repeat of chunk {message.chunk}",
                expected=f"the message that came before, {before}",
                received=message,
                where=self._where(message),
            )
        return (message.chunk, message.rank) in self._messages

    def _check_index(self, message: Message) -> None:
        """Index pages are the KV pages, and as many as registered: else refused before any write (T4)."""
        if message.index_pairs != message.pairs:
            raise InvalidInput(
                f"index pages of chunk {message.chunk}",
                expected=f"the {len(message.pairs)} pairs of the KV cache",
                received=f"{len(message.index_pairs)} pairs: {[tuple(p) for p in message.index_pairs]}",
                where=self._where(message),
            )
        stop = message.positions.stop
        if stop > self._num_pages or (message.is_last and stop != self._num_pages):
            raise InvalidInput(
                f"pages sent by the end of chunk {message.chunk}",
                expected=f"{self._num_pages}, as registered for {self._registration.tokens} tokens",
                received=stop,
                where=self._where(message),
            )

    def _check_chunk(self, message: Message) -> None:
        """All ranks cut a request into the same chunks, one behind the other; the same one is the last."""
        alike = next((m for (chunk, _), m in self._messages.items() if chunk == message.chunk), None)
        if alike:
            expected = f"{_cut(alike)}, as rank {alike.rank} sent"
            fits = _cut(message) == _cut(alike)
        else:
            spans, last = self._spans(), self._last_chunk()
            bounds = self._bounds(message.chunk, spans)
            expected = f"pages in {bounds}, next to the chunks around it, none behind chunk {last}"
            fits = self._follows(message, bounds, spans) and self._may_be_last(message, spans)
        if not fits:
            raise InvalidInput(
                f"cut of chunk {message.chunk}",
                expected=expected,
                received=_cut(message),
                where=self._where(message),
            )

    @staticmethod
    def _follows(message: Message, bounds: range, spans: dict[int, range]) -> bool:
        """Whether a chunk lies between those around it, and touches its neighbours."""
        after_neighbour = message.chunk == 0 or message.chunk - 1 in spans
        before_neighbour = message.chunk + 1 in spans
        gaps = message.first_page - bounds.start, bounds.stop - message.stop_page
        return min(gaps) >= 0 and not (after_neighbour and gaps[0]) and not (before_neighbour and gaps[1])

    def _may_be_last(self, message: Message, spans: dict[int, range]) -> bool:
        """Whether no chunk comes behind the last."""
        last = self._last_chunk()
        if last is not None:
            return message.chunk < last and not message.is_last
        return not message.is_last or message.chunk > max(spans, default=-1)

    def _check_positions(self, message: Message) -> None:
        """No page position comes twice, and none of a chunk is left when all ranks have sent (T3)."""
        arrived = self._arrived(message.chunk)
        twice = [pair.position for pair in message.pairs if pair.position in arrived]
        if twice:
            raise InvalidInput(
                f"page positions of chunk {message.chunk}",
                expected="each from one rank",
                received=f"position {twice[0]} again",
                where=self._where(message, twice[0]),
            )
        senders = sum(chunk == message.chunk for chunk, _ in self._messages) + 1
        left = set(message.positions) - arrived - {pair.position for pair in message.pairs}
        if senders == self._world_size and left:
            raise InvalidInput(
                f"page positions of chunk {message.chunk}",
                expected="each from one rank",
                received=f"position {min(left)} from none",
                where=self._where(message, min(left)),
            )

    def _where(self, message: Message | None, position: int | None = None) -> Where:
        rank = message.rank if message else None
        return Where(rank=rank, request=str(self._registration.request), position=position)

    # -- the whole state -------------------------------------------------------------------------------

    def check(self) -> tuple[Finding, ...]:
        """Where a KV or index page came twice or, when done, not at all (T3, T4). None, unless broken."""
        messages, done = self._messages.values(), self.done()
        kv = Counter(pair.position for message in messages for pair in message.pairs)
        index = Counter(pair.position for message in messages for pair in message.index_pairs)
        return tuple(
            Finding(law, f"arrivals of {what}", "1", str(came[position]), self._where(None, position))
            for law, what, came in (("T3", "a KV page", kv), ("T4", "an index page", index))
            for position in range(self._num_pages)
            if came[position] > 1 or (done and not came[position])
        )

    def fingerprint(self) -> tuple[int | tuple[int, ...], ...]:
        """All state, as integers; the order in which messages came is no part of it."""
        r = self._registration
        head = (r.request, r.tokens, r.page_size, self._world_size, int(self._aborted), self._repeats)
        messages = (message.fingerprint() for _, message in sorted(self._messages.items()))
        return (*head, r.pages, *messages)
