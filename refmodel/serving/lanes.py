"""The pages of every lane: who has them, and what becomes of a lane that runs out (laws L1, L3).

A lane is one rank's set of pages. Each of its pages is free, held by a request, or cached in the radix tree;
local page 0 is the dummy and never moves. A page is asked for by lane, since the plan says which rank
computes it (O4): that other lanes have pages does not help. :mod:`refmodel.serving.extend` turns the pages
taken into slots (L2).

>>> lanes = Lanes(Grid(2, 64), pages_per_lane=2)
>>> lanes.take([0, 1, 1])
(2, 3, 5)
>>> lanes.take([0, 1])
Traceback (most recent call last):
...
refmodel.serving.lanes.OutOfPages: pages of lane 1: expected 1 free, got 0 there, 1 in all lanes (rank 1)...
>>> lanes.cache([3])
>>> make_room(lanes, [0, 1], evict=lambda lane: [3])
>>> lanes.take([0, 1])
(4, 3)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import torch

from refmodel.errors import CpkvError, Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, at_least, check_in_range
from refmodel.layout.ownership import owner

Evict = Callable[[int], Sequence[int]]  # a lane → pages taken out of the tree to relieve it, of any lane


class PageState(Enum):
    """Who has a page."""

    FREE = "free"  # nobody
    HELD = "held"  # a request
    CACHED = "cached"  # the radix tree


class OutOfPages(CpkvError):
    """A lane, ``where.rank``, has fewer free pages than were asked of it. Nothing was taken."""


@dataclass(slots=True)
class _Lane:
    """The logical pages of one lane, each in one of three places."""

    free: deque[int]  # the next to be taken first
    held: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)


class Lanes:
    """The allocator: all pages of all lanes, as every rank knows them.

    :meth:`take`, :meth:`cache`, :meth:`free` and :meth:`free_slots` change it, nothing else does; each
    happens whole or not at all (L1). A page taken stays its taker's until it is freed. Queues are first in,
    first out and begin with the lowest page, so that ranks which make the same calls have the same pages.
    """

    def __init__(self, grid: Grid, pages_per_lane: int) -> None:
        """All pages free. ``pages_per_lane``, >= 1, does not count the dummy: local pages 1 … that many."""
        self.grid = grid
        self.pages_per_lane = at_least(1, pages_per_lane, "pages per lane")
        self._lanes = tuple(_Lane(deque(self._pages(lane))) for lane in range(grid.world_size))

    def _pages(self, lane: int) -> range:
        """Every logical page of a lane but its dummy."""
        W = self.grid.world_size
        return range(W + lane, W * (self.pages_per_lane + 1), W)

    # -- what changes it -------------------------------------------------------------------------------

    def take(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """One logical page, then held, from each lane named, in that order: FREE → HELD.

        :class:`OutOfPages` if any lane has fewer free pages than it is named; then none is taken (L1).
        """
        if short := self.shortage(lanes):
            raise _out_of_pages(self, min(short), lanes)
        pages = tuple(self._lanes[lane].free.popleft() for lane in lanes)
        for lane, page in zip(lanes, pages, strict=True):
            self._lanes[lane].held.add(page)
        return pages

    def cache(self, pages: Iterable[int]) -> None:
        """The tree adopts pages of a request: HELD → CACHED. :class:`InvalidInput` if one is not held."""
        for page in self._checked(pages, PageState.HELD):
            lane = self._lane_of(page)
            lane.held.remove(page)
            lane.cached.add(page)

    def free(self, pages: Iterable[int]) -> None:
        """HELD or CACHED → FREE, to the end of each lane's queue in the order given.

        :class:`InvalidInput` for a page that is free, dummy, unknown, or there twice; then none is freed.
        """
        for page in self._checked(pages, PageState.HELD, PageState.CACHED):
            lane = self._lane_of(page)
            lane.held.discard(page)
            lane.cached.discard(page)
            lane.free.append(page)

    def free_slots(self, slots: torch.Tensor) -> None:
        """Free by logical slots, int64 [n] on the CPU, in any order: the pages they make up, ascending.

        :class:`InvalidInput` for part of a page: another's tokens may lie in the rest of it. Then, as for
        what :meth:`free` refuses, nothing is freed.
        """
        P = self.grid.page_size
        pages, counts = slots.unique().div(P, rounding_mode="floor").unique(return_counts=True)
        for page, count in zip(pages.tolist(), counts.tolist(), strict=True):
            if count != P:
                raise InvalidInput(
                    "slots to free",
                    expected=f"whole pages of {P} slots",
                    received=f"{count} slots of page {page}",
                    where=Where(page=page),
                    fix="A tail page is freed whole, by its page.",
                )
        if len(slots) != len(pages) * P:
            raise InvalidInput(
                "slots to free",
                expected="each slot once",
                received=f"{len(slots)} slots that name {len(pages) * P}",
            )
        self.free(pages.tolist())

    # -- what it knows: true until the next change --------------------------------------------------------

    def state(self, page: int) -> PageState:
        """Who has a logical page. :class:`InvalidInput` for a dummy and for a page that does not exist."""
        lane = self._lane_of(page)
        if page in lane.held:
            return PageState.HELD
        return PageState.CACHED if page in lane.cached else PageState.FREE

    def free_pages(self, lane: int) -> int:
        """Free pages of a lane."""
        return len(self._lane(lane).free)

    def all_free(self) -> tuple[int, ...]:
        """[W] free pages of each lane."""
        return tuple(len(lane.free) for lane in self._lanes)

    def next_free(self, lane: int, count: int) -> tuple[int, ...]:
        """The free pages of a lane that would be taken next, at most ``count``."""
        return tuple(islice(self._lane(lane).free, count))

    def held(self, lane: int) -> int:
        """Pages of a lane that requests hold."""
        return len(self._lane(lane).held)

    def cached(self, lane: int) -> int:
        """Pages of a lane that the tree holds."""
        return len(self._lane(lane).cached)

    def shortage(self, lanes: Sequence[int]) -> dict[int, int]:
        """Lane → pages missing there, if :meth:`take` were asked for ``lanes``; lowest lane first.

        Empty if it would succeed.
        """
        wanted = Counter(lanes)
        return {
            lane: wanted[lane] - self.free_pages(lane)
            for lane in sorted(wanted)
            if wanted[lane] > self.free_pages(lane)
        }

    def check(self) -> tuple[Finding, ...]:
        """Where L1 does not hold: pages of a lane that are not in exactly one place. None, unless broken."""
        return tuple(
            Finding(
                "L1",
                f"lane {number}",
                expected=f"{self.pages_per_lane} pages, each free, held or cached",
                received=f"{len(lane.free)} free, {len(lane.held)} held, {len(lane.cached)} cached",
                where=Where(rank=number),
            )
            for number, lane in enumerate(self._lanes)
            if sorted([*lane.free, *lane.held, *lane.cached]) != list(self._pages(number))
        )

    def fingerprint(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[W][3] its whole state: free pages in order, held and cached ones ascending, of each lane."""
        return tuple(
            [(tuple(lane.free), tuple(sorted(lane.held)), tuple(sorted(lane.cached))) for lane in self._lanes]
        )

    # -- checks ------------------------------------------------------------------------------------------

    def _lane(self, lane: int) -> _Lane:
        check_in_range(lane, self.grid.world_size, "lane", Where(rank=lane))
        return self._lanes[lane]

    def _lane_of(self, page: int) -> _Lane:
        W = self.grid.world_size
        if not W <= page < W * (self.pages_per_lane + 1):
            dummy = 0 <= page < W
            raise InvalidInput(
                "logical page",
                expected=f"{W} … {W * (self.pages_per_lane + 1) - 1}",
                received=f"{page}, a dummy" if dummy else page,
                where=Where(page=page),
            )
        return self._lanes[owner(page, W)]

    def _checked(self, pages: Iterable[int], *allowed: PageState) -> tuple[int, ...]:
        """The pages, if each is there once and in a state that is allowed: looked at before any changes."""
        pages = tuple(pages)
        for page, times in Counter(pages).items():
            state = self.state(page)
            if times > 1 or state not in allowed:
                raise InvalidInput(
                    "pages",
                    expected=f"each once, {' or '.join(state.value for state in allowed)}",
                    received=f"page {page} {times} times" if times > 1 else f"page {page}, {state.value}",
                    where=Where(rank=owner(page, self.grid.world_size), page=page),
                )
        return pages


