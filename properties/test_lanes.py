"""Laws L1, L2, L3: pages of every lane, slots of an extent, room made by eviction."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import extents, grids, plans
from refmodel.errors import CpkvError, InvalidInput
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import PageTable
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan
from refmodel.serving.extend import extend_slots, new_pages
from refmodel.serving.lanes import Evict, Lanes, OutOfPages, PageState, make_room

FREE, HELD, CACHED = PageState
small_grids = st.builds(Grid, st.integers(1, 4), st.integers(1, 4))


class Book:
    """The obviously right allocator: a queue of free pages a lane, and a state for every page in use."""

    def __init__(self, grid: Grid, pages_per_lane: int) -> None:
        self.world_size = W = grid.world_size
        self.queues = [[k * W + lane for k in range(1, pages_per_lane + 1)] for lane in range(W)]
        self.used: dict[int, PageState] = {}

    def take(self, lanes: Sequence[int]) -> tuple[int, ...] | None:
        if any(lanes.count(lane) > len(self.queues[lane]) for lane in lanes):
            return None
        pages = tuple(self.queues[lane].pop(0) for lane in lanes)
        self.used |= dict.fromkeys(pages, HELD)
        return pages

    def cache(self, pages: Sequence[int]) -> bool:
        if len(set(pages)) < len(pages) or any(self.used.get(page) is not HELD for page in pages):
            return False
        self.used |= dict.fromkeys(pages, CACHED)
        return True

    def free(self, pages: Sequence[int]) -> bool:
        if len(set(pages)) < len(pages) or any(page not in self.used for page in pages):
            return False
        for page in pages:
            del self.used[page]
            self.queues[page % self.world_size].append(page)
        return True

    def fingerprint(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        def used(lane: int, state: PageState) -> tuple[int, ...]:
            mine = (page for page, known in self.used.items() if known is state)
            return tuple(sorted(page for page in mine if page % self.world_size == lane))

        return tuple(
            (tuple(queue), used(lane, HELD), used(lane, CACHED)) for lane, queue in enumerate(self.queues)
        )


def refusal(change: Callable[..., object], *args: object) -> str:
    """The error that refuses a change; empty if it is made."""
    try:
        change(*args)
    except CpkvError as refused:
        return str(refused)
    return ""


def taken(lanes: Lanes, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The pages, or None if a lane has too few."""
    try:
        return lanes.take(wanted)
    except OutOfPages:
        return None


@st.composite
def used_lanes(draw: st.DrawFn) -> Lanes:
    """Lanes in which some pages are held, some cached, some free again."""
    grid = draw(small_grids)
    lanes = Lanes(grid, draw(st.integers(1, 5)))
    everything = [lane for lane in range(grid.world_size) for _ in range(lanes.pages_per_lane)]
    fates = draw(st.lists(st.sampled_from(PageState), min_size=len(everything), max_size=len(everything)))
    pages = dict(zip(draw(st.permutations(lanes.take(everything))), fates, strict=True))
    lanes.cache(page for page, fate in pages.items() if fate is CACHED)
    lanes.free(page for page, fate in pages.items() if fate is FREE)
    return lanes


def pages_in(lanes: Lanes, state: PageState) -> list[int]:
    """All pages in a state, ascending."""
    W = lanes.grid.world_size
    return [page for page in range(W, W * (lanes.pages_per_lane + 1)) if lanes.state(page) is state]


@proves("L1")
@given(st.data(), small_grids, st.integers(1, 4))
def test_every_page_is_in_one_place_after_any_sequence(data: st.DataObject, grid: Grid, count: int) -> None:
    W = grid.world_size
    lanes, book = Lanes(grid, count), Book(grid, count)
    for _ in range(data.draw(st.integers(1, 10))):
        change = data.draw(st.sampled_from(["take", "cache", "free"]))
        if change == "take":
            wanted = data.draw(st.lists(st.integers(0, W - 1), max_size=5))
            assert taken(lanes, wanted) == book.take(wanted)
        else:
            used = sorted(page for page in book.used if change == "free" or book.used[page] is HELD)
            fit = st.lists(st.sampled_from(used), unique=True, min_size=1) if used else st.just([])
            pages = data.draw(fit | st.lists(st.integers(-1, W * (count + 1)), max_size=3))
            assert (refusal(getattr(lanes, change), pages) == "") == getattr(book, change)(pages)
        assert lanes.fingerprint() == book.fingerprint()
        assert lanes.check() == ()
        for lane in range(W):
            assert lanes.free_pages(lane) + lanes.held(lane) + lanes.cached(lane) == count


