"""Wrong views."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout.geometry import coverage
from refmodel.storage import view
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Shard
from refmodel.storage.traffic import Rows, Traffic
from refmodel.storage.view import CompactTable, ViewIndex, ViewLayout


@mutant(ViewLayout.local_pages, "view-01", "V1", "V7", source="reported in vllm-gaudi#1546")
def contiguous_fast_path(right: Right, self: ViewLayout, rank: int) -> torch.Tensor:
    """The pages of a rank are read as one contiguous run from the first, scattered or not."""
    pages = right(self, rank)
    return pages[0] + torch.arange(len(pages)) if len(pages) else pages


@mutant(view.assemble, "view-02", "V2")
def tail_not_masked(
    right: Right, buffers: torch.Tensor, index: ViewIndex, row_format: Format
) -> torch.Tensor:
    """Requests of a batch are cut one slot late where the tail page has room: a stale row leaks in."""
    whole = _whole_pages(index.layout)
    rows = right(buffers, replace(index, layout=whole), row_format)
    starts = accumulate(whole.valid, initial=0)
    kept = [
        rows[start + (valid < cover) : start + valid + (valid < cover)]
        for start, valid, cover in zip(starts, index.layout.valid, whole.valid, strict=False)
    ]
    return torch.cat(kept)


def _whole_pages(layout: ViewLayout) -> ViewLayout:
    covered = tuple(coverage(valid, layout.grid.page_size) for valid in layout.valid)
    return ViewLayout(layout.grid, layout.tables, covered)


@mutant(ViewLayout.compact, "masked-slots-found", "V2")
def masked_slots_have_rows(
    right: Right, self: ViewLayout, request: int, device: torch.device | None = None
) -> CompactTable:
    """The compact table knows pages, not lengths: slots past the tail map to the next request's rows."""
    table = right(self, request, device)
    return replace(table, valid=coverage(table.valid, table.page_size))


@mutant(ViewLayout.rank_major, "pages-in-id-order", "V1", "V7")
def pages_sorted_by_id(self: ViewLayout) -> torch.Tensor:
    """Within a rank pages are taken to come in the order of their ids, not of the page table."""
    W = self.grid.world_size
    return torch.argsort(self.pages % W * (int(self.pages.max()) + 1) + self.pages)


@mutant(ViewLayout.pages, "tail-page-forgotten", "V1")
def whole_pages_only(self: ViewLayout) -> torch.Tensor:
    """Pages are valid div P: the tail page never enters the view."""
    used = zip(self.tables, self.valid, strict=True)
    return torch.cat([table.pages[: valid // self.grid.page_size] for table, valid in used])


@mutant(ViewLayout.row_starts, "starts-by-coverage", "V1")
def starts_count_coverage(right: Right, self: ViewLayout) -> tuple[int, ...]:
    """Requests are taken to start at page multiples in the view: valid length and coverage confused."""
    return right(_whole_pages(self))


@mutant(Traffic.views, "view-07", "V6")
def two_gathers_swapped_on_rank_one(
    right: Right, self: Traffic, layer: int, rows: Rows
) -> dict[Cache, torch.Tensor]:
    """Rank 1 gathers the index before the KV: same shapes, other order; gloo gives wrong data silently."""
    if self.passage.rank == 1:
        self.layers = tuple(dict(sorted(shards.items(), reverse=True)) for shards in self.layers)
    return dict(sorted(right(self, layer, rows).items()))


@mutant(Traffic._full, "one-view-a-half", "V8")
def one_view_for_prev_one_for_next(
    right: Right, self: Traffic, shard: Shard, cache: Cache, rows: torch.Tensor
) -> torch.Tensor:
    """Prev and next materialize a view each: right bytes, twice the traffic."""
    right(self, shard, cache, rows)
    return right(self, shard, cache, rows)


@mutant(Traffic.views, "index-cache-not-served", "V8")
def kv_cache_only(right: Right, self: Traffic, layer: int, rows: Rows) -> dict[Cache, torch.Tensor]:
    """The index cache is forgotten: it has no write and no view."""
    self.layers = tuple({Cache.KV: shards[Cache.KV]} for shards in self.layers)
    return right(self, layer, rows)
