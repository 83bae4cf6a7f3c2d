"""Law L3: room in every lane that is asked, made by eviction and never in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.refusals import refusal
from properties.used_lanes import CACHED, FREE, HELD, pages_in, used_lanes
from refmodel.layout.geometry import Grid
from refmodel.serving.lanes import Evict, Lanes, OutOfPages, PageState, make_room


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
