"""Laws H3, H4, H5: a whole life of a host cache, against plain books and the bytes of every page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from properties.host_copies import LAYERS, PARTS, host_of
from properties.proofs import proves
from properties.refusals import refusal
from refmodel.layout.ownership import local_page, logical_page, owner
from refmodel.serving.host_moves import Fill, Landing, Load, backed_up_by, land, land_elsewhere

Bytes = dict[tuple[str, int], int]  # (cache, layer) → key of the content: the memory of one page


def whole_bytes(key: int) -> Bytes:
    return dict.fromkeys(PARTS, key)


@dataclass
class Copy:
    lane: int
    used: int  # last access
    born: int
    present: set[str] = field(default_factory=set)
    pins: int = 1


class Books:
    """The obviously right host cache: which keys have copies, and what a plan may evict."""

    def __init__(self, world_size: int, pages_per_lane: int) -> None:
        self.world_size, self.capacity = world_size, pages_per_lane
        self.copies: dict[int, Copy] = {}
        self.born = 0

    def victims(self, lane: int, keep: Sequence[int] = ()) -> list[int]:
        mine = [key for key, c in self.copies.items() if c.lane == lane and not c.pins and key not in keep]
        return sorted(mine, key=lambda key: (self.copies[key].used, -self.copies[key].born))

    def free(self, lane: int) -> int:
        return self.capacity - sum(copy.lane == lane for copy in self.copies.values())

    def fill(self, keys: Sequence[int], lanes: Sequence[int], now: int) -> tuple[list[int], list[int]] | None:
        """(new keys, evicted keys); None if some lane has no room."""
        new = {key: lane for key, lane in zip(keys, lanes, strict=True) if key not in self.copies}
        evicted: list[int] = []
        for lane, wanted in sorted(Counter(new.values()).items()):
            victims = self.victims(lane, keys)
            missing = max(0, wanted - self.free(lane))
            if missing > len(victims):
                return None
            evicted += victims[:missing]
        for key in evicted:
            del self.copies[key]
        for key, lane in new.items():
            self.copies[key] = Copy(lane, now, self.born)
            self.born += 1
        for key in keys:
            self.copies[key].used = now
        return list(new), evicted

    def whole(self, key: int) -> bool:
        return key in self.copies and self.copies[key].present == set(LAYERS)

    def usable(self, keys: Sequence[int]) -> int:
        return len(keys) if all(map(self.whole, keys)) else [self.whole(key) for key in keys].index(False)


class Life:
    """A host cache with memories: every key's bytes must come back to where page tables look for them."""

    def __init__(self, world_size: int, pages_per_lane: int) -> None:
        self.world_size = world_size
        self.host = host_of(world_size, pages_per_lane)
        self.books = Books(world_size, pages_per_lane)
        self.host_memory: dict[tuple[int, int], Bytes] = {}  # (rank, host page)
        self.device_memory: dict[tuple[int, int], Bytes] = {}  # (rank, local page)
        self.places: dict[int, int] = {}  # host page of a key, when it last had one
        self.fills: list[Fill] = []
        self.loads: list[tuple[Load, Landing]] = []
        self.held: list[list[int]] = []
        self.now = self.pages_taken = 0

    def chain(self, which: int, pages: int) -> list[int]:
        return [10 * which + position for position in range(pages)]

    def fresh_pages(self, lanes: Sequence[int]) -> list[int]:
        first = self.pages_taken + 1
        self.pages_taken += len(lanes)
        return [logical_page(first + i, lane, self.world_size) for i, lane in enumerate(lanes)]

    def step(self, deed: str, which: int, count: int, luck: int) -> None:
        self.now += luck % 2  # some accesses are at the same time
        getattr(self, deed)(which, count, luck)
        assert self.host.check() == ()
        for key, place in self.places.items():
            if key in self.books.copies:
                assert self.host_memory[self.books.copies[key].lane, place] == whole_bytes(key)
        for chain in range(3):
            keys = self.chain(chain, 4)
            assert self.host.usable_prefix(keys) == self.books.usable(keys)

    def backup(self, which: int, count: int, luck: int) -> None:
        keys = self.chain(which, count)
        pages = self.fresh_pages([(luck + i * (1 + luck // 8)) % self.world_size for i in range(count)])
        for key, page in zip(keys, pages, strict=True):
            self.device_memory[owner(page, self.world_size), local_page(page, self.world_size)] = whole_bytes(
                key
            )
        fill = self.fill(
            keys,
            [owner(page, self.world_size) for page in pages],
            lambda: self.host.plan_backup(keys, pages, self.now),
        )
        if fill is None:
            return
        copied = 0
        for rank in range(self.world_size):
            pairs = backed_up_by(rank, fill, pages, self.world_size)
            for host_page, local in zip(pairs.host, pairs.device, strict=True):
                self.host_memory[rank, host_page] = dict(self.device_memory[rank, local])
                copied += 1
        assert copied == len(fill.moves)

    def prefetch(self, which: int, count: int, luck: int) -> None:
        keys = self.chain(which, count)
        lanes = [(luck + i) % self.world_size for i in range(count)]
        fill = self.fill(keys, lanes, lambda: self.host.plan_prefetch(keys, lanes, self.now))
        for move in fill.moves if fill else ():
            self.host_memory[move.lane, move.host_page] = whole_bytes(keys[move.position])

    def fill(self, keys: Sequence[int], lanes: Sequence[int], plan: Callable[[], Fill]) -> Fill | None:
        before = self.host.fingerprint()
        expected = self.books.fill(keys, lanes, self.now)
        if expected is None:
            assert refusal(plan).startswith("host pages of lane")
            assert self.host.fingerprint() == before
            return None
        fill = plan()
        assert ([move.key for move in fill.moves], list(fill.evicted)) == expected
        self.fills.append(fill)
        self.places |= {move.key: move.host_page for move in fill.moves}
        return fill

    def arrive(self, which: int, count: int, luck: int) -> None:
        for fill in self.fills[which : which + 1]:
            pages = min(luck // 4, len(fill.moves))
            cache = list(LAYERS)[luck % 4]
            self.host.arrived(fill, cache, pages)
            for move in fill.moves[:pages]:
                self.books.copies[move.key].present.add(cache)

    def complete(self, which: int, count: int, luck: int) -> None:
        for fill in self.fills[which : which + 1]:
            for cache in LAYERS:
                self.host.arrived(fill, cache)
            for move in fill.moves:
                self.books.copies[move.key].present = set(LAYERS)
            self.close(which, count, luck)

    def close(self, which: int, count: int, luck: int) -> None:
        for fill in self.fills[which : which + 1]:
            self.fills.remove(fill)
            keys = [move.key for move in fill.moves]
            torn = tuple(key for key in keys if not self.books.whole(key))
            assert self.host.close(fill) == torn
            for key in keys:
                self.books.copies[key].pins -= 1
            for key in torn:
                del self.books.copies[key]

    def load(self, which: int, count: int, luck: int) -> None:
        keys = self.chain(which, count)
        usable = self.books.usable(keys)
        if usable < count:
            before = self.host.fingerprint()
            assert refusal(self.host.plan_load, keys, self.now).startswith("host copy to use")
            assert self.host.fingerprint() == before
        load = self.host.plan_load(keys[:usable], self.now)
        for key in keys[:usable]:
            self.books.copies[key].pins += 1
            self.books.copies[key].used = self.now
        if luck % 3:
            landing = land(load, self.fresh_pages(load.lanes), self.world_size)
        else:
            pages = self.fresh_pages([(luck + i) % self.world_size for i in range(usable)])
            landing = land_elsewhere(load, pages, self.world_size)
        self.loads.append((load, landing))

    def copy_layers(self, which: int, count: int, luck: int) -> None:
        for load, landing in self.loads[which : which + 1]:
            for cache, layer in self.host.unloaded(load)[:count]:
                assert "not loaded" in refusal(self.host.require_layer, load, cache, layer)
                self.copy(landing, cache, layer)
                self.host.mark_loaded(load, cache, layer)
                self.host.require_layer(load, cache, layer)

    def copy(self, landing: Landing, cache: str, layer: int) -> None:
        for lane in range(self.world_size):
            for rank in range(self.world_size):
                pairs = landing.pairs(lane, rank)
                for host_page, local in zip(pairs.host, pairs.device, strict=True):
                    source = self.host_memory[lane, host_page]
                    self.device_memory.setdefault((rank, local), {})[cache, layer] = source[cache, layer]

    def finish(self, which: int, count: int, luck: int) -> None:
        for load, landing in self.loads[which : which + 1]:
            if self.host.unloaded(load) and luck % 2:
                assert refusal(self.host.finish, load).startswith("load to finish")
                continue
            self.copy_layers(which, len(PARTS), luck)
            self.host.finish(load)
            self.unload(load, landing)
            for move, page in zip(load.moves, landing.pages, strict=True):
                found = self.device_memory[owner(page, self.world_size), local_page(page, self.world_size)]
                assert found == whole_bytes(move.key)  # read as page tables read it

    def abandon(self, which: int, count: int, luck: int) -> None:
        for load, landing in self.loads[which : which + 1]:
            self.host.abandon(load)
            self.unload(load, landing)

    def unload(self, load: Load, landing: Landing) -> None:
        self.loads.remove((load, landing))
        for move in load.moves:
            self.books.copies[move.key].pins -= 1

    def evict(self, which: int, count: int, luck: int) -> None:
        lane = which % self.world_size
        expected = self.books.victims(lane)[:count]
        assert list(self.host.evict(lane, count)) == expected
        for key in expected:
            del self.books.copies[key]

    def hold(self, which: int, count: int, luck: int) -> None:
        keys = self.chain(which, count)
        keys = keys[: self.books.usable(keys)]
        self.host.pin(keys)
        self.held.append(keys)
        for key in keys:
            self.books.copies[key].pins += 1

    def let_go(self, which: int, count: int, luck: int) -> None:
        for keys in self.held[which : which + 1]:
            self.held.remove(keys)
            self.host.unpin(keys)
            for key in keys:
                self.books.copies[key].pins -= 1


DEEDS = (
    "complete", "backup", "prefetch", "finish", "load", "evict",
    "arrive", "close", "copy_layers", "abandon", "hold", "let_go",
)  # fmt: skip
deeds = st.tuples(st.sampled_from(DEEDS), st.integers(0, 2), st.integers(1, 4), st.integers(0, 15))


@proves("H3", "H4", "H5")
@given(st.integers(1, 3), st.integers(1, 4), st.lists(deeds, max_size=40))
def test_the_life_of_a_host_cache(
    world_size: int, pages_per_lane: int, steps: list[tuple[str, int, int, int]]
) -> None:
    life = Life(world_size, pages_per_lane)
    for step in [("backup", 0, 3, 0), ("complete", 0, 1, 0), ("load", 0, 2, 1), *steps, ("finish", 0, 1, 0)]:
        life.step(*step)
