"""What every rank knows of the host cache: what is backed up, loaded back and prefetched (laws H2–H5).

A page's key is the hash of all tokens up to its last one; only whole pages have one. Decisions are made here,
alike on all ranks; bytes are moved by a :class:`Bytes`, of which each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_moves import Landing, Load, land, land_elsewhere
from refmodel.serving.host_pages import HostFull
from refmodel.serving.lanes import Lanes, OutOfPages
from refmodel.serving.page_groups import check_page_groups
from refmodel.serving.radix import Hit, HitMode, RadixTree
from refmodel.serving.write_policy import HitCounts
from sim.engine.host_bytes import Bytes
from sim.engine.loading import Loading, Loadings, cache_layers
from sim.engine.request import Found, Request
from sim.engine.truth import Ids
from sim.histories.history import DropHost, History, Prefetch, Submit

Plan = TypeVar("Plan")


def page_keys(hashes: Ids, page_size: int) -> list[int]:
    """Of the whole pages of tokens with these hashes."""
    return [int(each) for each in hashes[page_size - 1 :: page_size]]


@dataclass(slots=True)
class HostTables:
    """The host cache beside lanes and tree, which the other tables share with it.

    ``take`` gets pages of lanes, and makes room for them first. Nothing but the methods changes it.
    """

    history: History
    lanes: Lanes
    tree: RadixTree
    take: Callable[[Sequence[int]], Sequence[int]]
    host: HostCache = field(init=False)
    counts: HitCounts = field(init=False)
    keys: dict[int, int] = field(init=False, default_factory=dict)  # of whole pages in the tree
    stored: dict[int, int] = field(init=False, default_factory=dict)  # key → lane of its files
    loads: Loadings = field(init=False)

    def __post_init__(self) -> None:
        history = self.history
        self.host = HostCache(
            cache_layers(history),
            world_size=history.world_size,
            pages_per_lane=history.host_pages_per_lane,
        )
        self.counts = HitCounts(history.write_policy)
        self.loads = Loadings(history, self.host)

    @property
    def bytes(self) -> Bytes:
        """What moves bytes on this rank; at first nothing does."""
        return self.loads.bytes

    @bytes.setter
    def bytes(self, moved_by: Bytes) -> None:
        self.loads.bytes = moved_by

    @property
    def grid(self) -> Grid:
        return Grid(self.history.world_size, self.history.page_size)

    # -- to the host -------------------------------------------------------------------------------------

    def used(self, request: Request, first: int, now: int) -> None:
        """A request hit or computed its whole pages from position ``first`` on; they are in the tree (H5)."""
        keys = page_keys(request.hashes[: request.valid], self.grid.page_size)[first:]
        pages = request.pages[first : first + len(keys)]
        self.keys.update(zip(pages, keys, strict=True))
        due = self.counts.hit(keys, self.host)
        self._back_up([keys[i] for i in due], [pages[i] for i in due], now)

    def left(self, pages: Iterable[int], now: int) -> None:
        """Pages were evicted from the device; their bytes are there until somebody takes the pages (H5)."""
        known = [page for page in pages if page in self.keys]
        keys = [self.keys.pop(page) for page in known]
        due = self.counts.leave(keys, self.host)
        self._back_up([keys[i] for i in due], [known[i] for i in due], now)

    def back_up(self, name: str, request: Request, first: int, stop: int, now: int) -> None:
        """Tokens [first, stop) of a request, by slots: refused unless they are whole pages (H2)."""
        if not first < stop <= request.valid:
            raise InvalidInput(
                "tokens to back up",
                expected=f"some of the {request.valid} in cache",
                received=f"{first} … {stop}",
                where=Where(request=name),
            )
        table = PageTable(torch.tensor(request.pages), self.grid, name)
        slots = table.slots(torch.arange(first, stop))
        groups = check_page_groups(torch.arange(len(slots)), slots, self.grid.page_size)
        position = first // self.grid.page_size
        keys = page_keys(request.hashes, self.grid.page_size)[position : position + len(groups)]
        self._back_up(keys, groups.device, now)

    def _back_up(self, keys: Sequence[int], pages: Sequence[int], now: int) -> None:
        """As many of the first pages as there is room for: one behind a hole would be of no use."""
        fill = _as_many(len(keys), lambda count: self.host.plan_backup(keys[:count], pages[:count], now))
        if fill is None:
            return
        self.bytes.back_up(fill, pages)
        for cache in self.host.layers:
            self.host.arrived(fill, cache)
        self.host.close(fill)
        if self.history.storage:
            self.stored.update((move.key, move.lane) for move in fill.moves)

    # -- to the device -----------------------------------------------------------------------------------

    def load_back(self, wanted: Submit, ids: Ids, hashes: Ids, hit: Hit, now: int) -> tuple[Hit, Found]:
        """What follows a hit on the host is put in the tree, and loaded when it is first read (H3, H4).

        With ``prefetch`` storage is asked first. The node of the hit is locked, before and after. If there
        are no pages to load into, the hit stays.
        """
        P, first = self.grid.page_size, hit.valid // self.grid.page_size
        keys = page_keys(hashes, P)[first : self._most_pages(len(ids))] if hit.valid < len(ids) - 1 else []
        fetched = self._fetch_ahead(keys, now) if wanted.prefetch else frozenset()
        longer = self._load(wanted.request, ids, keys, hit, now)
        loaded = longer.valid - hit.valid
        stored = min(loaded, P * sum(key in fetched for key in keys[: num_pages(longer.valid, P) - first]))
        return longer, Found(hit.valid, loaded - stored, stored)

    def _fetch_ahead(self, keys: Sequence[int], now: int) -> frozenset[int]:
        """What storage has behind that which the host has; the keys that are on the host thanks to it."""
        behind = keys[self.host.usable_prefix(keys) :]
        behind = behind[: next((i for i, key in enumerate(behind) if key not in self.stored), len(behind))]
        return self._fetch(behind, {}, now) if behind else frozenset()

    def _load(self, name: str, ids: Ids, keys: Sequence[int], hit: Hit, now: int) -> Hit:
        """The leading keys that the host has; the hit that they make."""
        first, count = hit.valid // self.grid.page_size, self.host.usable_prefix(keys)
        landing = self._land(self.host.plan_load(keys[:count], now)) if count else None
        if landing is None:
            return hit
        stop = (first + count) * self.grid.page_size
        inserted = self.tree.insert(ids[:stop], [*hit.pages[:first], *landing.pages], now)
        self.lanes.cache(inserted.adopted)
        self.loads.under_way.append(Loading(name, landing))
        longer = self.tree.match(ids, now)
        self.tree.lock(longer.node)
        self.tree.unlock(hit.node)
        return longer

    def _most_pages(self, num_tokens: int) -> int:
        """Whole pages of a prompt that a hit may touch: one token is left to compute (L4)."""
        P, limit = self.grid.page_size, num_tokens - 1
        if self.tree.mode is HitMode.PAGE:
            return limit // P
        return min(num_tokens // P, num_pages(limit, P))

    def _land(self, load: Load) -> Landing | None:
        """Into the lanes of the host copies; else, if that is allowed, into any; None if there is no room."""
        W = self.grid.world_size
        try:
            return land(load, self.take(load.lanes), W)
        except OutOfPages:
            lanes = self._lanes_with_room(len(load.moves)) if self.history.load_anywhere else None
        if lanes is None:
            self.host.abandon(load)
            return None
        return land_elsewhere(load, self.take(lanes), W)

    def _lanes_with_room(self, count: int) -> list[int] | None:
        """The emptiest lanes, page by page; the lowest of equals."""
        free = list(self.lanes.all_free())
        lanes = []
        for _ in range(count):
            lane = free.index(max(free))
            if not free[lane]:
                return None
            free[lane] -= 1
            lanes.append(lane)
        return lanes

    # -- pressure and storage ----------------------------------------------------------------------------

    def drop(self, wanted: DropHost) -> None:
        """Evict host pages of a lane; those in use stay (H4)."""
        self.host.evict(wanted.lane, wanted.count)

    def prefetch(self, wanted: Prefetch, request: Request, now: int) -> None:
        """The first pages of a prompt, as far as storage has them with all caches on all ranks (H3, H5)."""
        keys = self._stored_keys(wanted.request, request, wanted.pages)
        for named in wanted.arrived:
            self._require_cache(named)
        self._fetch(keys, {str(cache): pages for cache, pages in wanted.arrived.items()}, now)

    def _fetch(self, keys: Sequence[int], most: Mapping[str, int], now: int) -> frozenset[int]:
        """Stored pages to the host, of each cache at most so many; the keys of those that came whole."""
        lanes = [self.stored[key] for key in keys]
        count = self.bytes.available(keys, lanes)
        fill = _as_many(count, lambda count: self.host.plan_prefetch(keys[:count], lanes[:count], now))
        if fill is None:
            return frozenset()
        moves = len(fill.moves)
        least = {cache: min(moves, pages) for cache, pages in most.items()}
        arrived = dict.fromkeys(self.host.layers, moves) | least
        self.bytes.fetch(fill, keys, arrived)
        for cache, pages in arrived.items():
            self.host.arrived(fill, cache, pages)
        torn = self.host.close(fill)
        return frozenset(move.key for move in fill.moves).difference(torn)

    def spoil(self, name: str, request: Request, page: int, cache: str, how: str) -> None:
        """The file of one page goes bad, which nobody knows but the rank that reads it."""
        self._require_cache(cache)
        key = self._stored_keys(name, request, page + 1)[page:]
        if not key:
            raise InvalidInput(
                "page in storage", expected="one that was stored", received=page, where=Where(request=name)
            )
        self.bytes.spoil(key[0], cache, how)

    def _stored_keys(self, name: str, request: Request, pages: int) -> list[int]:
        """Keys of the first pages of a request up to the first that was never stored."""
        if not self.history.storage:
            raise InvalidInput("storage", expected="on", received="off")
        keys = page_keys(request.hashes, self.grid.page_size)
        if pages > len(keys):
            raise InvalidInput(
                "pages of a request",
                expected=f"at most {len(keys)}, the whole ones",
                received=pages,
                where=Where(request=name),
            )
        there = next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))
        return keys[: min(pages, there)]

    def _require_cache(self, cache: str) -> None:
        if cache not in self.host.layers:
            raise InvalidInput("cache", expected=f"one of {', '.join(self.host.layers)}", received=cache)

    # -- state -------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[object, ...]:
        """Of everything, as integers: equal on every rank after every step."""
        known = tuple(sorted(self.keys.items())), tuple(sorted(self.stored.items()))
        return self.host.fingerprint(), self.counts.fingerprint(), known, self.loads.fingerprint()

    def check(self) -> list[Finding]:
        """Laws of the host cache; and that a page which is loading, or has a key, is in the tree (H4)."""
        found = [*self.host.check(), *self.loads.check(self.tree)]
        if astray := sorted(page for page in self.keys if not self.tree.holds(page)):
            found.append(Finding("H4", "pages with a key", "pages of the tree", str(astray)))
        return found


def _as_many(most: int, plan: Callable[[int], Plan]) -> Plan | None:
    """The plan for the most pages that there is room for; None if there is none for any."""
    for count in range(most, 0, -1):
        try:
            return plan(count)
        except HostFull:
            continue
    return None
