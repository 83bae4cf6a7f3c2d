"""Wrong views."""

from __future__ import annotations

from itertools import accumulate

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout.geometry import num_pages
from refmodel.storage import view
from refmodel.storage.identity import Cache
from refmodel.storage.view import ViewLayout
from sim.cases.case import Case, Forward
from sim.serving.program import Prepared, Server


@mutant(ViewLayout.local_pages, "view-01", "V1", "V7", source="reported in vllm-gaudi#1546")
def contiguous_fast_path(right: Right, self: ViewLayout, rank: int) -> torch.Tensor:
    """The pages of a rank are read as one contiguous run from the first, scattered or not."""
    pages = right(self, rank)
    return pages[0] + torch.arange(len(pages)) if len(pages) else pages


@mutant(view.assemble, "view-02", "V2")
def tail_not_masked(right: Right, gathered: torch.Tensor, layout: ViewLayout) -> torch.Tensor:
    """Requests of a batch are cut one slot late where the tail page has room: a stale row leaks in."""
    rows = right(gathered, _whole_pages(layout))
    P = layout.grid.page_size
    covered = [num_pages(valid, P) * P for valid in layout.valid]
    starts = accumulate(covered, initial=0)
    kept = [
        rows[start + (valid < cover) : start + valid + (valid < cover)]
        for start, valid, cover in zip(starts, layout.valid, covered, strict=False)
    ]
    return torch.cat(kept)


def _whole_pages(layout: ViewLayout) -> ViewLayout:
    P = layout.grid.page_size
    covered = tuple(num_pages(valid, P) * P for valid in layout.valid)
    return ViewLayout(layout.grid, layout.tables, covered)


@mutant(ViewLayout.rows_of, "masked-slots-found", "V2")
def masked_slots_have_rows(right: Right, self: ViewLayout, request: int, slots: torch.Tensor) -> torch.Tensor:
    """The compact table knows pages, not lengths: slots past the tail map to the next request's rows."""
    return right(_whole_pages(self), request, slots)


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


@mutant(Server.step, "view-07", "V6")
def two_gathers_swapped_on_rank_one(self: Server, forward: Forward) -> None:
    """Rank 1 gathers the index before the KV: same shapes, other order; gloo gives wrong data silently."""
    prepared = self.prepare(forward)
    order = self.case.caches[::-1] if self.rank == 1 else self.case.caches
    for layer in range(self.case.layers):
        for cache in order:
            self.write_and_view(prepared, layer, cache)


@mutant(Server.write_and_view, "one-view-a-half", "V8")
def one_view_for_prev_one_for_next(
    right: Right, self: Server, prepared: Prepared, layer: int, cache: Cache
) -> torch.Tensor:
    """Prev and next materialize a view each: right bytes, twice the traffic."""
    right(self, prepared, layer, cache)
    return right(self, prepared, layer, cache)


@mutant(Case.planes, "index-cache-not-served", "V8")
def kv_cache_only(self: Case) -> object:
    """The index cache is forgotten: it has no shard, no write and no view."""
    return ((layer, Cache.KV) for layer in range(self.layers))
