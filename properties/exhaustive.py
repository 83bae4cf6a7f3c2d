"""All small cases, enumerated: every extent with P ≤ 4, W ≤ 8, prefix ≤ 2P + 1, tokens ≤ 4WP + 2.

Small enough to finish in seconds, large enough to hold every way a page, a segment and a rank can meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from properties.proofs import proves
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import (
    Split,
    page_aligned_bounds,
    segment_rank,
    token_balanced_bounds,
)

GRIDS = [Grid(W, P) for P in range(1, 5) for W in range(1, 9)]


def small_extents(grid: Grid) -> Iterator[Extent]:
    """Every extent of the enumeration on one grid."""
    for prefix in range(2 * grid.page_size + 2):
        for tokens in range(1, 4 * grid.world_size * grid.page_size + 3):
            yield Extent(prefix, tokens)


def _name(grid: Grid) -> str:
    return f"W{grid.world_size}-P{grid.page_size}"


@proves("S1", "S2", "S3", "O6")
@pytest.mark.parametrize("grid", GRIDS, ids=_name)
def test_all_page_aligned_segments(grid: Grid) -> None:
    W, P = grid.world_size, grid.page_size
    for extent in small_extents(grid):
        bounds = page_aligned_bounds(extent, grid)
        assert (bounds[0], bounds[-1]) == (extent.prefix, extent.end)
        assert all(a <= b for a, b in pairwise(bounds))
        assert all(b % P == 0 for b in bounds if extent.prefix < b < extent.end)
        units = np.zeros(W, dtype=int)
        for i, (a, b) in enumerate(pairwise(bounds)):
            units[segment_rank(i, W)] += -(-b // P) - a // P if b > a else 0
        total = -(-extent.end // P) - extent.prefix // P
        assert units.sum() == total
        assert units.max() - units.min() <= 1
        assert units.max() <= -(-total // W)


@proves("S1")
@pytest.mark.parametrize("grid", GRIDS, ids=_name)
def test_all_token_balanced_segments(grid: Grid) -> None:
    for extent in small_extents(grid):
        bounds = token_balanced_bounds(extent, grid)
        sizes = [b - a for a, b in pairwise(bounds)]
        assert (bounds[0], bounds[-1]) == (extent.prefix, extent.end)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@proves("S4", "S5", "S6", "S7", "O4")
@pytest.mark.parametrize("grid", GRIDS, ids=_name)
def test_all_plans(grid: Grid) -> None:
    W, P = grid.world_size, grid.page_size
    for extent in small_extents(grid):
        plan = plan_batch([extent], grid, Split.PAGE_ALIGNED)
        order = plan.gather_order.numpy()
        assert np.array_equal(np.sort(order), np.arange(extent.tokens))
        ks, ke = plan.visibility(plan.gather_order)
        assert np.array_equal((ke - ks).numpy(), order + extent.prefix + 1)
        # A rank's rows are two runs of consecutive rows, prev then next, cut between them.
        starts = np.cumsum([0, *plan.row_counts[:-1]])
        for rank, start in enumerate(starts):
            prev, following = plan.halves(rank)
            assert prev.valid_rows + following.valid_rows == plan.row_counts[rank]
            for half, first in ((prev, start), (following, start + prev.valid_rows)):
                rows = order[first : first + half.valid_rows]
                assert half.valid_rows == 0 or rows[-1] - rows[0] == half.valid_rows - 1
        # Every page that the extent opens comes from the lane of the rank that computes its rows.
        lanes = new_page_lanes(plan, 0).numpy()
        page = plan.positions.numpy() // P - -(-extent.prefix // P)
        assert np.array_equal(lanes[page[page >= 0]], plan.rank_of_row.numpy()[page >= 0])
        assert len(lanes) == page.max() + 1 <= 4 * W + 3
