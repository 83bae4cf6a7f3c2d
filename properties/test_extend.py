"""Law L2: the pages that an extent takes, and the slots that it fills."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import extents, grids, plans
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import PageTable
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan
from refmodel.serving.extend import extend_slots, new_pages
from refmodel.serving.lanes import Lanes


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
