"""Decode, as every rank knows it: its pages, and the requests that it has whole (laws T5, L1).

Bytes are in :mod:`sim.engine.landing`. Decode knows no CP: one rank has every page of its requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, num_pages
from refmodel.serving.lanes import Lanes
from refmodel.serving.receiver import Registration
from sim.engine.request import Request, name_number
from sim.engine.truth import Ids, prefix_hashes, sampled_id
from sim.histories.history import History


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """A request that decode has whole, and goes on with by itself."""

    pages: tuple[int, ...]  # decode's, by page position
    ids: Ids  # [tokens], those that have rows: the prompt, then what was sampled


class DecodeServer:
    """Pages and requests of decode. A refused call changes nothing (X3)."""

    def __init__(self, history: History) -> None:
        self.grid = decode_grid(history)
        self.lanes = Lanes(self.grid, decode_pages(history))
        self._decodings: dict[str, Decoding] = {}

    def offer(self, request: Request) -> Registration:
        """The pages that all tokens of a request would get; nothing is taken yet (T4)."""
        tokens, P = len(request.ids), self.grid.page_size
        needed = num_pages(tokens, P)
        self._require_free(needed, Where())
        return Registration(request.number, tokens, self.lanes.next_free(0, needed), P)

    def make_ready(self, registration: Registration) -> None:
        """Take the pages that were offered last."""
        self.lanes.take([0] * len(registration.pages))

    def begin(self, name: str, pages: tuple[int, ...], ids: Ids) -> None:
        """A request has arrived whole."""
        self._decodings[name] = Decoding(pages, ids)

    def has(self, name: str) -> bool:
        """Whether decode goes on with a request: it has arrived, and has not left."""
        return name in self._decodings

    def of(self, name: str) -> Decoding:
        return self._decodings[name]

    def require_room(self, names: Sequence[str]) -> None:
        """Refuse a step of these requests together, unless each can have the page that it opens."""
        opening = [name for name in names if self._opens_a_page(self.of(name))]
        if opening:
            self._require_free(len(opening), Where(request=opening[0]))

    def extend(self, name: str) -> Decoding:
        """One sampled token more; its row is to be written next."""
        decoding = self.of(name)
        pages = self.lanes.take([0]) if self._opens_a_page(decoding) else ()
        ids = sampled_id(decoding.ids, prefix_hashes(decoding.ids))
        self._decodings[name] = Decoding((*decoding.pages, *pages), ids)
        return self._decodings[name]

    def leave(self, name: str, pages: Collection[int]) -> None:
        """A request leaves: the pages that were made ready for it are free, and those that it opened."""
        decoding = self._decodings.pop(name, None)
        self.lanes.free(pages if decoding is None else decoding.pages)

    def _opens_a_page(self, decoding: Decoding) -> bool:
        return len(decoding.ids) == len(decoding.pages) * self.grid.page_size

    def _require_free(self, needed: int, where: Where) -> None:
        free = self.lanes.free_pages(0)
        if needed > free:
            raise InvalidInput("pages of decode", expected=f"{needed} free", received=free, where=where)

    def check(self, registered: Sequence[int]) -> list[Finding]:
        """Where pages belong to nobody, or to two. ``registered``: those made ready for what is under way."""
        own = [page for decoding in self._decodings.values() for page in decoding.pages]
        held, expected = list(self.lanes.fingerprint()[0][1]), sorted([*registered, *own])
        found = list(self.lanes.check())
        if expected != held:
            found.append(Finding("L1", "pages of decode", str(expected), f"{held} held"))
        return found

    def fingerprint(self) -> tuple[object, ...]:
        """All state, as integers: equal on every rank after every step."""
        decodings = (
            (name_number(name), len(each.ids), *each.pages) for name, each in self._decodings.items()
        )
        return self.lanes.fingerprint(), *decodings


def decode_grid(history: History) -> Grid:
    """Decode has every page of its requests: one rank."""
    return Grid(1, history.decode_page_size or history.page_size)


def decode_pages(history: History) -> int:
    """Pages that decode has, the dummy not counted."""
    return history.decode_pages or history.world_size * history.pages_per_lane
