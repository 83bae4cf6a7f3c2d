"""The full dense view of a batch's KV, materialized from all shards (laws V1, V2, V7, V8).

In three parts: *contribute* (this rank's pages) → *exchange* (one collective) → *assemble* (position order,
tails masked). The index work is done once a forward, for all caches and layers (O1): as shared metadata in
:class:`ViewLayout`, as one rank's index tensors in :class:`ViewIndex`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

from refmodel.collectives import gather_buffers
from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid, coverage, num_pages
from refmodel.layout.ownership import NO_SLOT, PageTable, local_page, owner
from refmodel.layout.rows import buffer_places
from refmodel.storage.formats import Format
from refmodel.storage.pages import rows_of_pages
from refmodel.storage.shard import Shard


@dataclass(frozen=True, slots=True, eq=False)
class CompactTable:
    """Logical slots of one request → rows of a view, of whatever rows the view is made (V3)."""

    page_size: int
    pages: torch.Tensor  # [pages] ascending
    page_positions: torch.Tensor  # [pages] of each of them
    first_row: int  # of the request in the view
    valid: int  # its tokens

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots […] → view rows […]: −1 for −1, for other pages, for masked slots past the valid length."""
        if not len(self.pages):
            return torch.full_like(slots, NO_SLOT)
        page = slots // self.page_size
        found = torch.searchsorted(self.pages, page).clamp(max=len(self.pages) - 1)
        position = self.page_positions[found] * self.page_size + slots % self.page_size
        known = (slots >= 0) & (self.pages[found] == page) & (position < self.valid)
        return torch.where(known, self.first_row + position, NO_SLOT)


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
        used = zip(self.tables, self.request_pages, strict=True)
        return torch.cat([table.pages[:count] for table, count in used])

    @property
    def request_pages(self) -> list[int]:
        """[requests] how many pages of each request are in the view."""
        return [num_pages(valid, self.grid.page_size) for valid in self.valid]

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

    def compact(self, request: int, device: torch.device | None = None) -> CompactTable:
        """Where the logical slots of one request are in the view."""
        P = self.grid.page_size
        pages = self.tables[request].pages[: num_pages(self.valid[request], P)].to(device or "cpu")
        by_page = torch.argsort(pages)
        return CompactTable(P, pages[by_page], by_page, self.row_starts[request], self.valid[request])


@dataclass(frozen=True, slots=True, eq=False)
class ViewIndex:
    """One rank's part in a view: index tensors on its device."""

    layout: ViewLayout
    local_pages: torch.Tensor  # [page_counts[rank]] what it contributes
    places: torch.Tensor  # [pages] where each page of the view lies in the gather buffers


def view_index(
    layout: ViewLayout, rank: int, *, local_pages: int, device: torch.device | None = None
) -> ViewIndex:
    """The part of a rank whose shards have ``local_pages`` pages; a table that names others is refused."""
    mine = layout.local_pages(rank)
    if len(mine) and int(mine.max()) >= local_pages:
        raise InvalidInput(
            "local page",
            expected=f"0 … {local_pages - 1}",
            received=int(mine.max()),
            where=Where(rank=rank),
        )
    places = torch.empty_like(layout.pages)
    places[layout.rank_major] = buffer_places(layout.page_counts)
    where = device or torch.device("cpu")
    return ViewIndex(layout, mine.to(where), places.to(where))


def contribute(shard: Shard, index: ViewIndex) -> torch.Tensor:
    """uint8 [page_counts[rank], page bytes]: the pages of the view that this shard owns, whole."""
    return shard.take(index.local_pages)


def assemble(buffers: torch.Tensor, index: ViewIndex, row_format: Format) -> torch.Tensor:
    """Gathered pages, uint8 [W × most pages of a rank, page bytes] → the view, [sum(valid), bytes a token].

    Packed rows in batch and position order; slots past each request's valid length are dropped (V2).
    """
    layout = index.layout
    rows = rows_of_pages(buffers, row_format, index.places)
    return drop_tails(rows, layout.valid, layout.grid.page_size)


def drop_tails(rows: torch.Tensor, valid: Sequence[int], page_size: int) -> torch.Tensor:
    """Rows of whole pages [sum of coverage, …] → those of valid tokens [sum(valid), …] (V2)."""
    starts = accumulate((coverage(tokens, page_size) for tokens in valid), initial=0)
    pieces = [rows[start : start + tokens] for start, tokens in zip(starts, valid, strict=False)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def materialize(shard: Shard, index: ViewIndex, *, group: dist.ProcessGroup, site: str) -> torch.Tensor:
    """The view on every rank: one gather a cache and layer (V8), pages or not (V6)."""
    counts = index.layout.page_counts
    buffers = gather_buffers(contribute(shard, index), counts, group=group, site=site)
    return assemble(buffers, index, shard.format)


def view_layout(tables: Sequence[PageTable], valid: Sequence[int], grid: Grid) -> ViewLayout:
    """The layout of a batch's view; ``valid`` tokens of each request, tables at least that long."""
    return ViewLayout(grid, tuple(tables), tuple(valid))
