"""Laws S1, S2, S3, S8: how one request is cut."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import ZIGZAGS, extents, grids, plans
from refmodel.collectives import all_gather_rows, rank_and_size
from refmodel.layout import split
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from sim.world import World


@proves("S1")
@given(plans(splits=ZIGZAGS))
def test_segments_partition_each_extent(plan: Plan) -> None:
    for extent, bounds in zip(plan.extents, plan.bounds, strict=True):
        assert len(bounds) == 2 * plan.grid.world_size + 1
        covered = [p for start, stop in pairwise(bounds) for p in range(start, stop)]
        assert covered == list(range(extent.prefix, extent.end))


@proves("S1")
@given(plans())
def test_every_row_of_the_batch_is_on_exactly_one_rank(plan: Plan) -> None:
    held = sorted(row for rank in range(plan.grid.world_size) for row in plan.rows(rank).tolist())
    assert held == list(range(plan.num_rows))


@proves("S1")
@given(plans(splits=(Split.TOKEN_BALANCED,)))
def test_token_balanced_segments_differ_by_at_most_one_token(plan: Plan) -> None:
    for bounds in plan.bounds:
        sizes = [stop - start for start, stop in pairwise(bounds)]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@proves("S2")
@given(plans(splits=(Split.PAGE_ALIGNED,), padded=False))
def test_every_page_position_has_one_compute_rank(plan: Plan) -> None:
    P, W = plan.grid.page_size, plan.grid.world_size
    pages = plan.positions // P
    for request in range(len(plan.extents)):
        mine = plan.request_of_row == request
        ranks_of_page: dict[int, set[int]] = {}
        for page, rank in zip(pages[mine].tolist(), plan.rank_of_row[mine].tolist(), strict=True):
            ranks_of_page.setdefault(page, set()).add(rank)
        assert all(len(ranks) == 1 for ranks in ranks_of_page.values())
        units = [sum(ranks == {rank} for ranks in ranks_of_page.values()) for rank in range(W)]
        assert max(units) - min(units) <= 1


@proves("S2")
@given(plans(splits=(Split.PAGE_ALIGNED,)))
def test_interior_bounds_are_absolute_page_multiples(plan: Plan) -> None:
    for extent, bounds in zip(plan.extents, plan.bounds, strict=True):
        interior = [b for b in bounds if extent.prefix < b < extent.end]
        assert all(b % plan.grid.page_size == 0 for b in interior)


@proves("S3")
@given(st.data())
def test_a_short_extent_keeps_its_actual_pages(data: st.DataObject) -> None:
    grid = data.draw(grids())
    extent = data.draw(extents(grid))
    plan = plan_batch([extent], grid, Split.PAGE_ALIGNED)
    P = grid.page_size
    # Counted one by one: the pages that hold a new token and that no cached token has opened.
    fresh = {p // P for p in range(extent.prefix, extent.end)} - {p // P for p in range(extent.prefix)}
    assert len(new_page_lanes(plan, 0)) == len(fresh)
    assert sum(plan.row_counts) == extent.tokens
    units = len(extent.page_positions(P))
    assert sum(count > 0 for count in plan.row_counts) == min(units, grid.world_size)


@proves("S3")
@given(st.data())
def test_no_extent_is_too_short_for_the_page_aligned_split(data: st.DataObject) -> None:
    grid = data.draw(grids())
    batch = data.draw(st.lists(extents(grid), min_size=1, max_size=3))
    expected = None if grid.world_size == 1 else Split.PAGE_ALIGNED
    assert split.choose_split(grid, batch, shared_kv=True) is expected


def _split_of_rank(group: dist.ProcessGroup, batch: list[Extent], page_size: int, shared: bool) -> list[int]:
    """Each rank decides for itself; all decisions, and the plan's row counts, side by side."""
    rank, size = rank_and_size(group)
    choice = split.choose_split(Grid(size, page_size), batch, shared_kv=shared)
    counts = [-1]
    if choice is not None:
        counts = list(plan_batch(batch, Grid(size, page_size), choice).row_counts)
    digest = hash((choice and choice.value, tuple(counts), size)) % 2**31
    world = dist.get_world_size(group)
    mine = torch.tensor([digest if rank == dist.get_rank(group) else -1])
    return all_gather_rows(mine, [1] * world, group=group, site="decision").tolist()


@proves("S8")
@settings(max_examples=25)
@given(st.data())
def test_all_ranks_decide_alike(data: st.DataObject) -> None:
    grid = data.draw(grids())
    batch = data.draw(st.lists(extents(grid), min_size=1, max_size=2))
    shared = data.draw(st.booleans())
    world = World.lockstep(grid.world_size)
    decisions = world.run(_split_of_rank, batch, grid.page_size, shared)[0]
    assert len(decisions) == grid.world_size
    choice = split.choose_split(grid, batch, shared_kv=shared)
    counts = list(plan_batch(batch, grid, choice).row_counts) if choice else [-1]
    assert set(decisions) == {hash((choice and choice.value, tuple(counts), grid.world_size)) % 2**31}


@proves("S1", "S3")
@given(st.data())
def test_ranks_and_segments_are_inverse(data: st.DataObject) -> None:
    W = data.draw(st.sampled_from(range(1, 9)))
    rotation = data.draw(st.integers(0, W - 1))
    owned = [s for rank in range(W) for s in split.rank_segments(rank, W, rotation)]
    assert sorted(owned) == list(range(2 * W))
    for rank in range(W):
        assert all(split.segment_rank(s, W, rotation) == rank for s in split.rank_segments(rank, W, rotation))
