"""What moves between device and host, by rank: values that every rank computes alike (laws H4, H5).

A host copy lies in the pools of one lane, that of the page it was made from. A page loaded from it lands in
the same lane, or another lane becomes its owner and must be told to every table.

>>> load = Load(0, (Move(0, 70, lane=1, host_page=5), Move(1, 71, lane=0, host_page=2)))
>>> land(load, [9, 4], world_size=2).pairs(1, 1)
PagePairs(host=(5,), device=(4,))
>>> landing = land_elsewhere(load, [9, 7], world_size=2)
>>> landing.owners, landing.moved, landing.pairs(0, 1)
((1, 1), (1,), PagePairs(host=(2,), device=(3,)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refmodel.errors import InvalidInput, Where
from refmodel.layout.ownership import local_page, owner
from refmodel.serving.page_groups import PagePairs


@dataclass(frozen=True, slots=True)
class Move:
    """One page between its host copy and a device page or storage."""

    position: int  # of the page among the keys that were asked for
    key: int
    lane: int  # whose pools the host copy lies in
    host_page: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Host pages to be filled, from device pages or from storage. Under way until it is closed."""

    number: int
    moves: tuple[Move, ...]
    evicted: tuple[int, ...]  # keys that lost their host copies for it


@dataclass(frozen=True, slots=True)
class Load:
    """Host pages to be loaded, one a key. They stay as they are until it is finished or abandoned."""

    number: int
    moves: tuple[Move, ...]

    @property
    def lanes(self) -> tuple[int, ...]:
        """[pages] lane of each host copy: where a device page is to be taken."""
        return tuple(move.lane for move in self.moves)


def backed_up_by(rank: int, fill: Fill, pages: Sequence[int], world_size: int) -> PagePairs:
    """What one rank copies to its own pools: the pages it owns, and over the ranks each page once (H5).

    ``pages``: the logical pages that :meth:`HostCache.plan_backup` was given.
    """
    mine = [move for move in fill.moves if owner(pages[move.position], world_size) == rank]
    return PagePairs(
        tuple(move.host_page for move in mine),
        tuple(local_page(pages[move.position], world_size) for move in mine),
    )


@dataclass(frozen=True, slots=True)
class Landing:
    """The device pages that a load goes to. Build it with :func:`land` or :func:`land_elsewhere`."""

    load: Load
    pages: tuple[int, ...]  # logical page of each move: what page tables must hold
    world_size: int

    def __post_init__(self) -> None:
        if len(self.pages) != len(self.load.moves):
            raise InvalidInput(
                "pages of a load", expected=f"{len(self.load.moves)}, one a move", received=len(self.pages)
            )
        dummies = [page for page in self.pages if page < self.world_size]
        if dummies or len(set(self.pages)) != len(self.pages):
            raise InvalidInput(
                "pages of a load",
                expected=f"logical pages >= W = {self.world_size}, each once",
                received=dummies[0] if dummies else list(self.pages),
            )

    @property
    def owners(self) -> tuple[int, ...]:
        """[pages] rank that stores each loaded page, recomputed from the page it landed in (O1)."""
        return tuple(owner(page, self.world_size) for page in self.pages)

    @property
    def moved(self) -> tuple[int, ...]:
        """Indices of pages that changed their owner: every table must learn the new one (H4)."""
        both = zip(self.owners, self.load.lanes, strict=True)
        return tuple(i for i, (rank, lane) in enumerate(both) if rank != lane)

    def pairs(self, lane: int, rank: int) -> PagePairs:
        """What ``rank`` loads from the pools of ``lane``: from its own, and from others what moved (H5)."""
        parts = zip(self.load.moves, self.pages, self.owners, strict=True)
        mine = [(move, page) for move, page, to in parts if move.lane == lane and to == rank]
        return PagePairs(
            tuple(move.host_page for move, _ in mine),
            tuple(local_page(page, self.world_size) for _, page in mine),
        )


def land(load: Load, pages: Sequence[int], world_size: int) -> Landing:
    """Load into logical pages of the lanes of the host copies; :class:`InvalidInput` for any other (H4)."""
    landing = Landing(load, tuple(pages), world_size)
    if landing.moved:
        i = landing.moved[0]
        raise InvalidInput(
            "page of a load",
            expected=f"one of lane {load.lanes[i]}, where its host copy is",
            received=f"page {pages[i]} of lane {landing.owners[i]}",
            where=Where(page=pages[i]),
            fix="Take a page of that lane, or land elsewhere and update every table.",
        )
    return landing


def land_elsewhere(load: Load, pages: Sequence[int], world_size: int) -> Landing:
    """Load into pages of any lanes. The caller updates every table by ``pages`` and ``moved`` (H4)."""
    return Landing(load, tuple(pages), world_size)
