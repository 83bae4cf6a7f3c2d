"""Laws H3, H4, H5: what has a host copy, what may be used, where it lands, and who moves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.errors import CpkvError, InvalidInput
from refmodel.layout.ownership import local_page, logical_page, owner
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_layouts import CopyEngine, HostLayout, empty_host_pool
from refmodel.serving.host_moves import Fill, Landing, Load, Move, backed_up_by, land, land_elsewhere
from refmodel.serving.layer_gate import LayerGate
from refmodel.serving.stored_prefix import own_prefix
from refmodel.serving.write_policy import HitCounts, WritePolicy
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache

LAYERS = {"kv": 2, "index": 2, "draft_kv": 1, "draft_index": 1}
PARTS = tuple((cache, layer) for cache, layers in LAYERS.items() for layer in range(layers))
Bytes = dict[tuple[str, int], int]  # (cache, layer) → key of the content: the memory of one page


def refusal(act: Callable[..., object], *args: object) -> str:
    """What the error says when that is refused; "" when it is not."""
    try:
        act(*args)
    except CpkvError as error:
        return str(error)
    return ""


def whole_bytes(key: int) -> Bytes:
    return dict.fromkeys(PARTS, key)


def host_of(world_size: int, pages_per_lane: int) -> HostCache:
    return HostCache(LAYERS, world_size=world_size, pages_per_lane=pages_per_lane)


def filled(host: HostCache, keys: Sequence[int], lanes: Sequence[int], now: int = 0) -> Fill:
    """Keys with whole host copies in those lanes."""
    fill = host.plan_prefetch(keys, lanes, now)
    for cache in LAYERS:
        host.arrived(fill, cache)
    assert host.close(fill) == ()
    return fill


# -- a life of the cache, against plain books ------------------------------------------------------------


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


# -- H3 --------------------------------------------------------------------------------------------------


@proves("H3")
@given(st.lists(st.integers(0, 5), min_size=len(LAYERS), max_size=len(LAYERS)), st.integers(1, 3))
def test_a_partial_prefetch_ends_at_the_first_page_that_lacks_a_cache(
    arrived: list[int], world_size: int
) -> None:
    keys = [70, 71, 72, 73, 74]
    host = host_of(world_size, pages_per_lane=5)
    fill = host.plan_prefetch(keys, [i % world_size for i in range(5)], now=0)
    for cache, pages in zip(LAYERS, arrived, strict=True):
        host.arrived(fill, cache, pages)
    assert host.usable_prefix(keys) == min(arrived)
    assert host.close(fill) == tuple(keys[min(arrived) :])
    assert [key in host for key in keys] == [i < min(arrived) for i in range(5)]


@proves("H3", "H4")
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4))
def test_what_storage_brings_behind_the_host_prefix_lies_behind_it(
    world_size: int, held: int, brought: int
) -> None:
    keys = [70 + i for i in range(held + brought)]
    lanes = [i % world_size for i in range(len(keys))]
    host = host_of(world_size, pages_per_lane=8)
    filled(host, keys[:held], lanes[:held])
    fill = filled(host, keys, lanes)
    memory = {(move.lane, move.host_page): keys[move.position] for move in fill.moves}  # as storage has them
    load = host.plan_load(keys[held:], now=1)
    assert [memory[move.lane, move.host_page] for move in load.moves] == keys[held:]


@proves("H3", "H5")
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.sampled_from(list(LAYERS)))), max_size=8),
)
def test_storage_can_bring_what_every_rank_has_of_every_cache(
    world_size: int, pages: list[tuple[int, set[str]]]
) -> None:
    lanes = [lane % world_size for lane, _ in pages]
    lacking = [lacks if i % 3 == 2 else set[str]() for i, (_, lacks) in enumerate(pages)]

    def answers(rank: int) -> dict[str, list[bool]]:
        mine = [lacks for lane, lacks in zip(lanes, lacking, strict=True) if lane == rank]
        return {cache: [cache not in lacks for lacks in mine] for cache in LAYERS}

    expected = next((i for i, lacks in enumerate(lacking) if lacks), len(pages))
    assert min(own_prefix(lanes, rank, answers(rank), list(LAYERS)) for rank in range(world_size)) == expected


def test_storage_that_never_heard_of_a_cache_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"expected 1, one a page of the rank, got 0 \(rank 0, cache index\)"
    ):
        own_prefix([0], 0, {"kv": [True]}, ["kv", "index"])


@proves("H1", "H3", "H4")
@given(st.integers(1, 3), st.integers(0, 2**16))
def test_every_cache_of_a_page_comes_back_byte_for_byte(world_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, P = [70, 71, 72, 73], 2
    shape = (world_size, 10, TAG.page_bytes(P))  # every rank's pages of one layer of one cache

    def shards() -> dict[tuple[str, int], torch.Tensor]:
        return {part: torch.randint(256, shape, dtype=torch.uint8, generator=generator) for part in PARTS}

    pools = {
        cache: [
            empty_host_pool(
                HostLayout.PAGE_FIRST,
                CopyEngine.KERNEL,
                Cache.KV,
                TAG,
                page_size=P,
                layers=layers,
                num_pages=4,
            )
            for _ in range(world_size)
        ]
        for cache, layers in LAYERS.items()
    }
    host, before, after = host_of(world_size, pages_per_lane=4), shards(), shards()
    pages = [logical_page(1 + i, (seed + i) % world_size, world_size) for i in range(4)]
    fill = host.plan_backup(keys, pages, now=0)
    for cache, layer in PARTS:
        for rank, pool in enumerate(pools[cache]):
            pool.store(backed_up_by(rank, fill, pages, world_size), layer, before[cache, layer][rank])
        host.arrived(fill, cache)
    assert host.close(fill) == ()
    load = host.plan_load(keys, now=1)
    landing = land(load, [page + 4 * world_size for page in pages], world_size)
    for cache, layer in host.unloaded(load):
        for rank, pool in enumerate(pools[cache]):
            pool.load(landing.pairs(rank, rank), layer, after[cache, layer][rank])
        host.mark_loaded(load, cache, layer)
    host.finish(load)
    for part in PARTS:
        for page, landed in zip(pages, landing.pages, strict=True):
            there = before[part][owner(page, world_size), local_page(page, world_size)]
            here = after[part][owner(landed, world_size), local_page(landed, world_size)]
            assert torch.equal(here, there), part


# -- H4 --------------------------------------------------------------------------------------------------


@proves("H4")
@given(st.permutations(PARTS), st.integers(0, len(PARTS)))
def test_a_layer_is_read_only_after_it_is_loaded(order: list[tuple[str, int]], loaded: int) -> None:
    host = host_of(1, pages_per_lane=1)
    filled(host, [70], [0])
    load = host.plan_load([70], now=0)
    for part in order[:loaded]:
        host.mark_loaded(load, *part)
    for part in PARTS:
        if part in order[:loaded]:
            host.require_layer(load, *part)
            continue
        assert f"layer {part[1]}, cache {part[0]}" in refusal(host.require_layer, load, *part)
    assert set(host.unloaded(load)) == set(order[loaded:])
    missing = len(PARTS) - loaded
    assert (f"{missing} missing" in refusal(host.finish, load)) == bool(missing)


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, Load, list[int]]:
    """(W, a load, a logical page for each move)."""
    world_size = draw(st.integers(1, 4))
    lane = st.integers(0, world_size - 1)
    lanes = draw(st.lists(lane, max_size=6))
    moves = tuple(Move(i, 70 + i, lane, host_page=i) for i, lane in enumerate(lanes))
    same = draw(st.booleans())
    pages = [
        logical_page(9 - i, lane if same else draw(st.integers(0, world_size - 1)), world_size)
        for i, lane in enumerate(lanes)
    ]
    return world_size, Load(0, moves), pages


@proves("H4")
@given(loads())
def test_a_page_lands_in_the_lane_of_its_copy_or_nowhere(drawn: tuple[int, Load, list[int]]) -> None:
    world_size, load, pages = drawn
    if all(page % world_size == move.lane for page, move in zip(pages, load.moves, strict=True)):
        assert land(load, pages, world_size).moved == ()
        return
    assert refusal(land, load, pages, world_size).startswith("page of a load: expected one of lane")


@proves("H4", "H5")
@given(loads())
def test_a_page_that_lands_elsewhere_tells_its_new_owner(drawn: tuple[int, Load, list[int]]) -> None:
    world_size, load, pages = drawn
    landing = land_elsewhere(load, pages, world_size)
    assert landing.owners == tuple(page % world_size for page in pages)
    assert landing.moved == tuple(i for i, page in enumerate(pages) if page % world_size != load.lanes[i])
    loaded = Counter(
        (lane, host_page, logical_page(local, rank, world_size))
        for lane in range(world_size)
        for rank in range(world_size)
        for pairs in [landing.pairs(lane, rank)]
        for host_page, local in zip(pairs.host, pairs.device, strict=True)
    )
    moves = zip(load.moves, pages, strict=True)
    assert loaded == Counter((move.lane, move.host_page, page) for move, page in moves)


@proves("H4")
@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.sets(st.integers(0, 3)), st.integers(0, 4))
def test_pages_in_use_are_not_evicted_and_the_longest_unused_go_first(
    used: list[int], pinned: set[int], count: int
) -> None:
    host = host_of(1, pages_per_lane=4)
    for key, now in enumerate(used):
        filled(host, [key], [0], now)
    host.pin(sorted(pinned))
    by_use = sorted((now, -key) for key, now in enumerate(used) if key not in pinned)
    assert host.evict(0, count) == tuple(-key for _, key in by_use[:count])
    assert refusal(host.plan_prefetch, [10, 11, 12, 13, 14], [0] * 5, 9).startswith("host pages of lane 0")
    assert host.usable_prefix(sorted(pinned)) == len(pinned)


# -- H5 --------------------------------------------------------------------------------------------------


@proves("H5")
@given(st.integers(1, 4), st.permutations(range(4, 24)), st.integers(0, 8), st.integers(0, 8))
def test_over_the_ranks_each_page_is_backed_up_once_by_its_owner(
    world_size: int, pages: list[int], first: int, count: int
) -> None:
    host = host_of(world_size, pages_per_lane=20)
    filled(host, list(range(first)), [page % world_size for page in pages[:first]])
    pages = pages[:count]
    fill = host.plan_backup(list(range(count)), pages, now=1)
    copied = Counter(
        logical_page(local, rank, world_size)
        for rank in range(world_size)
        for local in backed_up_by(rank, fill, pages, world_size).device
    )
    assert copied == Counter(pages[first:])  # those that were on the host already are not copied again


@proves("H5")
@given(st.sampled_from(list(WritePolicy)), st.lists(st.integers(0, 3), max_size=12))
def test_a_page_is_due_for_backup_once_by_its_policy(policy: WritePolicy, hits: list[int]) -> None:
    counts, due = HitCounts(policy), list[int]()
    for key in hits:
        due += [key for _ in counts.hit([key], due)]
    needed = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}.get(policy)
    assert sorted(due) == sorted(key for key, n in Counter(hits).items() if needed and n >= needed)
    leaving = [0, 1, 2, 3]
    assert counts.leave(leaving, {1}) == ((0, 2, 3) if policy is WritePolicy.WRITE_BACK else ())
    assert counts.fingerprint() == ()


# -- refusals --------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[HostCache, Fill, Load], object], str]] = {
    "dummy": (
        lambda host, fill, load: host.plan_backup([1], [1], 0),
        "expected logical pages >= W = 2, each once, got 1",
    ),
    "page twice": (lambda host, fill, load: host.plan_backup([1, 2], [4, 4], 0), "pages to back up"),
    "key twice": (lambda host, fill, load: host.plan_backup([1, 1], [4, 5], 0), "keys of a fill"),
    "lengths": (
        lambda host, fill, load: host.plan_backup([1], [4, 5], 0),
        "keys of a fill: expected 2, each once",
    ),
    "no such lane": (lambda host, fill, load: host.plan_prefetch([1], [2], 0), "lane: expected 0 … 1, got 2"),
    "no such cache": (
        lambda host, fill, load: host.arrived(fill, "query"),
        "cache: expected one of kv, index",
    ),
    "more than asked for": (
        lambda host, fill, load: host.arrived(fill, "kv", 2),
        "pages that arrived: expected 0 … 1",
    ),
    "closed": (
        lambda host, fill, load: host.close(Fill(0, (), ())),
        "fill: expected one that is under way, got number 0",
    ),
    "ended": (
        lambda host, fill, load: host.abandon(Load(9, ())),
        "load: expected one that is under way, got number 9",
    ),
    "no copy": (
        lambda host, fill, load: host.plan_load([70, 99], 0),
        "all its caches (H3), got none for key 99",
    ),
    "part of a copy": (
        lambda host, fill, load: host.pin([70, 80]),
        "got key 80 without index, draft_kv, draft_index",
    ),
    "loaded twice": (
        lambda host, fill, load: host.plan_load([70, 70], 0),
        "keys of a load: expected each once",
    ),
    "layer twice": (
        lambda host, fill, load: host.mark_loaded(load, "kv", 0),
        "expected each layer loaded once",
    ),
    "no such layer": (
        lambda host, fill, load: host.mark_loaded(load, "draft_kv", 1),
        "layer of a load: expected 0 … 0",
    ),
    "layer of none": (
        lambda host, fill, load: host.require_layer(load, "query", 0),
        "cache: expected one of kv, index",
    ),
    "not pinned": (
        lambda host, fill, load: host.unpin([70]),
        "pins of a host page: expected >= 1, got 0 of key 70",
    ),
    "negative": (lambda host, fill, load: host.evict(0, -1), "host pages to evict: expected an integer >= 0"),
}


@proves("H4")
@given(st.sampled_from(sorted(REFUSED)))
def test_what_is_refused_changes_nothing(name: str) -> None:
    host = host_of(2, pages_per_lane=2)
    filled(host, [70], [0])
    fill = host.plan_prefetch([80], [1], now=1)
    host.arrived(fill, "kv")
    load = host.plan_load([70], now=2)
    host.mark_loaded(load, "kv", 0)
    before = host.fingerprint()
    act, why = REFUSED[name]
    assert why in refusal(act, host, fill, load)
    assert host.fingerprint() == before
    assert host.check() == ()


@pytest.mark.parametrize(
    ("pages", "why"),
    [([4, 5], "expected 1, one a move, got 2"), ([1], "expected logical pages >= W = 2, each once, got 1")],
)
def test_a_load_lands_in_real_pages(pages: list[int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        land(Load(0, (Move(0, 70, 0, 0),)), pages, world_size=2)


@pytest.mark.parametrize(
    ("layers", "world_size", "pages", "why"),
    [
        ({}, 1, 1, "caches of a host cache"),
        ({"kv": 0}, 1, 1, "layers of cache kv"),
        ({"kv": 1}, 0, 1, "world size W"),
        ({"kv": 1}, 1, -1, "host pages of a lane"),
    ],
)
def test_sizes_are_checked(layers: dict[str, int], world_size: int, pages: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        HostCache(layers, world_size=world_size, pages_per_lane=pages)


def test_broken_books_are_found() -> None:
    host = host_of(1, pages_per_lane=2)
    filled(host, [70], [0])
    fill = host.plan_prefetch([71], [0], now=1)
    host._pages.unpin([71])
    host._pages._free[0].append(0)
    del host._fills[fill.number]
    host._held.update([70])
    assert [finding.law for finding in host.check()] == ["H4", "H4", "H3"]


def test_the_state_of_a_gate_is_what_it_has_loaded() -> None:
    gate = LayerGate(LAYERS)
    gate.mark_loaded("index", 1)
    assert gate.fingerprint() == ((0, 0), (0, 1), (0,), (0,))
