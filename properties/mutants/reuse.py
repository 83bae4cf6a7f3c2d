"""Views from the wrong rows, and history at the wrong time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.collectives import all_gather_rows
from refmodel.layout.geometry import Extent, coverage
from refmodel.layout.plan import Plan
from refmodel.storage import passage, reuse
from refmodel.storage.identity import Cache
from refmodel.storage.reuse import Reading, ReadVerdict, ViewPath
from refmodel.storage.traffic import Rows, Traffic, nothing_loads
from refmodel.storage.view import CompactTable, ViewIndex, ViewLayout, view_index, view_layout

Views = dict[Cache, torch.Tensor]


@mutant(Traffic.views, "view-03", "V4", source="reported in tpu-inference#3425")
def one_copy_from_the_page_edge(right: Right, self: Traffic, layer: int, rows: Rows) -> Views:
    """Current rows are one copy from a page edge on: inside a page they come late, behind stale rows."""
    views = right(self, layer, rows)
    if self.passage.read.path is not ViewPath.PARTIAL:
        return views
    plan = self.passage.plan
    for view in views.values():
        for start, extent in zip(plan.key_starts, plan.extents, strict=False):
            first, end = start + extent.prefix, start + extent.end
            edge = min(start + coverage(extent.prefix, plan.grid.page_size), end)
            view[edge:end] = view[first : first + end - edge].clone()
            view[first:edge] = 255
    return views


@mutant(passage._pages, "history-in-whole-pages", "V4")
def history_in_whole_pages(
    right: Right,
    read: ReadVerdict,
    view: ViewLayout,
    plan: Plan,
    rank: int,
    local_pages: int,
    device: torch.device | None,
) -> ViewIndex | None:
    """History is cut at the page, not at the token: the next request begins in stale slots."""
    if read.path is not ViewPath.PARTIAL:
        return right(read, view, plan, rank, local_pages, device)
    covered = [coverage(extent.prefix, plan.grid.page_size) for extent in plan.extents]
    whole = view_layout(view.tables, covered, plan.grid)
    return view_index(whole, rank, local_pages=local_pages, device=device)


@mutant(reuse.join_history, "all-history-first", "V4")
def all_history_before_all_current(
    history: torch.Tensor, current: torch.Tensor, extents: Sequence[Extent]
) -> torch.Tensor:
    """History of the batch stands before its current rows: right for one request, wrong for two."""
    return torch.cat([history, current[: sum(extent.tokens for extent in extents)]])


@mutant(reuse.read_verdict, "current-only-with-a-prefix", "V3")
def prefix_not_asked_for(right: Right, asked: Reading, extents: Sequence[Extent]) -> ReadVerdict:
    """Current-only reuse is taken as asked: requests with a prefix lose their history."""
    if asked.path is ViewPath.CURRENT:
        return ReadVerdict(ViewPath.CURRENT, False)
    return right(asked, extents)


@mutant(ViewLayout.compact, "compact-by-coverage", "V3")
def compact_rows_by_whole_pages(
    right: Right, self: ViewLayout, request: int, device: torch.device | None = None
) -> CompactTable:
    """Compact rows of a request are counted from whole pages of those before it, not from their tokens."""
    covered = sum(coverage(valid, self.grid.page_size) for valid in self.valid[:request])
    return replace(right(self, request, device), first_row=covered)


@mutant(Traffic._current, "current-in-rank-order", "V3", "V4")
def current_rows_in_rank_order(
    right: Right, self: Traffic, shard: object, cache: Cache, rows: torch.Tensor
) -> torch.Tensor:
    """Gathered rows are used as they come, rank by rank: the zigzag is not undone."""
    order = self.passage.plan.gather_order
    return right(self, shard, cache, rows)[order[order < self.passage.plan.real_rows]]


@mutant(Traffic.views, "current-only-gathers-pages", "V3")
def pages_gathered_for_nothing(right: Right, self: Traffic, layer: int, rows: Rows) -> Views:
    """Current-only reuse still gathers pages: the view is right, and was not needed."""
    views = right(self, layer, rows)
    if self.passage.read.path is ViewPath.CURRENT:
        for cache, shard in self.layers[layer].items():
            mine = shard.pages[:1]
            counts = [1] * self.group.size()
            all_gather_rows(mine, counts, group=self.group, site=f"{cache.name.lower()}.view")
    return views


@mutant(Traffic._begin, "prefetch-of-this-layer", "V5")
def the_layer_before_prefetched(right: Right, self: Traffic, layer: int) -> None:
    """What is prefetched is the history of the layer that computes, not of the next one."""
    if not self.passage.read.prefetch or not layer:
        return right(self, layer)
    behind = Traffic(self.passage, (*self.layers[:layer], self.layers[layer - 1]), self.group)
    right(behind, layer)
    self._under_way |= behind._under_way
    return None


@mutant(Traffic._begin, "prefetched-before-it-is-loaded", "H4", "V5")
def next_layer_not_waited_for(right: Right, self: Traffic, layer: int) -> None:
    """Prefetch gathers the history of the next layer, which is still on its way from the host."""
    ready, self.ready = self.ready, nothing_loads
    right(self, layer)
    self.ready = ready


@mutant(Traffic.views, "prefetch-before-current-rows", "V5")
def prefetched_before_current_rows(right: Right, self: Traffic, layer: int, rows: Rows) -> Views:
    """The next layer's history is begun before this layer's current rows: another order of collectives."""
    if not self.passage.read.prefetch:
        return right(self, layer, rows)
    for ahead in range(layer, min(layer + 2, len(self.layers))):
        if ahead not in self._under_way:
            self._begin(ahead)
    read = replace(self.passage.read, prefetch=False)
    quiet = Traffic(replace(self.passage, read=read), self.layers, self.group)
    quiet._under_way = self._under_way
    return right(quiet, layer, rows)


@mutant(Traffic._begin, "prefetch-swapped-on-rank-one", "V5", "V6")
def history_swapped_on_rank_one(right: Right, self: Traffic, layer: int) -> None:
    """Rank 1 begins the history of the index before that of the KV: same shapes, other order."""
    turned = Traffic(self.passage, self.layers, self.group)
    if self.passage.rank == 1:
        turned.layers = tuple(dict(sorted(shards.items(), reverse=True)) for shards in self.layers)
    right(turned, layer)
    self._under_way |= turned._under_way


@mutant(reuse.read_verdict, "prefetch-lost-in-silence", "V5")
def prefetch_dropped_quietly(right: Right, asked: Reading, extents: Sequence[Extent]) -> ReadVerdict:
    """A prefetch that a full view cannot have is left out without a word."""
    verdict = right(asked, extents)
    return replace(verdict, fallbacks=()) if verdict.path is ViewPath.FULL else verdict
