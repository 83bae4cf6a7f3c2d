"""The host cache as the model knows it: which pages have a copy, who reads it, what is in files (laws H2–H5).

A page is known by the hash of all tokens up to its last. What is due for backup follows from the policy by
counting hits. Which copies give way when a lane of the host is full is not foreseen: then it is only held
against what may have gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from properties.rehearsal.dry import Files
from refmodel.errors import Finding
from refmodel.layout.geometry import ceil_div
from refmodel.layout.ownership import owner
from refmodel.serving.host_cache import HostCache
from refmodel.serving.radix import HitMode
from refmodel.serving.write_policy import WritePolicy
from sim.engine.request import Request
from sim.histories.history import DropHost, History, Prefetch, Spoil

_HITS_DUE = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}


@dataclass(slots=True)
class Change:
    """What a step may do to the host copies."""

    due: dict[int, int] = field(default_factory=dict)  # key → lane of what must get a copy
    again: dict[int, int] = field(default_factory=dict)  # what gets one too if it loses its own before
    torn: dict[int, int] = field(default_factory=dict)  # what gets a page, and loses it as a cache is missing
    dropped: tuple[int, int] | None = None  # lane, and so many copies that must go


class HostModel:
    """Host copies, hits, loads under way and files, by key."""

    def __init__(self, history: History, host: HostCache, files: Files) -> None:
        self.history, self.host, self.files = history, host, files
        self.P, self.W = history.page_size, history.world_size
        self.lanes: dict[int, int] = {}  # key → lane of its whole copy
        self.stored: dict[int, int] = {}  # key → lane of its files
        self.loading: list[tuple[str, list[int], list[int]]] = []  # request, keys, pages
        self._hits: Counter[int] = Counter()
        self._key_of: dict[int, int] = {}  # page of the tree that was used whole → key

    # -- what it says before a step ------------------------------------------------------------------------

    def keys(self, request: Request, stop: int | None = None) -> list[int]:
        """Of the whole pages of the first ``stop`` tokens; of all tokens by default."""
        keys: list[int] = request.hashes[self.P - 1 : stop : self.P].tolist()
        return keys

    def loadable(self, keys: Sequence[int], hit: int, tokens: int) -> list[int]:
        """Keys behind a hit on the device that can be loaded: those that have copies, in a row (H3)."""
        if hit >= tokens - 1:
            return []
        most = tokens // self.P
        if self.history.hit_mode is HitMode.PAGE or (most - 1) * self.P >= tokens - 1:
            most = (tokens - 1) // self.P  # one token is left to compute (L4)
        return list(takewhile(self.lanes.__contains__, keys[hit // self.P : most]))

    def stored_keys(self, request: Request, pages: int) -> list[int] | None:
        """Keys of the first pages up to one that was never stored; None if that must be refused."""
        keys = self.keys(request)
        if not self.history.storage or pages > len(keys):
            return None
        return list(takewhile(self.stored.__contains__, keys[:pages]))

    def prefetched(self, wanted: Prefetch, request: Request) -> Change | None:
        """What a prefetch brings, as far as storage has it (H3). None if it must be refused."""
        keys = self.stored_keys(request, wanted.pages)
        if keys is None or not self.files.caches.issuperset(wanted.arrived):
            return None
        sound = takewhile(self.files.is_sound, keys)
        moves = [key for key in sound if key not in self.lanes]
        whole = min([len(moves), *wanted.arrived.values()])
        lanes = {key: self.stored[key] for key in moves}
        return Change(
            {key: lanes[key] for key in moves[:whole]}, torn={key: lanes[key] for key in moves[whole:]}
        )

    def may_spoil(self, wanted: Spoil, request: Request) -> bool:
        keys = self.stored_keys(request, wanted.page + 1)
        return keys is not None and len(keys) > wanted.page and wanted.cache in self.files.caches

    def backed_up(self, request: Request, first: int, stop: int) -> Change | None:
        """Tokens of a request: whole pages, or nothing (H2)."""
        if not first < stop <= request.valid or first % self.P or stop % self.P:
            return None
        positions = range(first // self.P, stop // self.P)
        keys = self.keys(request)
        return self._saved({keys[i]: owner(request.pages[i], self.W) for i in positions})

    def dropped(self, wanted: DropHost) -> Change:
        unpinned = sum(lane == wanted.lane for key, lane in self.lanes.items() if key not in self.pinned())
        return Change(dropped=(wanted.lane, min(wanted.count, unpinned)))

    def pinned(self) -> set[int]:
        """Copies that a load under way reads (H4)."""
        return {key for _, keys, _ in self.loading for key in keys}

    def free(self) -> list[int]:
        """[W] host pages of each lane that nobody has."""
        used = Counter(self.lanes.values())
        return [self.history.host_pages_per_lane - used[lane] for lane in range(self.W)]

    # -- what happened -------------------------------------------------------------------------------------

    def _saved(self, keys: dict[int, int]) -> Change:
        return Change({key: lane for key, lane in keys.items() if key not in self.lanes}, again=keys)

    def used(self, uses: Iterable[tuple[Request, int]], evicted: Sequence[int]) -> Change:
        """Pages left the tree, then requests hit or computed their whole pages from a position on (H5)."""
        due: dict[int, int] = {}
        for page in evicted:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._hits[key]
                if self.history.write_policy is WritePolicy.WRITE_BACK:
                    due[key] = owner(page, self.W)
        for request, first in uses:
            for position, key in list(enumerate(self.keys(request, request.valid)))[first:]:
                page = request.pages[position]
                self._key_of[page] = key
                self._hits[key] += 1
                if self._hits[key] >= _HITS_DUE.get(self.history.write_policy, self._hits[key] + 1):
                    due[key] = owner(page, self.W)
        return self._saved(due)

    def loaded(self, name: str, request: Request, hit: int) -> None:
        """A submit hit more than the device had: the pages behind are on their way."""
        first, stop = hit // self.P, ceil_div(request.valid, self.P)
        self.loading.append((name, self.keys(request)[first:stop], request.pages[first:stop]))

    def read(self, pages: Collection[int], left: str | None = None) -> None:
        """Pages were read, or a request left: what loads into them, or for it, is there by now (H4)."""
        self.loading = [
            (name, keys, to) for name, keys, to in self.loading if name != left and not set(pages) & set(to)
        ]

    def compare(self, change: Change, filled: Sequence[tuple[int, int]]) -> Iterator[Finding]:
        """What has a copy now, beside what must or may have one; then that is known."""
        pinned, free = self.pinned(), self.free()
        full = _too_many({**change.due, **change.torn}, free)
        if full:  # what gives way there may be due again, in whatever lane
            full |= _too_many({**change.again, **change.due, **change.torn}, free)
        known = self.lanes | change.due | change.torn
        # One that gave way and is due again may get its copy in another lane.
        now = {key: lane for key, lane in (known | dict(filled)).items() if key in self.host}
        gone = Counter(lane for key, lane in self.lanes.items() if now.get(key) != lane)
        if torn := [key for key in change.torn if key in now]:
            yield Finding("H3", "copies that lack a cache", "dropped", f"{len(torn)} kept")
        if lacking := [key for key in change.due if key not in now and not full]:
            yield Finding("H5", "pages backed up", f"{len(change.due)}, all", f"{len(lacking)} less")
        if any(key not in now for key in pinned):
            yield Finding("H4", "host pages that are read", "kept", "evicted")
        expected = Counter(dict([change.dropped])) if change.dropped else Counter[int]()
        if any(gone[lane] != expected[lane] for lane in range(self.W) if lane not in full):
            yield Finding("H4", "host pages evicted, by lane", str(dict(expected)), str(dict(gone)))
        yield from _compare_fills(change, filled, crowded=bool(full))
        self.lanes = now
        if not (change.dropped or change.torn) and any(
            gone[lane] and left for lane, left in enumerate(self.free())
        ):
            yield Finding("H4", "host pages evicted", "as many as are needed", "more")
        self.stored |= dict(filled) if self.history.storage else {}


def _too_many(wanted: Mapping[int, int], free: Sequence[int]) -> set[int]:
    """Lanes without enough free pages; ``wanted``: key → lane."""
    return {lane for lane, count in Counter(wanted.values()).items() if count > free[lane]}


def _compare_fills(change: Change, filled: Sequence[tuple[int, int]], *, crowded: bool) -> Iterator[Finding]:
    """Each page is backed up once, in the lane of its owner, and only if it is due (H5).

    Where copies give way to others within a step, one may be due again.
    """
    due = change.due | change.again if crowded else change.due
    odd = [key for key, lane in filled if due.get(key) != lane]
    if odd or (len(dict(filled)) != len(filled) and not crowded):
        received = f"{len(odd)} of {len(filled)} not due or of another lane, or twice"
        yield Finding("H5", "pages backed up", "those that are due, once", received)