@proves("L1")
@given(used_lanes(), st.data())
def test_a_failed_allocation_changes_nothing(lanes: Lanes, data: st.DataObject) -> None:
    before = lanes.fingerprint()
    short = data.draw(st.integers(0, lanes.grid.world_size - 1))
    too_many = [short] * (lanes.free_pages(short) + 1)
    others = [lane for lane in range(lanes.grid.world_size) if lanes.free_pages(lane) and lane != short]
    assert f"pages of lane {short}" in refusal(lanes.take, [*others, *too_many])
    assert lanes.fingerprint() == before


@proves("L1")
@given(used_lanes(), st.data())
def test_double_free_and_dummies_are_refused_whole(lanes: Lanes, data: st.DataObject) -> None:
    before = lanes.fingerprint()
    used = pages_in(lanes, HELD) + pages_in(lanes, CACHED)
    dummies = list(range(lanes.grid.world_size))
    wrong = data.draw(st.sampled_from(dummies + pages_in(lanes, FREE) + used * 2))
    again = [wrong] if wrong in used else []
    others = [page for page in used if page != wrong]
    assert f"page {wrong}" in refusal(lanes.free, [*others, *again, wrong])
    assert lanes.fingerprint() == before


@proves("L1")
@given(used_lanes(), st.data(), st.integers(0, 2**16))
def test_slots_are_freed_by_whole_pages_only(lanes: Lanes, data: st.DataObject, seed: int) -> None:
    P, held = lanes.grid.page_size, pages_in(lanes, HELD)
    freed = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
    slots = (torch.tensor(freed, dtype=torch.int64).unsqueeze(1) * P + torch.arange(P)).flatten()
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
    before = lanes.fingerprint()
    if P > 1 and freed:
        assert f"{P - 1} slots of page {int(slots[0]) // P}" in refusal(lanes.free_slots, slots[1:])
    if freed:
        assert "each slot once" in refusal(lanes.free_slots, torch.cat([slots, slots[:1]]))
    assert lanes.fingerprint() == before
    lanes.free_slots(slots)
    assert pages_in(lanes, HELD) == sorted(set(held) - set(freed))


@proves("L2")
@given(grids(max_page=16).flatmap(lambda grid: st.tuples(st.just(grid), extents(grid))))
def test_a_page_is_taken_for_every_token_that_starts_one(drawn: tuple[Grid, Extent]) -> None:
    grid, extent = drawn
    starts = [p for p in range(extent.prefix, extent.end) if p % grid.page_size == 0]
    assert new_pages(extent.prefix, extent.tokens, grid.page_size) == len(starts)


@proves("L2")
@given(plans(max_page=16, max_requests=1))
def test_a_plan_names_a_lane_for_every_new_page(plan: Plan) -> None:
    extent = plan.extents[0]
    assert len(new_page_lanes(plan, 0)) == new_pages(extent.prefix, extent.tokens, plan.grid.page_size)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Grid, list[int]]:
    """A grid, and the tokens of each chunk of one request."""
    grid = draw(grids(max_page=16))
    P = grid.page_size
    return grid, draw(st.lists(st.integers(1, 3 * P) | st.sampled_from([1, P]), min_size=1, max_size=4))


