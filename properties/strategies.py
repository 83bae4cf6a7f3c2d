"""What properties draw: sizes, extents, plans and placed batches, biased to the places that hurt.

Those are multiples of P give or take one, around 2W page units, fewer pages than ranks, prefixes that end
inside a page, batches with very unequal requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.ownership import PageTable, logical_page
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.storage.formats import PRECISIONS, TAG, index_format, mla_format

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)
PAGE_SIZES = (1, 2, 3, 4, 16, 64)
ZIGZAGS = (Split.TOKEN_BALANCED, Split.PAGE_ALIGNED)
# Sizes that divide nothing: fields of a page need not be aligned to their elements.
MLA_FORMATS = tuple(mla_format(precision, latent=6, rope=3, tile=2) for precision in PRECISIONS)
INDEX_FORMATS = tuple(index_format(precision, 5) for precision in PRECISIONS)
FORMATS = (TAG, *MLA_FORMATS, *INDEX_FORMATS)


def grids(*, max_world: int = 8, max_page: int = 64) -> st.SearchStrategy[Grid]:
    """W and P, small ones first."""
    return st.builds(
        Grid,
        st.sampled_from([w for w in WORLD_SIZES if w <= max_world]),
        st.sampled_from([p for p in PAGE_SIZES if p <= max_page]),
    )


def near(places: list[int], *, at_least: int) -> st.SearchStrategy[int]:
    """Integers within one of the places given."""
    around = sorted({place + d for place in places for d in (-1, 0, 1) if place + d >= at_least})
    return st.sampled_from(around)


def token_counts(grid: Grid) -> st.SearchStrategy[int]:
    """New tokens of an extent, ≥ 1: around page multiples, W and 2W units, and anything up to 3W pages."""
    W, P = grid.world_size, grid.page_size
    edges = [1, P, 2 * P, W, 2 * W, W * P, (W + 1) * P, 2 * W * P, 4 * W * P]
    return near(edges, at_least=1) | st.integers(1, 3 * W * P)


def prefixes(grid: Grid) -> st.SearchStrategy[int]:
    """Tokens in cache: none, page multiples give or take one, or anything up to three pages."""
    P = grid.page_size
    return st.just(0) | near([P, 2 * P], at_least=0) | st.integers(0, 3 * P)


@st.composite
def extents(draw: st.DrawFn, grid: Grid) -> Extent:
    """One extent on a grid."""
    return Extent(draw(prefixes(grid)), draw(token_counts(grid)))


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    splits: tuple[Split, ...] = tuple(Split),
    max_requests: int = 3,
    max_world: int = 8,
    max_page: int = 64,
    padded: bool = True,
    prefixed: bool = True,
) -> Plan:
    """A planned batch: one to ``max_requests`` extents, rotations, padding rows."""
    grid = draw(grids(max_world=max_world, max_page=max_page))
    split = draw(st.sampled_from(splits))
    extent = extents(grid) if prefixed else st.builds(Extent, st.just(0), token_counts(grid))
    batch = draw(st.lists(extent, min_size=1, max_size=max_requests))
    rotation = st.just(0) if split is Split.ROUND_ROBIN else st.integers(0, grid.world_size - 1)
    return plan_batch(
        batch,
        grid,
        split,
        rotations=[draw(rotation) for _ in batch],
        padding=draw(st.integers(0, 2 * grid.world_size + 1)) if padded else 0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A planned batch with its pages: a page table for each request, and room for all of them."""

    plan: Plan
    tables: tuple[PageTable, ...]
    local_pages: int  # of every rank, dummy included

    @property
    def valid(self) -> tuple[int, ...]:
        return tuple(extent.end for extent in self.plan.extents)


def place(plan: Plan, lane_of_page: Callable[[int], torch.Tensor], seed: int) -> Placed:
    """Give every request pages from the lanes ``lane_of_page(request)`` names, ids scrambled by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    lanes = [lane_of_page(request) for request in range(len(plan.extents))]
    local_pages = 1 + max(1, sum(len(lane) for lane in lanes))
    free = [
        (1 + torch.randperm(local_pages - 1, generator=generator)).tolist()
        for _ in range(plan.grid.world_size)
    ]
    tables = tuple(
        PageTable(
            torch.tensor(
                [logical_page(free[lane].pop(), lane, plan.grid.world_size) for lane in request.tolist()],
                dtype=torch.int64,
            ),
            plan.grid,
            f"r{i}",
        )
        for i, request in enumerate(lanes)
    )
    return Placed(plan, tables, local_pages)


@st.composite
def placed(draw: st.DrawFn, /, *, compute_owner: bool | None = None, **limits: Any) -> Placed:
    """A plan with page tables; ``limits`` go to :func:`plans`.

    New pages come from their compute ranks' lanes (O4), or from any lane.

    Pages already in cache always come from any lane.
    """
    plan = draw(plans(**limits))
    follow_plan = draw(st.booleans()) if compute_owner is None else compute_owner
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    P, W = plan.grid.page_size, plan.grid.world_size

    def lanes(request: int) -> torch.Tensor:
        extent = plan.extents[request]
        any_lane = torch.randint(W, (num_pages(extent.end, P),), generator=generator)
        if not follow_plan:
            return any_lane
        return torch.cat([any_lane[: num_pages(extent.prefix, P)], new_page_lanes(plan, request)])

    return place(plan, lanes, seed)
