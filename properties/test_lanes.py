"""Law L1: every page of a lane is in one place, and what is refused changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.refusals import refusal
from properties.used_lanes import CACHED, FREE, HELD, pages_in, small_grids, used_lanes
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid
from refmodel.serving.extend import extend_slots
from refmodel.serving.lanes import Lanes, OutOfPages, PageState


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


def taken(lanes: Lanes, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The pages, or None if a lane has too few."""
    try:
        return lanes.take(wanted)
    except OutOfPages:
        return None


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
