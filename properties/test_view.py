"""Laws V1, V2, V7: the full view, assembled from the pure parts of all ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import FORMATS, MLA_FORMATS, Placed, place, placed
from refmodel.layout.geometry import coverage, num_pages
from refmodel.layout.ownership import current_slots, to_physical
from refmodel.layout.rows import pad_rows
from refmodel.storage.baseline import empty_replica
from refmodel.storage.formats import TAG, Format
from refmodel.storage.identity import Cache, pack
from refmodel.storage.shard import Shard, destinations, empty_shard
from refmodel.storage.view import assemble, contribute, view_index, view_layout

formats = st.sampled_from(FORMATS)
bytes_ = st.integers(0, 255)


def truth(batch: Placed, cache: Cache) -> list[torch.Tensor]:
    """Identities of all valid tokens of each request."""
    return [
        pack(request=i, position=torch.arange(end), layer=0, cache=cache, write=0)
        for i, end in enumerate(batch.valid)
    ]


def filled_shards(batch: Placed, fmt: Format, cache: Cache, poison: int | None = None) -> list[Shard]:
    """Shards of all ranks that hold every valid token of the batch."""
    grid = batch.plan.grid
    shards = [
        empty_shard(grid, rank, fmt, batch.local_pages, poison=poison) for rank in range(grid.world_size)
    ]
    for table, tags in zip(batch.tables, truth(batch, cache), strict=True):
        slots = table.slots(torch.arange(len(tags)))
        for shard in shards:
            physical = to_physical(slots, shard.rank, grid)
            shard.write(destinations(physical, shard.num_slots, shard.rank), fmt.encode(tags))
    return shards


def view_of(batch: Placed, shards: list[Shard]) -> torch.Tensor:
    """contribute → exchange → assemble, the exchange being a concatenation of even buffers."""
    layout = view_layout(batch.tables, batch.valid, batch.plan.grid)
    parts = [view_index(layout, shard.rank, local_pages=batch.local_pages) for shard in shards]
    buffers = [
        pad_rows(contribute(shard, index), max(layout.page_counts))
        for shard, index in zip(shards, parts, strict=True)
    ]
    return assemble(torch.cat(buffers), parts[0], shards[0].format)


@proves("V1")
@given(placed(max_page=16), formats, st.sampled_from([Cache.KV, Cache.INDEX]))
def test_the_view_is_the_replicated_baseline_byte_for_byte(batch: Placed, fmt: Format, cache: Cache) -> None:
    reached.note(batch.plan)
    replica = empty_replica(batch.plan.grid.page_size, fmt, batch.local_pages * batch.plan.grid.world_size)
    for table, tags in zip(batch.tables, truth(batch, cache), strict=True):
        replica.write(table.pages, 0, fmt.encode(tags))
    whole = replica.view([(t.pages, end) for t, end in zip(batch.tables, batch.valid, strict=True)])
    view = view_of(batch, filled_shards(batch, fmt, cache))
    assert torch.equal(view, whole)
    assert torch.equal(view, fmt.encode(torch.cat(truth(batch, cache))))


@proves("V2")
@given(placed(max_page=16), formats, bytes_, bytes_)
def test_slots_past_the_valid_length_change_nothing(batch: Placed, fmt: Format, one: int, other: int) -> None:
    views = [view_of(batch, filled_shards(batch, fmt, Cache.KV, poison)) for poison in (one, other)]
    assert torch.equal(*views)
    assert len(views[0]) == sum(batch.valid)


@proves("V7")
@given(placed(max_page=16), formats, st.integers(0, 2**16))
def test_scrambling_page_ids_changes_nothing(batch: Placed, fmt: Format, seed: int) -> None:
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
    here, there = (view_of(b, filled_shards(b, TAG, Cache.KV)) for b in (batch, elsewhere))
    assert torch.equal(here, there)


@proves("V1", "V2", "V3")
@given(placed(max_page=16))
def test_the_compact_table_finds_valid_slots_and_no_others(batch: Placed) -> None:
    grid = batch.plan.grid
    layout = view_layout(batch.tables, batch.valid, grid)
    view = TAG.unpack(view_of(batch, filled_shards(batch, TAG, Cache.KV)))[:, 0]
    for request, (table, tags) in enumerate(zip(batch.tables, truth(batch, Cache.KV), strict=True)):
        compact = layout.compact(request)
        slots = table.slots(torch.arange(coverage(len(tags), grid.page_size)))
        rows = compact.rows_of(slots)
        assert torch.equal(view[rows[: len(tags)]], tags)
        assert rows[len(tags) :].tolist() == [-1] * (len(slots) - len(tags))
        foreign = torch.tensor(
            [-1, 0, *(int(t.pages[0]) * grid.page_size for t in batch.tables if t is not table)]
        )
        assert compact.rows_of(foreign).tolist() == [-1] * len(foreign)


@proves("O1")
@given(placed(max_page=16), st.sampled_from(MLA_FORMATS))
def test_every_cache_lies_in_the_same_slots(batch: Placed, fmt: Format) -> None:
    grid = batch.plan.grid
    slots = current_slots(batch.plan, batch.tables)
    kv, index = (filled_shards(batch, f, Cache.KV) for f in (TAG, fmt))
    for tags, rows in zip(kv, index, strict=True):
        written = TAG.unpack(tags.rows)[:, 0] >= 0
        assert torch.equal(written, (rows.rows != 255).any(1))
        mine = to_physical(slots, tags.rank, grid)
        assert bool(written[mine[mine >= grid.page_size]].all())
