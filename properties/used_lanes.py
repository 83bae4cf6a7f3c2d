"""Lanes in use: some pages held by requests, some cached, some free again."""

from __future__ import annotations

from hypothesis import strategies as st

from refmodel.layout.geometry import Grid
from refmodel.serving.lanes import Lanes, PageState

FREE, HELD, CACHED = PageState
small_grids = st.builds(Grid, st.integers(1, 4), st.integers(1, 4))


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
