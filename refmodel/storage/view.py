"""The full dense view of a batch's KV, materialized from all shards (laws V1, V2, V7, V8).

In three parts: *contribute* (this rank's pages) → *exchange* (one collective) → *assemble* (position order,
tails masked). The index work is done once a forward, in :class:`ViewLayout`, for all caches and layers (O1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

from refmodel.collectives import all_gather_rows
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import NO_SLOT, PageTable, local_page, owner
from refmodel.storage.shard import Shard


@dataclass(frozen=True, eq=False)
class ViewLayout:
    """Which pages make the view, from which rank each comes, and where its rows end up."""

    grid: Grid
    tables: tuple[PageTable, ...]  # of each request
    valid: tuple[int, ...]  # tokens of each request in the view

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.valid):
            raise InvalidInput("view", expected="one length a page table", received=len(self.valid))
        for table, valid in zip(self.tables, self.valid, strict=True):
            table.require(valid)

    @cached_property
    def pages(self) -> torch.Tensor:
        """[pages] logical pages of all requests, in batch and position order."""
        P = self.grid.page_size
        used = zip(self.tables, self.valid, strict=True)
        return torch.cat([table.pages[: num_pages(valid, P)] for table, valid in used])

    @cached_property
    def rank_major(self) -> torch.Tensor:
        """[pages] indices into :attr:`pages`: those of rank 0, then those of rank 1, …"""
        return torch.argsort(owner(self.pages, self.grid.world_size), stable=True)

    @cached_property
    def page_counts(self) -> tuple[int, ...]:
        """[W] pages each rank contributes; zeros are normal."""
        owners = owner(self.pages, self.grid.world_size)
        return tuple(torch.bincount(owners, minlength=self.grid.world_size).tolist())

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """[requests + 1] first view row of each request: ``ks`` of its rows."""
        return tuple(accumulate(self.valid, initial=0))

    def local_pages(self, rank: int) -> torch.Tensor:
        """[page_counts[rank]] local pages that a rank contributes, in batch and position order."""
        mine = self.pages[owner(self.pages, self.grid.world_size) == rank]
        return local_page(mine, self.grid.world_size)

    def rows_of(self, request: int, slots: torch.Tensor) -> torch.Tensor:
        """The compact table: logical slots [n] → view rows [n] of one request.

        −1 for −1, for pages the request does not have, and for masked slots past its valid length.
        """
        P = self.grid.page_size
        table = self.tables[request].pages[: num_pages(self.valid[request], P)]
        if not len(table):
            return torch.full_like(slots, NO_SLOT)
        by_page = torch.argsort(table)
        found = torch.searchsorted(table[by_page], slots // P).clamp(max=len(table) - 1)
        page_position = by_page[found]
        position = page_position * P + slots % P
        known = (slots >= 0) & (table[page_position] == slots // P) & (position < self.valid[request])
        return torch.where(known, self.row_starts[request] + position, NO_SLOT)


def contribute(shard: Shard, layout: ViewLayout) -> torch.Tensor:
    """[page_counts[rank], P, width]: the pages of the view that this shard owns, whole."""
    return shard.pages(layout.local_pages(shard.rank))


def assemble(gathered: torch.Tensor, layout: ViewLayout) -> torch.Tensor:
    """Pages of rank 0, then of rank 1, … [pages, P, width] → the view [sum(valid), width].

    Rows in batch and position order; the slots past each request's valid length are dropped (V2).
    """
    in_order = torch.empty_like(gathered).index_put_((layout.rank_major.to(gathered.device),), gathered)
    rows = in_order.flatten(0, 1)
    page_counts = [num_pages(valid, layout.grid.page_size) for valid in layout.valid]
    starts = accumulate((count * layout.grid.page_size for count in page_counts), initial=0)
    return torch.cat(
        [rows[start : start + valid] for start, valid in zip(starts, layout.valid, strict=False)]
    )


def materialize(shard: Shard, layout: ViewLayout, *, group: dist.ProcessGroup, site: str) -> torch.Tensor:
    """The view [sum(valid), width] on every rank: one gather a cache and layer (V8), pages or not (V6)."""
    gathered = all_gather_rows(contribute(shard, layout), layout.page_counts, group=group, site=site)
    return assemble(gathered, layout)


def view_layout(tables: Sequence[PageTable], valid: Sequence[int], grid: Grid) -> ViewLayout:
    """The layout of a batch's view; ``valid`` tokens of each request, tables at least that long."""
    return ViewLayout(grid, tuple(tables), tuple(valid))
