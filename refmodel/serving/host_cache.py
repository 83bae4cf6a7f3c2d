"""The host cache (L2) of all ranks, as shared metadata: what it holds, and what is under way (laws H3–H5).

Every rank keeps this value and makes the same calls, so every rank knows what each other one does. It moves
no bytes: a plan says what to move, and the caller says when that is done, on all ranks. Bytes are in a
:class:`~refmodel.serving.host_layouts.HostPool` a rank and cache.

>>> from refmodel.serving.host_moves import backed_up_by
>>> host = HostCache({"kv": 2, "index": 2}, world_size=2, pages_per_lane=4)
>>> fill = host.plan_backup(keys=[70, 71], pages=[9, 4], now=1)
>>> backed_up_by(0, fill, [9, 4], world_size=2), backed_up_by(1, fill, [9, 4], world_size=2)
(PagePairs(host=(0,), device=(2,)), PagePairs(host=(0,), device=(4,)))
>>> host.arrived(fill, "kv"), host.usable_prefix([70, 71])  # without its index page, no page is usable
(None, 0)
>>> host.arrived(fill, "index", pages=1), host.usable_prefix([70, 71])
(None, 1)
>>> host.close(fill)  # what is not whole by now has no host copy
(71,)
>>> load = host.plan_load([70], now=2)
>>> load.lanes, host.unloaded(load)
((1,), (('kv', 0), ('index', 0), ('kv', 1), ('index', 1)))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from refmodel.errors import Finding, InvalidInput, Where
from refmodel.layout.geometry import at_least, check_in_range
from refmodel.layout.ownership import owner
from refmodel.serving.host_moves import Fill, Load, Move
from refmodel.serving.host_pages import HostPages
from refmodel.serving.layer_gate import LayerGate, NotLoaded

Ticket = TypeVar("Ticket", Fill, Load)


class HostCache:
    """Host copies by key, and what is under way. A key stands for the content of a page; the caller chooses.

    Plans open something, :meth:`close`, :meth:`finish` and :meth:`abandon` end it; in between its host pages
    are pinned. A plan stays valid until it is ended; what :meth:`usable_prefix` says, until the next plan,
    close or eviction. A refused call changes nothing. ``now`` is the caller's logical clock.
    """

    def __init__(self, layers: Mapping[str, int], *, world_size: int, pages_per_lane: int) -> None:
        """``layers``: of each cache that a page has, e.g. ``{"kv": 61, "index": 61, "draft_kv": 1, …}``."""
        for cache, count in layers.items():
            at_least(1, count, f"layers of cache {cache}")
        self.layers = dict(layers)
        self.world_size = world_size
        self._pages = HostPages(tuple(layers), world_size, pages_per_lane)
        self._fills: dict[int, Fill] = {}
        self._loads: dict[int, tuple[Load, LayerGate]] = {}
        self._held: Counter[int] = Counter()  # pins of callers, by key
        self._number = 0  # of the next plan

    # -- what is there -----------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        """Whether the key has a host page, be it still filling: no further backup is due."""
        return key in self._pages

    def usable_prefix(self, keys: Sequence[int]) -> int:
        """Leading keys that have all their caches on the host (H3)."""
        return next((i for i, key in enumerate(keys) if not self._pages.whole(key)), len(keys))

    # -- to the host -------------------------------------------------------------------------------------

    def plan_backup(self, keys: Sequence[int], pages: Sequence[int], now: int) -> Fill:
        """Host pages for the logical pages of keys, in the lanes of their owners, evicting what it must.

        Keys that have a host page are left out; the device pages of the others must stay until the fill is
        closed. :class:`HostFull`; :class:`InvalidInput` for dummies, repeats and unequal lengths.
        """
        dummies = [page for page in pages if page < self.world_size]
        if dummies or len(set(pages)) != len(pages):
            raise InvalidInput(
                "pages to back up",
                expected=f"logical pages >= W = {self.world_size}, each once",
                received=dummies[0] if dummies else list(pages),
            )
        return self._plan_fill(keys, [owner(page, self.world_size) for page in pages], now)

    def plan_prefetch(self, keys: Sequence[int], lanes: Sequence[int], now: int) -> Fill:
        """Host pages in the lanes given, to be filled from storage; all else as of :meth:`plan_backup`.

        ``position`` of a move counts from the first of ``keys``, whether the host has those in front or not.
        """
        for lane in lanes:
            check_in_range(lane, self.world_size, "lane", Where(rank=lane))
        return self._plan_fill(keys, lanes, now)

    def _plan_fill(self, keys: Sequence[int], lanes: Sequence[int], now: int) -> Fill:
        if len(lanes) != len(keys) or len(set(keys)) != len(keys):
            raise InvalidInput(
                "keys of a fill", expected=f"{len(lanes)}, each once", received=f"{list(keys)}"
            )
        lacking = self._lacking(keys)
        new = [keys[i] for i in lacking]
        evicted = self._pages.add(new, [lanes[i] for i in lacking], now, keep=frozenset(keys))
        self._pages.touch(keys, now)
        fill = Fill(self._next(), self._moves(lacking, new), evicted)
        self._fills[fill.number] = fill
        return fill

    def _lacking(self, keys: Sequence[int]) -> list[int]:
        """Positions of the keys that have no host page."""
        return [i for i, key in enumerate(keys) if key not in self._pages]

    def arrived(self, fill: Fill, cache: str, pages: int | None = None) -> None:
        """All layers of a cache are on the host, of the first ``pages`` moves of a fill; of all by default.

        The caller's ranks have agreed on it: the least number over them counts.
        """
        moves = _under_way(self._fills, fill).moves
        count = len(moves) if pages is None else pages
        check_in_range(count, len(moves) + 1, "pages that arrived", Where(cache=cache))
        self._pages.arrived([move.key for move in moves[:count]], cache)

    def close(self, fill: Fill) -> tuple[int, ...]:
        """End a fill. Keys that lack a cache lose their host pages, as nothing could ever use them (H3)."""
        keys = [move.key for move in _under_way(self._fills, fill).moves]
        del self._fills[fill.number]
        self._pages.unpin(keys)
        torn = tuple(key for key in keys if not self._pages.whole(key))
        for key in torn:
            self._pages.drop(key)
        return torn

    # -- to the device -----------------------------------------------------------------------------------

    def plan_load(self, keys: Sequence[int], now: int) -> Load:
        """Load keys, all of which must be usable; their host pages are pinned until it ends (H4).

        :class:`InvalidInput` names the first key that lacks a cache. Where pages land: :func:`land`.
        """
        if len(set(keys)) != len(keys):
            raise InvalidInput("keys of a load", expected="each once", received=list(keys))
        self._pages.pin(keys)
        self._pages.touch(keys, now)
        load = Load(self._next(), self._moves(range(len(keys)), keys))
        self._loads[load.number] = load, LayerGate(self.layers)
        return load

    def unloaded(self, load: Load) -> tuple[tuple[str, int], ...]:
        """(cache, layer) that are still to be loaded, of every cache, in the order in which they are read."""
        return self._gate(load).unloaded()

    def mark_loaded(self, load: Load, cache: str, layer: int) -> None:
        """The bytes of one layer of a cache are on the device, for all pages of the load."""
        self._gate(load).mark_loaded(cache, layer)

    def require_layer(self, load: Load, cache: str, layer: int) -> None:
        """:class:`NotLoaded` unless that layer of that cache may be read (H4)."""
        self._gate(load).require_layer(cache, layer)

    def finish(self, load: Load) -> None:
        """End a load: :class:`NotLoaded` as long as any layer of any cache is missing."""
        missing = self.unloaded(load)
        if missing:
            cache, layer = missing[0]
            raise NotLoaded(
                "load to finish",
                expected="all layers of all caches loaded",
                received=f"{len(missing)} missing",
                where=Where(layer=layer, cache=cache),
            )
        self.abandon(load)

    def abandon(self, load: Load) -> None:
        """End a load as it is; unless it was finished, its device pages must not be read."""
        self._gate(load)
        del self._loads[load.number]
        self._pages.unpin([move.key for move in load.moves])

    def _gate(self, load: Load) -> LayerGate:
        _under_way({number: opened for number, (opened, _) in self._loads.items()}, load)
        return self._loads[load.number][1]

    # -- upkeep ------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[int]) -> None:
        """Keep usable keys from eviction, e.g. for a request that waits. All or nothing."""
        self._pages.pin(keys)
        self._held.update(keys)

    def unpin(self, keys: Sequence[int]) -> None:
        """Undo one :meth:`pin` of each key. All or nothing; what is under way keeps its own pins."""
        for key, times in Counter(keys).items():
            if self._held[key] < times:
                raise InvalidInput(
                    "pins of a host page", expected=f">= {times}", received=f"{self._held[key]} of key {key}"
                )
        self._pages.unpin(keys)
        self._held = +(self._held - Counter(keys))

    def evict(self, lane: int, count: int) -> tuple[int, ...]:
        """Free up to ``count`` host pages of a lane, none in use (H4); the keys that lost their copies."""
        return self._pages.evict(lane, count)

    def _moves(self, positions: Sequence[int], keys: Sequence[int]) -> tuple[Move, ...]:
        pages = [self._pages[key] for key in keys]
        parts = zip(positions, keys, pages, strict=True)
        return tuple(Move(position, key, page.lane, page.host_page) for position, key, page in parts)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def check(self) -> tuple[Finding, ...]:
        """Where a law does not hold: host pages and their uses (H4), copies that lack a cache (H3)."""
        loads = [load for load, _ in self._loads.values()]
        filling = Counter(move.key for fill in self._fills.values() for move in fill.moves)
        loading = Counter(move.key for load in loads for move in load.moves)
        return tuple(self._pages.check(filling + loading + self._held, filling))

    def fingerprint(self) -> tuple[object, ...]:
        """The whole state, of ints only: equal on every rank."""
        fills = tuple((n, _numbers(fill)) for n, fill in self._fills.items())
        loads = tuple((n, _numbers(load), gate.fingerprint()) for n, (load, gate) in self._loads.items())
        held = tuple(sorted(self._held.items()))
        return self._number, self._pages.fingerprint(), fills, loads, held


def _numbers(plan: Fill | Load) -> tuple[tuple[int, ...], ...]:
    return tuple((move.position, move.key, move.lane, move.host_page) for move in plan.moves)


def _under_way(open_plans: Mapping[int, Ticket], plan: Ticket) -> Ticket:
    """The plan itself; :class:`InvalidInput` if it has ended or is of another cache."""
    if open_plans.get(plan.number) != plan:
        raise InvalidInput(
            type(plan).__name__.lower(), expected="one that is under way", received=f"number {plan.number}"
        )
    return plan