@proves("L2")
@given(chunked(), st.integers(0, 2**16))
def test_extents_fill_the_slots_of_the_page_table(drawn: tuple[Grid, list[int]], seed: int) -> None:
    grid, chunks = drawn
    W, generator = grid.world_size, torch.Generator().manual_seed(seed)
    lanes, pages = Lanes(grid, pages_per_lane=sum(chunks)), list[int]()
    prefix, slots = 0, []
    for tokens in chunks:
        count = new_pages(prefix, tokens, grid.page_size)
        fresh = lanes.take(torch.randint(W, (count,), generator=generator).tolist())
        slots.append(extend_slots(pages, fresh, Extent(prefix, tokens), grid))
        pages.extend(fresh)
        prefix += tokens
    assert torch.equal(torch.cat(slots), PageTable(torch.tensor(pages), grid).slots(torch.arange(prefix)))


def test_the_open_tail_page_is_filled_first() -> None:
    grid = Grid(world_size=1, page_size=4)
    lanes = Lanes(grid, pages_per_lane=9)
    pages = lanes.take([0] * 4)[1:3]  # 2 and 3; the next is 5
    assert pages[-1] * 4 + 1 == 13  # the last slot of six tokens
    counts = [new_pages(6, 11, 4), new_pages(0, 5, 4)]
    fresh = [lanes.take([0] * count) for count in counts]
    assert fresh == [(5, 6, 7), (8, 9)]
    assert extend_slots(pages, fresh[0], Extent(6, 11), grid).tolist() == [14, 15, *range(20, 29)]
    assert extend_slots([], fresh[1], Extent(0, 5), grid).tolist() == [32, 33, 34, 35, 36]


class Tree:
    """Cached pages in groups that go together, oldest first; some are locked."""

    def __init__(self, lanes: Lanes, groups: Sequence[Sequence[int]], locked: Sequence[bool]) -> None:
        self.lanes, self.asked = lanes, list[int]()
        self.evictable = [group for group, keep in zip(groups, locked, strict=True) if not keep]

    def evict(self, lane: int) -> Sequence[int]:
        self.asked.append(lane)
        W = self.lanes.grid.world_size
        victim = next((group for group in self.evictable if lane in [page % W for page in group]), [])
        self.evictable = [group for group in self.evictable if group is not victim]
        return victim


@st.composite
def with_tree(draw: st.DrawFn) -> tuple[Lanes, Tree, list[int]]:
    """Lanes in use, the tree of their cached pages, and a lane for each page wanted."""
    lanes = draw(used_lanes())
    cached = draw(st.permutations(pages_in(lanes, CACHED)))
    size = draw(st.integers(1, 3))
    groups = [cached[i : i + size] for i in range(0, len(cached), size)]
    locked = [draw(st.integers(0, 4)) == 0 for _ in groups]
    wanted = draw(st.lists(st.integers(0, lanes.grid.world_size - 1), min_size=1, max_size=8))
    return lanes, Tree(lanes, groups, locked), wanted


def lane_that_refuses(lanes: Lanes, wanted: Sequence[int], evict: Evict) -> int | None:
    """Make room; the lane that cannot be relieved, or None."""
    try:
        make_room(lanes, wanted, evict)
    except OutOfPages as refused:
        return refused.where.rank
    return None


@proves("L3")
@given(with_tree())
def test_eviction_goes_on_until_each_lane_has_room(drawn: tuple[Lanes, Tree, list[int]]) -> None:
    lanes, tree, wanted = drawn
    W, offered = lanes.grid.world_size, list(tree.evictable)
    reachable = Counter(page % W for group in offered for page in group)
    hopeless = {lane for lane in wanted if wanted.count(lane) > lanes.free_pages(lane) + reachable[lane]}
    refused = lane_that_refuses(lanes, wanted, tree.evict)
    if hopeless:
        assert refused in hopeless
    else:
        assert refused is None
        assert [page % W for page in lanes.take(wanted)] == wanted


