"""Which page has a host copy, where, and how whole it is; who may be evicted (laws H3, H4, L7).

Each lane has a pool of host pages; a key stands for the content of one page. Metadata only, equal on every
rank that makes the same calls: no time but the caller's logical clock, no ids of objects, no order of a hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from refmodel.errors import CpkvError, Finding, InvalidInput, Where
from refmodel.layout.geometry import at_least, check_in_range


class HostFull(CpkvError):
    """A lane has no host page left that is free or may be evicted; nothing was changed."""


@dataclass(frozen=True, slots=True)
class HostPage:
    """The host copy of one page."""

    lane: int  # whose pools it lies in
    host_page: int  # the same in the pools of all caches
    present: tuple[bool, ...]  # of each cache: whether its bytes are there
    pins: int  # uses under way; not evicted while there are any
    last_access: int  # of the logical clock
    created: int  # number of the copy: no two are equal

    @property
    def whole(self) -> bool:
        """All caches are present (H3)."""
        return all(self.present)


class HostPages:
    """Host copies by key. Methods named after a deed change it, the others do not.

    A refused call changes nothing. What a method returns is a value and stays valid; the host page of a key
    stays its own until the key is evicted or dropped, which no pinned one is.
    """

    def __init__(self, caches: Sequence[str], world_size: int, pages_per_lane: int) -> None:
        at_least(1, world_size, "world size W")
        at_least(0, pages_per_lane, "host pages of a lane")
        self.caches = tuple(caches)
        if not caches or len(set(caches)) != len(caches):
            raise InvalidInput("caches of a host cache", expected="names, each once", received=list(caches))
        self.pages_per_lane = pages_per_lane
        self._copies: dict[int, HostPage] = {}
        self._free = [list(range(pages_per_lane)) for _ in range(world_size)]  # heaps: the lowest goes first
        # [W] keys of a lane by their last access: who goes next must not be searched among all copies.
        self._by_access: tuple[dict[int, set[int]], ...] = tuple({} for _ in range(world_size))
        self._created = 0

    def __contains__(self, key: object) -> bool:
        """Whether the key has a host page, whole or not."""
        return key in self._copies

    def __getitem__(self, key: int) -> HostPage:
        """The host copy of a key that has one, whole or not."""
        return self._copies[key]

    def whole(self, key: int) -> bool:
        """Whether the key has a host copy with all its caches (H3)."""
        return key in self._copies and self._copies[key].whole

    def free(self, lane: int) -> int:
        """Free host pages of a lane."""
        return len(self._free[lane])

    def victims(self, lane: int, count: int, keep: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """At most ``count`` keys of a lane that eviction takes next, none pinned (H4), none of ``keep``.

        The longest unused first; of equals the youngest, as a page behind a hole is of no use (L7).
        """
        check_in_range(lane, len(self._free), "lane", Where(rank=lane))
        if count <= 0:
            return ()
        by_access = self._by_access[lane]
        ranked = (key for now in sorted(by_access) for key in sorted(by_access[now], key=self._youth))
        allowed = (key for key in ranked if not self._copies[key].pins and key not in keep)
        return tuple(islice(allowed, count))

    def _youth(self, key: int) -> int:
        return -self._copies[key].created

    def evict(self, lane: int, count: int) -> tuple[int, ...]:
        """Free up to ``count`` host pages of a lane; the keys that lost their copies."""
        evicted = self.victims(lane, at_least(0, count, "host pages to evict"))
        for key in evicted:
            self.drop(key)
        return evicted

    def add(
        self, keys: Sequence[int], lanes: Sequence[int], now: int, *, keep: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """Give keys host pages in lanes, pinned and without bytes yet; the keys evicted for it.

        All or nothing: :class:`HostFull` when a lane cannot make room. ``keep`` is not evicted.
        """
        wanted = Counter(lanes)
        evicted = [key for lane in sorted(wanted) for key in self._make_room(lane, wanted[lane], keep)]
        for key in evicted:
            self.drop(key)
        for key, lane in zip(keys, lanes, strict=True):
            nothing = (False,) * len(self.caches)
            self._copies[key] = HostPage(lane, heappop(self._free[lane]), nothing, 1, now, self._created)
            self._by_access[lane].setdefault(now, set()).add(key)
            self._created += 1
        return tuple(evicted)

    def _make_room(self, lane: int, wanted: int, keep: frozenset[int]) -> tuple[int, ...]:
        victims = self.victims(lane, wanted - self.free(lane), keep)
        if self.free(lane) + len(victims) < wanted:
            raise HostFull(
                f"host pages of lane {lane}",
                expected=f"{wanted} free or evictable",
                received=f"{self.free(lane)} free, {len(victims)} evictable, of {self.pages_per_lane}; "
                f"{sum(map(len, self._free))} free in all lanes",
                where=Where(rank=lane),
            )
        return victims

    def arrived(self, keys: Sequence[int], cache: str) -> None:
        """The bytes of one cache are in the host pages of keys."""
        if cache not in self.caches:
            raise InvalidInput("cache", expected=f"one of {', '.join(self.caches)}", received=cache)
        which = self.caches.index(cache)
        for key in keys:
            copy = self._copies[key]
            present = tuple(there or i == which for i, there in enumerate(copy.present))
            self._copies[key] = replace(copy, present=present)

    def touch(self, keys: Sequence[int], now: int) -> None:
        """Keys are used; those without a copy are passed over."""
        for key in keys:
            copy = self._copies.get(key)
            if copy is not None and copy.last_access != now:
                self._forget_access(key)
                self._copies[key] = replace(copy, last_access=now)
                self._by_access[copy.lane].setdefault(now, set()).add(key)

    def _forget_access(self, key: int) -> None:
        copy = self._copies[key]
        by_access = self._by_access[copy.lane]
        by_access[copy.last_access].remove(key)
        if not by_access[copy.last_access]:
            del by_access[copy.last_access]

    def pin(self, keys: Sequence[int]) -> None:
        """Keep copies from eviction until they are unpinned as often. All or nothing, and only whole ones."""
        for key in keys:
            if not self.whole(key):
                raise InvalidInput(
                    "host copy to use", expected="one with all its caches (H3)", received=self._lack(key)
                )
        for key in keys:
            self._copies[key] = replace(self._copies[key], pins=self._copies[key].pins + 1)

    def unpin(self, keys: Sequence[int]) -> None:
        """Undo one pin of each key, which has one."""
        for key in keys:
            self._copies[key] = replace(self._copies[key], pins=self._copies[key].pins - 1)

    def drop(self, key: int) -> None:
        """Free the host page of a key."""
        self._forget_access(key)
        copy = self._copies.pop(key)
        heappush(self._free[copy.lane], copy.host_page)

    def _lack(self, key: int) -> str:
        copy = self._copies.get(key)
        if copy is None:
            return f"none for key {key}"
        lacking = [cache for cache, there in zip(self.caches, copy.present, strict=True) if not there]
        return f"key {key} without {', '.join(lacking)}"

    def check(self, uses: Mapping[int, int], filling: Container[int]) -> Iterator[Finding]:
        """Where pages are lost or handed out twice, pinned more or less than used, or for ever in part.

        ``uses`` [key] under way; ``filling``: keys whose bytes are still to come.
        """
        for lane, free in enumerate(self._free):
            used = [copy.host_page for copy in self._copies.values() if copy.lane == lane]
            if sorted([*free, *used]) != list(range(self.pages_per_lane)):
                yield Finding(
                    "H4",
                    f"host pages of lane {lane}",
                    expected=f"each of {self.pages_per_lane} once",
                    received=f"free {sorted(free)}, in use {sorted(used)}",
                    where=Where(rank=lane),
                )
        pins = {key: copy.pins for key, copy in self._copies.items() if copy.pins}
        if pins != dict(uses):
            yield Finding("H4", "pins of host pages", expected=str(dict(uses)), received=str(pins))
        for key, copy in self._copies.items():
            if not copy.whole and key not in filling:
                yield Finding("H3", "host copy", expected="one with all its caches", received=self._lack(key))

    def fingerprint(self) -> tuple[tuple[int, ...], ...]:
        """The whole state: the number of the next copy, copies by key, free pages by lane."""
        copies = (
            (key, c.lane, c.host_page, c.pins, c.last_access, c.created, *map(int, c.present))
            for key, c in sorted(self._copies.items())
        )
        return ((self._created,), *copies, *(tuple(sorted(free)) for free in self._free))
