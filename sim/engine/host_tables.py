"""What every rank knows of the host cache: what is backed up, loaded back and prefetched (laws H2–H5).

A page's key is the hash of all tokens up to its last one; only whole pages have one. Decisions are made here,
alike on all ranks; bytes are moved by a :class:`Bytes`, of which each rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_moves import Fill, Landing, Load, land, land_elsewhere
from refmodel.serving.host_pages import HostFull
from refmodel.serving.lanes import Lanes, OutOfPages
from refmodel.serving.layer_gate import NotLoaded
from refmodel.serving.page_groups import check_page_groups
from refmodel.serving.radix import Hit, HitMode, RadixTree
from refmodel.serving.write_policy import HitCounts
from sim.engine.request import Request
from sim.engine.truth import Ids
from sim.histories.history import DropHost, History, Prefetch

Plan = TypeVar("Plan")


def cache_layers(history: History) -> dict[str, int]:
    """Layers of each cache that a page has; those of the draft model are caches of their own."""
    layers = {"kv": history.layers, "index": history.layers}
    if history.draft_layers:
        layers |= {"draft_kv": history.draft_layers, "draft_index": history.draft_layers}
    return layers


def page_keys(hashes: Ids, page_size: int) -> list[int]:
    """Of the whole pages of tokens with these hashes."""
    return [int(each) for each in hashes[page_size - 1 :: page_size]]


@dataclass(frozen=True, slots=True)
class Loading:
    """Pages that a request hit on the host, on their way. Its lock in the tree keeps them until it leaves."""

    request: str
    landing: Landing


class Bytes(Protocol):
    """What one rank does with the bytes of its pages."""

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None:
        """Device pages that this rank owns to its host pages, and to its storage."""

    def bring(self, landing: Landing, cache: str, layer: int) -> None:
        """One layer of a cache of a load to the device."""

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        """Leading pages that the storage of all ranks has: agreed on by all."""

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None:
        """Files of this rank to its host pages: of each cache the first so many moves."""

    def spoil(self, key: int, cache: str, how: str) -> None:
        """A file of this rank goes bad."""


class NoBytes:
    """Of tables that stand alone: nothing is moved, and storage has all that it was given."""

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None: ...

    def bring(self, landing: Landing, cache: str, layer: int) -> None: ...

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        return len(lanes)

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None: ...

    def spoil(self, key: int, cache: str, how: str) -> None: ...


@dataclass(slots=True)
class HostTables:
    """The host cache beside lanes and tree, which the other tables share with it.

    ``take`` gets pages of lanes, and makes room for them first. What is under way is :attr:`loadings`; each
    is over at the end of the first forward that reads its pages, or when its request leaves.
    """

    history: History
    lanes: Lanes
    tree: RadixTree
    take: Callable[[Sequence[int]], Sequence[int]]
    bytes: Bytes = field(default_factory=NoBytes)
    host: HostCache = field(init=False)
    counts: HitCounts = field(init=False)
    keys: dict[int, int] = field(init=False, default_factory=dict)  # of whole pages in the tree
    stored: dict[int, int] = field(init=False, default_factory=dict)  # key → lane of its files
    loadings: list[Loading] = field(init=False, default_factory=list)
    reading: list[Loading] = field(init=False, default_factory=list)  # those of the forward under way

    def __post_init__(self) -> None:
        history = self.history
        self.host = HostCache(
            cache_layers(history),
            world_size=history.world_size,
            pages_per_lane=history.host_pages_per_lane,
        )
        self.counts = HitCounts(history.write_policy)

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

    def load_back(self, name: str, tokens: Sequence[int], hashes: Ids, hit: Hit, now: int) -> Hit:
        """What follows a hit on the host is put in the tree, and loaded when it is first read (H3, H4).

        The node of the hit is locked, before and after. If there are no pages to load into, the hit stays.
        """
        first = hit.valid // self.grid.page_size
        keys = page_keys(hashes, self.grid.page_size)[first : self._most_pages(len(tokens))]
        count = self.host.usable_prefix(keys) if hit.valid < len(tokens) - 1 else 0
        landing = self._land(self.host.plan_load(keys[:count], now)) if count else None
        if landing is None:
            return hit
        stop = (first + count) * self.grid.page_size
        inserted = self.tree.insert(tokens[:stop], [*hit.pages[:first], *landing.pages], now)
        self.lanes.cache(inserted.adopted)
        self.loadings.append(Loading(name, landing))
        longer = self.tree.match(tokens, now)
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
        free = [self.lanes.free_pages(lane) for lane in range(self.grid.world_size)]
        lanes = []
        for _ in range(count):
            lane = free.index(max(free))
            if not free[lane]:
                return None
            free[lane] -= 1
            lanes.append(lane)
        return lanes

    def begin(self, pages: Collection[int], copied: Collection[int]) -> None:
        """A forward is about to read pages, and to copy some of them in all layers (H4)."""
        self.reading = [loading for loading in self.loadings if _overlap(loading, pages)]
        for loading in self.loadings:
            if _overlap(loading, copied):
                for cache, count in self.host.layers.items():
                    for layer in range(count):
                        self._wait(loading.landing, cache, layer)

    def wait_for_layer(self, layer: int) -> None:
        """The forward is about to read a layer, of the model or behind them of its draft model (H4)."""
        behind = layer - self.history.layers
        for loading in self.reading:
            for cache in ("kv", "index") if behind < 0 else ("draft_kv", "draft_index"):
                self._wait(loading.landing, cache, layer if behind < 0 else behind)

    def _wait(self, landing: Landing, cache: str, layer: int) -> None:
        """Until the layer is there. Layers come in the order in which they are read."""
        for part in self.host.unloaded(landing.load):
            if self._is_loaded(landing.load, cache, layer):
                return
            self._bring(landing, *part)
        self.host.require_layer(landing.load, cache, layer)

    def _is_loaded(self, load: Load, cache: str, layer: int) -> bool:
        try:
            self.host.require_layer(load, cache, layer)
        except NotLoaded:
            return False
        return True

    def _bring(self, landing: Landing, cache: str, layer: int) -> None:
        self.bytes.bring(landing, cache, layer)
        self.host.mark_loaded(landing.load, cache, layer)

    def end(self) -> None:
        """The forward is over, and with it the loads that it waited for."""
        over, self.reading = self.reading, []
        for loading in over:
            self._complete(loading)

    def settle(self, pages: Collection[int]) -> None:
        """Pages are about to be read by another than a forward: what loads into them is waited for."""
        for loading in [each for each in self.loadings if _overlap(each, pages)]:
            self._complete(loading)

    def leave(self, name: str) -> None:
        """A request leaves: what still loads for it is waited for, as others may hit the pages by now."""
        for loading in [each for each in self.loadings if each.request == name]:
            self._complete(loading)

    def _complete(self, loading: Loading) -> None:
        for cache, layer in self.host.unloaded(loading.landing.load):
            self._bring(loading.landing, cache, layer)
        self.host.finish(loading.landing.load)
        self.loadings.remove(loading)

    # -- pressure and storage ----------------------------------------------------------------------------

    def drop(self, wanted: DropHost) -> None:
        """Evict host pages of a lane; those in use stay (H4)."""
        self.host.evict(wanted.lane, wanted.count)

    def prefetch(self, wanted: Prefetch, request: Request, now: int) -> None:
        """The first pages of a prompt, as far as storage has them with all caches on all ranks (H3, H5)."""
        keys = self._stored_keys(wanted.request, request, wanted.pages)
        for named in wanted.arrived:
            self._require_cache(named)
        lanes = [self.stored[key] for key in keys]
        count = self.bytes.available(keys, lanes)
        fill = _as_many(count, lambda most: self.host.plan_prefetch(keys[:most], lanes[:most], now))
        if fill is None:
            return
        moves = len(fill.moves)
        least = {str(cache): min(moves, pages) for cache, pages in wanted.arrived.items()}
        arrived = dict.fromkeys(self.host.layers, moves) | least
        self.bytes.fetch(fill, keys, arrived)
        for cache, pages in arrived.items():
            self.host.arrived(fill, cache, pages)
        self.host.close(fill)

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
        """Of everything, as integers but for names: equal on every rank after every step."""
        loads = tuple((each.request, each.landing.load.number, each.landing.pages) for each in self.loadings)
        known = tuple(sorted(self.keys.items())), tuple(sorted(self.stored.items()))
        return self.host.fingerprint(), self.counts.fingerprint(), known, loads

    def check(self) -> list[Finding]:
        """Laws of the host cache; and that a page which is loading, or has a key, is in the tree (H4)."""
        found = list(self.host.check())
        pages = [page for loading in self.loadings for page in loading.landing.pages]
        astray = sorted(page for page in {*pages, *self.keys} if not self.tree.holds(page))
        if astray or len(set(pages)) != len(pages):
            found.append(Finding("H4", "pages with a key, or loading", "pages of the tree", str(astray)))
        return found


def _overlap(loading: Loading, pages: Collection[int]) -> bool:
    return any(page in pages for page in loading.landing.pages)


def _as_many(most: int, plan: Callable[[int], Plan]) -> Plan | None:
    """The plan for the most pages that there is room for; None if there is none for any."""
    for count in range(most, 0, -1):
        try:
            return plan(count)
        except HostFull:
            continue
    return None