@proves("L1", "L3")
@given(with_tree())
def test_what_is_evicted_is_free_and_the_rest_stays(drawn: tuple[Lanes, Tree, list[int]]) -> None:
    lanes, tree, wanted = drawn
    before = {state: pages_in(lanes, state) for state in PageState}
    offered = list(tree.evictable)
    lane_that_refuses(lanes, wanted, tree.evict)
    evicted = {page for group in offered if group not in tree.evictable for page in group}
    assert pages_in(lanes, HELD) == before[HELD]
    assert pages_in(lanes, CACHED) == sorted(set(before[CACHED]) - evicted)
    assert pages_in(lanes, FREE) == sorted({*before[FREE], *evicted})
    assert lanes.check() == ()


@proves("L3")
@given(with_tree())
def test_only_a_lane_without_room_is_relieved(drawn: tuple[Lanes, Tree, list[int]]) -> None:
    lanes, tree, wanted = drawn

    def evict(lane: int) -> Sequence[int]:
        assert wanted.count(lane) > lanes.free_pages(lane)
        return tree.evict(lane)

    refused = lane_that_refuses(lanes, wanted, evict)
    assert refused is None or tree.asked[-1:] in ([], [refused])


@proves("L3")
@given(with_tree(), st.data())
def test_nothing_is_evicted_in_vain(drawn: tuple[Lanes, Tree, list[int]], data: st.DataObject) -> None:
    lanes, tree, _ = drawn
    before = lanes.fingerprint()
    lane = data.draw(st.integers(0, lanes.grid.world_size - 1))
    more_than_requests_leave = [lane] * (lanes.pages_per_lane - lanes.held(lane) + 1)
    assert lane_that_refuses(lanes, more_than_requests_leave, tree.evict) == lane
    assert tree.asked == []
    assert lanes.fingerprint() == before


@proves("L3")
@given(st.integers(2, 4), st.integers(1, 5), st.data())
def test_one_lane_can_be_empty_while_the_total_is_ample(ranks: int, count: int, data: st.DataObject) -> None:
    lanes = Lanes(Grid(ranks, 4), count)
    empty = data.draw(st.integers(0, ranks - 1))
    lanes.take([empty] * count)
    names_it = f"pages of lane {empty}: expected 1 free, got 0 there, {count * (ranks - 1)} in all lanes"
    assert names_it in refusal(lanes.take, [empty])
    assert names_it in refusal(make_room, lanes, [empty], lambda lane: ())


def test_bad_input_is_refused_with_its_place() -> None:
    grid = Grid(2, 4)
    lanes = Lanes(grid, 3)
    with pytest.raises(InvalidInput, match="pages per lane"):
        Lanes(grid, 0)
    for lane in (-1, 2):
        for ask in (lanes.free_pages, lanes.held, lanes.cached, lambda lane: lanes.take([lane])):
            with pytest.raises(InvalidInput, match=r"lane: expected 0 … 1"):
                ask(lane)
    with pytest.raises(InvalidInput, match="got 1, a dummy"):
        lanes.state(1)
    with pytest.raises(InvalidInput, match="2 … 7, got 8"):
        lanes.state(8)
    with pytest.raises(InvalidInput, match="page 2, free"):
        lanes.cache([2])
    with pytest.raises(InvalidInput, match=r"pages of the prefix: expected 2, got 1 \(request a"):
        extend_slots([2], [3], Extent(6, 3), grid, request="a")
    with pytest.raises(InvalidInput, match="pages taken for an extent: expected 1, got 2"):
        extend_slots([2, 4], [3, 5], Extent(6, 3), grid)
    with pytest.raises(InvalidInput, match="page 4 2 times"):
        extend_slots([2, 4], [4], Extent(6, 3), grid)


def test_the_error_crosses_processes() -> None:
    with pytest.raises(OutOfPages) as refused:
        Lanes(Grid(2, 4), 1).take([1, 1])
    again = pickle.loads(pickle.dumps(refused.value))
    assert (type(again), str(again)) == (OutOfPages, str(refused.value))


def test_a_broken_lane_is_found_by_name() -> None:
    lanes = Lanes(Grid(2, 4), 3)
    (page,) = lanes.take([1])
    lanes._lanes[1].free.append(page)
    (found,) = lanes.check()
    assert (found.law, found.where.rank, found.received) == ("L1", 1, "3 free, 1 held, 0 cached")
