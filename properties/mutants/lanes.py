"""Wrong allocators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout.geometry import Extent, Grid, ceil_div
from refmodel.serving import extend
from refmodel.serving import lanes as allocator
from refmodel.serving.lanes import Evict, Lanes


@mutant(Lanes.take, "failed-take-keeps-part", "L1", source="derived from allocators that write, then check")
def pages_taken_before_the_lane_runs_out(right: Right, self: Lanes, lanes: Sequence[int]) -> tuple[int, ...]:
    """Pages are taken one by one: those taken before a lane runs out are lost."""
    return tuple(page for lane in lanes for page in right(self, [lane]))


@mutant(Lanes.take, "page-from-another-lane", "L1", "L3")
def the_fullest_lane_helps_out(right: Right, self: Lanes, lanes: Sequence[int]) -> tuple[int, ...]:
    """A lane that is empty gets a page of the lane that has most: its owner is not its compute rank."""
    every = range(self.grid.world_size)
    return tuple(
        page
        for lane in lanes
        for page in right(self, [lane if self.free_pages(lane) else max(every, key=self.free_pages)])
    )


@mutant(Lanes._pages, "dummy-handed-out", "L1")
def local_pages_from_zero(self: Lanes, lane: int) -> range:
    """Local pages count from 0: the page that padding rows write to is handed out."""
    return range(lane, self.grid.world_size * self.pages_per_lane, self.grid.world_size)


@mutant(Lanes.free, "double-free", "L1")
def freed_whatever_its_state(right: Right, self: Lanes, pages: Iterable[int]) -> None:
    """A page that is free already goes into the queue again, and later to two requests."""
    for page in pages:
        if self.state(page) is allocator.PageState.FREE:
            self._lane_of(page).free.append(page)
        else:
            right(self, [page])


@mutant(Lanes.free, "double-free-ignored", "L1")
def free_pages_passed_over(right: Right, self: Lanes, pages: Iterable[int]) -> None:
    """Pages named twice or free already are passed over: the caller's count is wrong and nobody hears."""
    used = dict.fromkeys(page for page in pages if self.state(page) is not allocator.PageState.FREE)
    right(self, used)


@mutant(Lanes.free, "free-into-the-wrong-lane", "L1")
def freed_by_local_page(right: Right, self: Lanes, pages: Iterable[int]) -> None:
    """The lane of a freed page is taken from its local page: other lanes fill up with its pages."""
    W = self.grid.world_size
    for page in tuple(pages):
        right(self, [page])
        self._lanes[page % W].free.remove(page)
        self._lanes[page // W % W].free.append(page)


@mutant(Lanes.free, "evicted-page-still-cached", "L1")
def cached_pages_counted_twice(right: Right, self: Lanes, pages: Iterable[int]) -> None:
    """A page that leaves the tree is free, and still counts as cached."""
    pages = tuple(pages)
    cached = [page for page in pages if page in self._lane_of(page).cached]
    right(self, pages)
    for page in cached:
        self._lane_of(page).cached.add(page)


@mutant(Lanes.free_slots, "part-of-a-page-freed", "L1", source="derived from allocators that free by token")
def any_slot_frees_its_page(self: Lanes, slots: torch.Tensor) -> None:
    """Freeing any slot frees its page, with the tokens that others keep in it."""
    self.free((slots // self.grid.page_size).unique().tolist())


@mutant(extend.new_pages, "a-page-for-each-rank", "L2", source="reported in vllm#54679")
def every_rank_counts_the_page(right: Right, prefix: int, tokens: int, page_size: int) -> int:
    """Two ranks count a page each where one group-wide page holds the tokens."""
    return 2 * right(prefix, tokens, page_size)


@mutant(extend.new_pages, "open-tail-not-counted", "L2")
def as_if_the_prefix_ended_a_page(prefix: int, tokens: int, page_size: int) -> int:
    """New tokens are counted from a page of their own, though the tail page has room."""
    return ceil_div(tokens, page_size)


@mutant(extend.extend_slots, "tail-page-overwritten", "L2")
def tail_page_from_its_start(
    right: Right, pages: Sequence[int], fresh: Sequence[int], extent: Extent, grid: Grid, **names: str
) -> torch.Tensor:
    """The open tail page is filled from its first slot: the tokens in it are lost."""
    slots = right(pages, fresh, extent, grid, **names)
    used = extent.prefix % grid.page_size
    in_tail = torch.arange(extent.tokens) < (-extent.prefix) % grid.page_size
    return torch.where(in_tail, slots - used, slots)


@mutant(extend.extend_slots, "tail-page-last", "L2")
def new_pages_before_the_tail(
    right: Right, pages: Sequence[int], fresh: Sequence[int], extent: Extent, grid: Grid, **names: str
) -> torch.Tensor:
    """Whole pages are filled before the open tail page: its slots go to the last tokens."""
    opened = -extent.prefix % grid.page_size
    return right(pages, fresh, extent, grid, **names).roll(-opened)


@mutant(allocator.make_room, "room-by-total", "L3")
def evict_until_the_total_suffices(lanes: Lanes, wanted: Sequence[int], evict: Evict) -> None:
    """Eviction stops when all lanes together have as many free pages as are wanted."""
    while sum(map(lanes.free_pages, range(lanes.grid.world_size))) < len(wanted):
        evicted = evict(next(iter(lanes.shortage(wanted))))
        if not evicted:
            return
        lanes.free(evicted)


@mutant(allocator.make_room, "one-eviction", "L3")
def evict_once(right: Right, lanes: Lanes, wanted: Sequence[int], evict: Evict) -> None:
    """One victim has to do: a request is refused though more could be evicted."""
    victims = iter([evict])
    right(lanes, wanted, lambda lane: next(victims, lambda lane: ())(lane))


@mutant(allocator.make_room, "eviction-in-vain", "L3")
def evict_before_counting(right: Right, lanes: Lanes, wanted: Sequence[int], evict: Evict) -> None:
    """The tree is emptied for a request that what others hold leaves no room for."""
    for lane in lanes.shortage(wanted):
        while lane in lanes.shortage(wanted) and (evicted := evict(lane)):
            lanes.free(evicted)
    right(lanes, wanted, evict)


@mutant(allocator.make_room, "evicted-pages-lost", "L1", "L3")
def evicted_but_not_freed(right: Right, lanes: Lanes, wanted: Sequence[int], evict: Evict) -> None:
    """Only pages of the lane asked for are freed: others of the same victim belong to nobody."""
    W = lanes.grid.world_size
    right(lanes, wanted, lambda lane: [page for page in evict(lane) if page % W == lane])
