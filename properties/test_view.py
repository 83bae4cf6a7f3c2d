"""Laws V1, V2, V7: the full view, assembled from the pure parts of all ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import Placed, place, placed
from refmodel.layout.geometry import coverage, num_pages
from refmodel.layout.ownership import current_slots, to_physical
from refmodel.storage.baseline import empty_replica
from refmodel.storage.formats import FORMATS, RowFormat, row_format
from refmodel.storage.identity import Cache, pack
from refmodel.storage.shard import Shard, empty_shard
from refmodel.storage.view import assemble, contribute, view_layout

formats = st.sampled_from(FORMATS).map(lambda name: row_format(name, 1 if name == "tag" else 5))


def truth(batch: Placed, cache: Cache) -> list[torch.Tensor]:
    """Identities of all valid tokens of each request."""
    return [
        pack(request=i, position=torch.arange(end), layer=0, cache=cache, write=0)
        for i, end in enumerate(batch.valid)
    ]


def filled_shards(
    batch: Placed, fmt: RowFormat, cache: Cache, poison: float | int | None = None
) -> list[Shard]:
    """Shards of all ranks that hold every valid token of the batch."""
    grid = batch.plan.grid
    shards = [
        empty_shard(grid, rank, fmt, batch.local_pages, poison=poison) for rank in range(grid.world_size)
    ]
    for table, tags in zip(batch.tables, truth(batch, cache), strict=True):
        slots = table.slots(torch.arange(len(tags)))
        for shard in shards:
            shard.write(to_physical(slots, shard.rank, grid), fmt.encode(tags))
    return shards


def view_of(batch: Placed, shards: list[Shard]) -> torch.Tensor:
    """contribute → exchange → assemble, the exchange being a concatenation."""
    layout = view_layout(batch.tables, batch.valid, batch.plan.grid)
    return assemble(torch.cat([contribute(shard, layout) for shard in shards]), layout)


@proves("V1")
@given(placed(max_page=16), formats, st.sampled_from([Cache.KV, Cache.INDEX]))
def test_the_view_is_the_replicated_baseline_byte_for_byte(
    batch: Placed, fmt: RowFormat, cache: Cache
) -> None:
    reached.note(batch.plan)
    replica = empty_replica(batch.plan.grid.page_size, fmt, batch.local_pages * batch.plan.grid.world_size)
    for table, tags in zip(batch.tables, truth(batch, cache), strict=True):
        replica.write(table.pages, 0, fmt.encode(tags))
    whole = replica.view([(t.pages, end) for t, end in zip(batch.tables, batch.valid, strict=True)])
    view = view_of(batch, filled_shards(batch, fmt, cache))
    assert torch.equal(view.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(view, fmt.encode(torch.cat(truth(batch, cache))))


@proves("V2")
@given(placed(max_page=16), st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_slots_past_the_valid_length_change_nothing(batch: Placed, one: int, other: int) -> None:
    fmt = row_format("tag")
    views = [view_of(batch, filled_shards(batch, fmt, Cache.KV, poison)) for poison in (one, other)]
    assert torch.equal(*views)
    assert len(views[0]) == sum(batch.valid)


@proves("V7")
@given(placed(max_page=16), formats, st.integers(0, 2**16))
def test_scrambling_page_ids_changes_nothing(batch: Placed, fmt: RowFormat, seed: int) -> None:
    W = batch.plan.grid.world_size
    elsewhere = place(batch.plan, lambda request: batch.tables[request].pages % W, seed)
    here, there = (view_of(b, filled_shards(b, fmt, Cache.KV)) for b in (batch, elsewhere))
    assert torch.equal(here, there)


@proves("V7")
@given(placed(max_page=16), st.integers(0, 2**16))
def test_any_placement_gives_the_same_view(batch: Placed, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grid = batch.plan.grid

    def any_lane(request: int) -> torch.Tensor:
        pages = num_pages(batch.valid[request], grid.page_size)
        return torch.randint(grid.world_size, (pages,), generator=generator)

    elsewhere = place(batch.plan, any_lane, seed)
    here, there = (view_of(b, filled_shards(b, row_format("tag"), Cache.KV)) for b in (batch, elsewhere))
    assert torch.equal(here, there)


@proves("V1", "V2")
@given(placed(max_page=16))
def test_the_compact_table_finds_valid_slots_and_no_others(batch: Placed) -> None:
    grid, fmt = batch.plan.grid, row_format("tag")
    layout = view_layout(batch.tables, batch.valid, grid)
    view = view_of(batch, filled_shards(batch, fmt, Cache.KV))
    for request, (table, tags) in enumerate(zip(batch.tables, truth(batch, Cache.KV), strict=True)):
        slots = table.slots(torch.arange(coverage(len(tags), grid.page_size)))
        rows = layout.rows_of(request, slots)
        assert torch.equal(view[rows[: len(tags)], 0], tags)
        assert rows[len(tags) :].tolist() == [-1] * (len(slots) - len(tags))
        foreign = torch.tensor(
            [-1, 0, *(int(t.pages[0]) * grid.page_size for t in batch.tables if t is not table)]
        )
        assert layout.rows_of(request, foreign).tolist() == [-1] * len(foreign)


@proves("O1")
@given(placed(max_page=16))
def test_every_cache_lies_in_the_same_slots(batch: Placed) -> None:
    grid = batch.plan.grid
    slots = current_slots(batch.plan, batch.tables)
    kv = filled_shards(batch, row_format("tag"), Cache.KV)
    index = filled_shards(batch, row_format("f32", 3), Cache.INDEX)
    for mla, keys in zip(kv, index, strict=True):
        assert torch.equal(mla.rows[:, 0] >= 0, ~keys.rows.isnan().all(1))
        mine = to_physical(slots, mla.rank, grid)
        real = mine >= grid.page_size
        assert bool((mla.rows[mine[real], 0] >= 0).all())