def make_room(lanes: Lanes, wanted: Sequence[int], evict: Evict) -> None:
    """Evict until ``lanes.take(wanted)`` will succeed: lane by lane, not until the total suffices (L3).

    ``evict(lane)`` takes pages out of the tree to relieve that lane, and returns them; they may be of other
    lanes too. It returns none if it cannot. What it returns is freed here, and stays so.
    :class:`OutOfPages` naming the lane that cannot be relieved; if its requests alone hold too much, before
    anything is evicted.
    """
    for lane, missing in lanes.shortage(wanted).items():
        if missing > lanes.cached(lane):
            raise _out_of_pages(lanes, lane, wanted)
    while short := lanes.shortage(wanted):
        lane = min(short)
        evicted = evict(lane)
        if not evicted:
            raise _out_of_pages(lanes, lane, wanted)
        lanes.free(evicted)


def _out_of_pages(lanes: Lanes, lane: int, wanted: Sequence[int]) -> OutOfPages:
    total = sum(lanes.free_pages(every) for every in range(lanes.grid.world_size))
    return OutOfPages(
        f"pages of lane {lane}",
        expected=f"{Counter(wanted)[lane]} free",
        received=f"{lanes.free_pages(lane)} there, {total} in all lanes",
        where=Where(rank=lane),
        fix="Free or evict pages of this lane; those of other lanes do not help.",
    )
