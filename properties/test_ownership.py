"""Laws O1–O6: who owns a page, who writes it, and how much each lane holds."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import Placed, grids, placed, plans
from refmodel.errors import FallbackWarning, InvalidInput
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import (
    PageTable,
    current_slots,
    local_page,
    logical_page,
    owner,
    to_physical,
)
from refmodel.layout.placement import new_page_lanes, page_lanes
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.storage.formats import TAG
from refmodel.storage.passage import open_passage
from refmodel.storage.shard import destinations, empty_shard
from refmodel.storage.write import WritePath, write_verdict


@proves("O1")
@given(grids(), st.integers(0, 2**40))
def test_owner_and_local_page_name_one_page(grid: Grid, page: int) -> None:
    W = grid.world_size
    assert logical_page(local_page(page, W), owner(page, W), W) == page
    slots = page * grid.page_size + torch.arange(grid.page_size)
    owners = [rank for rank in range(W) if bool((to_physical(slots, rank, grid) >= 0).all())]
    somewhere = [rank for rank in range(W) if bool((to_physical(slots, rank, grid) >= 0).any())]
    assert owners == somewhere == [page % W]


@proves("O1", "O2")
@given(grids(), st.integers(2, 9))
def test_remap_is_a_bijection_onto_the_shards(grid: Grid, local_pages: int) -> None:
    W, P = grid.world_size, grid.page_size
    slots = torch.arange(W * local_pages * P)
    places: dict[tuple[int, int], int] = {}
    for rank in range(W):
        for slot, physical in enumerate(to_physical(slots, rank, grid).tolist()):
            if physical >= 0:
                assert places.setdefault((rank, physical), slot) == slot
                assert physical % P == slot % P
    assert sorted(places.values()) == slots.tolist()
    assert set(places) == {(rank, s) for rank in range(W) for s in range(local_pages * P)}


@proves("O2")
@given(grids(), st.integers(0, 7), st.lists(st.integers(-1, 10**6), max_size=20))
def test_remap_follows_the_formula_and_keeps_no_slot(grid: Grid, rank: int, slots: list[int]) -> None:
    rank %= grid.world_size
    P, W = grid.page_size, grid.world_size
    expected = [s // P // W * P + s % P if s >= 0 and s // P % W == rank else -1 for s in slots]
    assert to_physical(torch.tensor(slots, dtype=torch.int64), rank, grid).tolist() == expected


@proves("O2")
@given(placed(max_page=16))
def test_every_position_of_a_request_has_a_slot_of_its_own(batch: Placed) -> None:
    P = batch.plan.grid.page_size
    for table, valid in zip(batch.tables, batch.valid, strict=True):
        slots = table.slots(torch.arange(valid)).tolist()
        assert slots == [int(table.pages[p // P]) * P + p % P for p in range(valid)]
        assert len(set(slots)) == valid


@proves("O3")
@given(placed(), st.integers(0, 255))
def test_a_rank_writes_only_what_it_owns_and_poison_survives(batch: Placed, poison: int) -> None:
    plan, grid = batch.plan, batch.plan.grid
    slots = current_slots(plan, batch.tables)
    tags = torch.arange(len(slots)) + 2**30
    for rank in range(grid.world_size):
        shard = empty_shard(grid, rank, TAG, batch.local_pages, poison=poison)
        to = destinations(to_physical(slots, rank, grid), shard.num_slots, rank)
        shard.write(to, TAG.encode(tags))
        written = dict(zip(slots.tolist(), tags.tolist(), strict=True))
        untouched = int.from_bytes([poison] * 8, "little", signed=True)
        stored = TAG.unpack(shard.rows)[:, 0].tolist()
        for physical in range(grid.page_size, shard.num_slots):  # behind the dummy page
            page = physical // grid.page_size * grid.world_size + rank
            logical = page * grid.page_size + physical % grid.page_size
            assert stored[physical] == written.get(logical, untouched)


@proves("O4")
@given(plans(splits=(Split.PAGE_ALIGNED,), padded=False))
def test_pages_come_from_the_lane_of_their_compute_rank(plan: Plan) -> None:
    P = plan.grid.page_size
    for request, extent in enumerate(plan.extents):
        mine = (plan.request_of_row == request).nonzero().flatten()
        computed_by = {int(plan.positions[row]) // P: int(plan.rank_of_row[row]) for row in mine}
        lanes = page_lanes(plan, request).tolist()
        assert dict(zip(extent.page_positions(P), lanes, strict=True)) == computed_by
        fresh = [page for page in computed_by if page * P >= extent.prefix]
        assert new_page_lanes(plan, request).tolist() == [computed_by[page] for page in fresh]


@proves("O4", "O5")
@given(placed(compute_owner=True, splits=(Split.PAGE_ALIGNED,), max_requests=2))
def test_compute_owner_placement_allows_the_direct_write_but_for_head_pages(batch: Placed) -> None:
    plan = batch.plan
    verdict = write_verdict(plan, current_slots(plan, batch.tables))
    reached.note(plan, verdict)
    P, W = plan.grid.page_size, plan.grid.world_size
    heads_at_home = [
        int(table.pages[extent.prefix // P]) % W == int(page_lanes(plan, request)[0])
        for request, (extent, table) in enumerate(zip(plan.extents, batch.tables, strict=True))
        if extent.prefix % P
    ]
    assert (verdict.path is WritePath.DIRECT) == all(heads_at_home)


@proves("O5")
@given(placed())
def test_direct_write_is_allowed_exactly_when_every_row_is_at_home(batch: Placed) -> None:
    plan, grid = batch.plan, batch.plan.grid
    slots = current_slots(plan, batch.tables)
    verdict = write_verdict(plan, slots)
    reached.note(plan, verdict)
    at_home = all(
        bool((to_physical(plan.take(slots, rank), rank, grid) >= 0).all()) for rank in range(grid.world_size)
    )
    allowed = plan.split is Split.PAGE_ALIGNED and at_home
    assert (verdict.path is WritePath.DIRECT) == allowed
    passage = open_passage(plan, batch.tables, 0, local_pages=batch.local_pages)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert passage.warn() == (not allowed)
    assert [w.category for w in heard] == [FallbackWarning] * (not allowed)
    assert all(str(w.message).startswith("gathered write on all ranks: ") for w in heard)


@proves("O6")
@given(plans())
def test_an_extent_adds_at_most_its_share_of_pages_to_a_lane(plan: Plan) -> None:
    W, P = plan.grid.world_size, plan.grid.page_size
    for request, extent in enumerate(plan.extents):
        pages = {p // P for p in range(extent.prefix, extent.end)}
        added = Counter(new_page_lanes(plan, request).tolist())
        assert all(count <= -(-len(pages) // W) for count in added.values())
        assert set(added) <= set(range(W))


@pytest.mark.parametrize(
    ("pages", "message"),
    [([4, 3], "dummies.*page 3 at position 1"), ([4, 9, 4], "page 4 2 times"), ([-1], "page -1")],
)
def test_a_table_refuses_dummies_and_duplicates(pages: list[int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PageTable(torch.tensor(pages), Grid(4, 64), "a")


@pytest.mark.parametrize("physical", [-2, 128, 10**6])
def test_a_slot_out_of_range_is_refused(physical: int) -> None:
    with pytest.raises(InvalidInput, match="physical slot: expected −1 or 0 … 127"):
        destinations(torch.tensor([3, physical]), num_slots=128, rank=1)


def test_rows_of_another_format_are_refused_and_nothing_is_written() -> None:
    shard = empty_shard(Grid(2, 64), 1, TAG, 2)
    before = shard.pages.clone()
    with pytest.raises(InvalidInput, match="rows for a cache in format tag: expected 8 bytes a token"):
        shard.write(destinations(torch.tensor([3]), 128, 1), torch.zeros(1, 7, dtype=torch.uint8))
    assert torch.equal(shard.pages, before)


@pytest.mark.parametrize(("world_size", "page_size"), [(0, 64), (-1, 64), (4, 0), (4, -64), (True, 1)])
def test_a_grid_refuses_sizes_below_one(world_size: int, page_size: int) -> None:
    with pytest.raises(InvalidInput, match="expected an integer >= 1"):
        Grid(world_size, page_size)


@pytest.mark.parametrize(("prefix", "tokens"), [(-1, 4), (0, 0), (0, -3), (2, False)])
def test_an_extent_refuses_a_negative_prefix_and_no_tokens(prefix: int, tokens: int) -> None:
    with pytest.raises(InvalidInput, match="of an extent: expected an integer >="):
        Extent(prefix, tokens)
