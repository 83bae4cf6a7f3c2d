"""Wrong owners, remaps, lanes and writes."""

from __future__ import annotations

from dataclasses import replace

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout import ownership, placement
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import NO_SLOT, PageTable, current_slots, to_physical
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.storage import shard as storage
from refmodel.storage import write
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Destinations, Shard, destinations
from refmodel.storage.traffic import Traffic
from refmodel.storage.write import WritePath, WriteVerdict


@mutant(ownership.to_physical, "own-01", "O2", source="reported in sglang#36886")
def group_wide_slots_used_raw(slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    """The owner is right, but the group-wide slot is used as it is on the rank's own buffer."""
    mine = (slots != NO_SLOT) & (slots // grid.page_size % grid.world_size == rank)
    return torch.where(mine, slots, NO_SLOT)


@mutant(PageTable.slots, "own-02", "O2", source="reported in sglang#37735")
def widened_pages_with_global_lengths(self: PageTable, positions: torch.Tensor) -> torch.Tensor:
    """Page positions count widened pages of W · P tokens, lengths count tokens: slots collide."""
    P, W = self.grid.page_size, self.grid.world_size
    return self.pages[positions // (P * W)] * P + positions % P


@mutant(ownership.to_physical, "own-03", "O1", "O2", source="reported in vllm#51031")
def owner_by_a_stale_page_size(slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    """The owner comes from the block size before it was halved for the kernel."""
    physical = slots // grid.page_size // grid.world_size * grid.page_size + slots % grid.page_size
    stale_owner = slots // (2 * grid.page_size) % grid.world_size
    return torch.where((slots != NO_SLOT) & (stale_owner == rank), physical, NO_SLOT)


@mutant(placement.page_lanes, "own-04", "O6", source="reported in vllm#54679")
def every_lane_takes_every_page(right: Right, plan: Plan, request: int) -> torch.Tensor:
    """Each lane allocates as if a page held P tokens of its own rank: W pages where one is enough."""
    lanes = right(plan, request)
    return torch.arange(plan.grid.world_size).repeat(len(lanes))


@mutant(write.write_verdict, "own-05", "O5", source="derived from the fork's history")
def head_page_forgotten(right: Right, plan: Plan, slots: torch.Tensor) -> WriteVerdict:
    """Direct write although the partly filled head page belongs to another rank."""
    if plan.split is not Split.PAGE_ALIGNED:
        return right(plan, slots)
    P = plan.grid.page_size
    prefixes = torch.tensor([*(extent.prefix for extent in plan.extents), 0])
    head = plan.positions // P < -(-prefixes[plan.request_of_row] // P)
    owners = torch.where(head, plan.rank_of_row, slots // P % plan.grid.world_size)
    pages = owners + plan.grid.world_size  # any page of that owner; only owners matter to the verdict
    return right(plan, pages * P)


@mutant(write.write_verdict, "direct-by-first-row", "O5")
def only_the_first_row_looked_at(right: Right, plan: Plan, slots: torch.Tensor) -> WriteVerdict:
    """Direct write as soon as the first row is at home."""
    page = int(slots[0]) // plan.grid.page_size
    if page % plan.grid.world_size == int(plan.rank_of_row[0]):
        return WriteVerdict(WritePath.DIRECT, "the first row is at home")
    return right(plan, slots)


@mutant(write.write_verdict, "direct-whenever-owned", "O5")
def direct_for_any_split(plan: Plan, slots: torch.Tensor) -> WriteVerdict:
    """The verdict forgets that the plan must be page-aligned."""
    owners = slots // plan.grid.page_size % plan.grid.world_size
    path = WritePath.DIRECT if bool((owners == plan.rank_of_row).all()) else WritePath.GATHERED
    return WriteVerdict(path, "owners compared, split ignored")


@mutant(ownership.owner, "owner-by-local-page", "O1")
def owner_from_the_local_page(pages: torch.Tensor, world_size: int) -> torch.Tensor:
    """Owners go by runs of W pages: local page numbers of different pages coincide."""
    return pages // world_size % world_size


@mutant(Traffic._write, "own-06", "O1", source="derived from the fork's history")
def a_remap_for_each_cache(
    right: Right, self: Traffic, shard: Shard, cache: Cache, rows: torch.Tensor
) -> None:
    """Each layer and cache makes a remap of its own; that of the index takes the table one page off."""
    passage, plan, rank = self.passage, self.passage.plan, self.passage.rank
    tables = passage.view.tables
    if cache is Cache.INDEX:
        tables = tuple(replace(table, pages=table.pages.roll(1)) for table in tables)
    physical = to_physical(current_slots(plan, tables), rank, plan.grid)
    written = plan.take(physical, rank) if passage.write.path is WritePath.DIRECT else physical
    remapped = replace(passage, writes=destinations(written, shard.num_slots, rank))
    right(Traffic(remapped, self.layers, self.group), shard, cache, rows)


@mutant(storage.destinations, "minus-one-is-an-index", "O3")
def minus_one_written(
    physical: torch.Tensor, num_slots: int, rank: int, *, device: torch.device | None = None
) -> Destinations:
    """−1 is not masked: it indexes the last slot of the shard."""
    return Destinations(torch.arange(len(physical), device=device), physical.to(device or "cpu"))


@mutant(Shard.write, "write-what-you-computed", "O3")
def foreign_rows_written_too(right: Right, self: Shard, to: Destinations, packed: torch.Tensor) -> None:
    """Slots of other ranks are written too, at local page 1 instead of being masked."""
    slots = torch.full((len(packed),), self.grid.page_size)
    slots[to.rows] = to.slots
    right(self, Destinations(torch.arange(len(packed)), slots), packed)


@mutant(placement.page_lanes, "rotation-forgotten", "O4")
def lanes_without_rotation(right: Right, plan: Plan, request: int) -> torch.Tensor:
    """Pages come from the lanes of the unrotated split."""
    return (right(plan, request) - plan.rotations[request]) % plan.grid.world_size


@mutant(placement.page_lanes, "split-08", "S3", "O6", source="rejected in the fork's history")
def short_suffix_padded(right: Right, plan: Plan, request: int) -> torch.Tensor:
    """A short suffix is padded to W pages: a tail of one token takes a page of every lane."""
    lanes = right(plan, request)
    missing = max(0, plan.grid.world_size - len(lanes))
    return torch.cat([lanes, torch.arange(missing)])


@mutant(placement.page_lanes, "one-lane", "O6")
def all_pages_in_one_lane(right: Right, plan: Plan, request: int) -> torch.Tensor:
    """All pages of an extent come from the lane of its first page."""
    lanes = right(plan, request)
    return torch.full_like(lanes, int(lanes[0]))
