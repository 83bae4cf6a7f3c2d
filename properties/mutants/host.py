"""Wrong host caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.serving import host_layouts, host_moves, page_groups, stored_prefix
from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_layouts import CopyEngine, HostLayout, HostPool
from refmodel.serving.host_moves import Fill, Landing, Load
from refmodel.serving.host_pages import HostPages
from refmodel.serving.layer_gate import LayerGate
from refmodel.serving.page_groups import PagePairs
from refmodel.serving.write_policy import HitCounts
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache

# -- bytes (H1, H6) ----------------------------------------------------------------------------------------


@mutant(HostPool._layer, "layers-in-page-order", "H1")
def layer_first_read_as_page_first(right: Right, self: HostPool, layer: int) -> torch.Tensor:
    """With pages first, layers lie from the last to the first: bytes return, but not where others look."""
    return right(self, layer if self.layout is HostLayout.LAYER_FIRST else self.layers - 1 - layer)


@mutant(HostPool._index, "one-token-a-page", "H1")
def first_token_of_each_page(
    right: Right, self: HostPool, pages: Sequence[int], side: torch.Tensor
) -> torch.Tensor:
    """The gather takes the first token of each page only: the rest of the page is what was there before."""
    index = right(self, pages, side)
    return index[:: self.page_size] if self.cache is Cache.KV else index


@mutant(HostPool.load, "loaded-to-the-page-it-left", "H1")
def loaded_by_host_page(
    right: Right, self: HostPool, pairs: PagePairs, layer: int, pages: torch.Tensor
) -> None:
    """A load goes to the device page of the host page's number: right only if nothing ever moved."""
    right(self, PagePairs(pairs.host, tuple(page + 1 for page in pairs.host)), layer, pages)


@mutant(host_layouts.check_engine, "engine-not-checked", "H6")
def any_engine_for_any_layout(layout: HostLayout, engine: CopyEngine) -> None:
    """Layouts that the copy engine cannot read are taken without a word."""


@mutant(host_layouts.empty_host_pool, "layout-rewritten", "H6", source="derived from sglang's settings")
def layout_changed_to_suit_the_engine(
    right: Right, layout: HostLayout, engine: CopyEngine, cache: Cache, row_format: Format, **sizes: int
) -> HostPool:
    """A layout that does not go with the engine is silently replaced by one that does."""
    fitting = host_layouts.FITTING[engine]
    return right(layout if layout in fitting else fitting[-1], engine, cache, row_format, **sizes)


# -- groups (H2) -------------------------------------------------------------------------------------------


@mutant(page_groups._first_fault, "host-01", "H2", source="reported in sglang#36799")
def only_the_number_of_slots_is_checked(
    slots: torch.Tensor, page_size: int, side: str
) -> tuple[int, str, str] | None:
    """Slots need only be a multiple of P in number: a shifted group is copied to the wrong host slots."""
    whole, rest = divmod(len(slots), page_size)
    return (whole, f"{page_size} slots", f"{rest}") if rest else None


@mutant(page_groups._first_fault, "host-side-only", "H2")
def device_slots_are_trusted(
    right: Right, slots: torch.Tensor, page_size: int, side: str
) -> tuple[int, str, str] | None:
    """Only host slots are checked: they come from a free list; the device's are thought to be whole pages."""
    return right(slots, page_size, side) if side == "host" else None


@mutant(page_groups._torn, "first-and-last-slot-checked", "H2")
def ends_of_the_group_only(groups: torch.Tensor) -> torch.Tensor:
    """A group counts as a page if its first and last slot are right, whatever lies between."""
    page_size = groups.shape[1]
    start = groups[:, 0]
    return (groups[:, -1] - start != page_size - 1) | (start % page_size != 0) | (start < 0)


@mutant(page_groups._repeated, "page-twice", "H2")
def a_page_may_come_twice(starts: torch.Tensor) -> torch.Tensor:
    """Each group is checked alone: the same host page is filled twice."""
    return torch.zeros_like(starts, dtype=torch.bool)


# -- presence (H3) -----------------------------------------------------------------------------------------


@mutant(HostPages.whole, "host-02", "H3", source="reported in sglang#30057, sglang#17085")
def usable_with_its_kv_alone(self: HostPages, key: int) -> bool:
    """A page counts as present when its KV is: its index page may be missing."""
    return key in self and self[key].present[0]


@mutant(stored_prefix.own_prefix, "storage-asked-for-kv", "H3", source="reported in sglang#18637")
def storage_is_asked_for_kv(
    right: Right,
    lanes: Sequence[int],
    rank: int,
    present: Mapping[str, Sequence[bool]],
    caches: Sequence[str],
) -> int:
    """Storage is asked for the KV of pages only: the index was left out of it."""
    return right(lanes, rank, present, caches[:1])


@mutant(LayerGate.unloaded, "draft-02", "H1", "H3", source="reported in sglang#32176, sglang#28895")
def draft_caches_not_restored(right: Right, self: LayerGate) -> tuple[tuple[str, int], ...]:
    """A load brings back the model's caches only: the draft model reads what was there, without an error."""
    return tuple((cache, layer) for cache, layer in right(self) if not cache.startswith("draft"))


@mutant(HostCache.close, "torn-copies-kept", "H3")
def torn_copies_stay(right: Right, self: HostCache, fill: Fill) -> tuple[int, ...]:
    """A copy that lacks a cache when its fill ends counts as whole from then on."""
    for cache in self.layers:
        self.arrived(fill, cache)
    return right(self, fill)


# -- loads and evictions (H4) ------------------------------------------------------------------------------


@mutant(HostPages.victims, "host-03", "H4", source="reported in sglang#26728, sglang#27631")
def pages_in_use_are_evicted(
    self: HostPages, lane: int, count: int, keep: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Eviction asks when a host page was used, not whether a load still reads it."""
    ranked = sorted(
        (copy.last_access, -copy.created, key)
        for key, copy in self._copies.items()
        if copy.lane == lane and key not in keep
    )
    return tuple(key for *_, key in ranked[: max(0, count)])


@mutant(HostCache.plan_prefetch, "host-05", "H4", source="reported in tokenspeed#293")
def suffix_taken_for_the_first_pages(
    right: Right, self: HostCache, keys: Sequence[int], lanes: Sequence[int], now: int
) -> Fill:
    """The host has the first pages, storage brings those behind: they are counted from the first again."""
    fill = right(self, keys, lanes, now)
    moves = tuple(replace(move, position=i) for i, move in enumerate(fill.moves))
    self._fills[fill.number] = replace(fill, moves=moves)
    return self._fills[fill.number]


@mutant(Landing.owners, "host-06", "H4", "O1")
def owner_of_the_host_copy(self: Landing) -> tuple[int, ...]:
    """A page loaded into another lane keeps the owner of its host copy: no table is told."""
    return self.load.lanes


@mutant(LayerGate.require_layer, "host-07", "H4", source="reported in sglang#36738")
def layers_read_before_they_are_loaded(self: LayerGate, cache: str, layer: int) -> None:
    """Nothing waits for a layer: it is read while its load is in flight."""
    self._check(cache, layer)


@mutant(LayerGate.require_layer, "index-read-unwaited", "H4", source="derived from sglang's layer counter")
def only_kv_waits_for_its_layer(right: Right, self: LayerGate, cache: str, layer: int) -> None:
    """Reading KV waits for its layer, reading the index does not: it has another path to its pages."""
    if "index" not in cache:
        right(self, cache, layer)


@mutant(host_moves.land, "any-lane-will-do", "H4", "O1")
def landed_in_any_lane(load: Load, pages: Sequence[int], world_size: int) -> Landing:
    """Pages are taken from whatever lane has some: a rank loads from pools that are not its own."""
    return Landing(load, tuple(pages), world_size)


@mutant(HostPages.unpin, "unpinned-for-all", "H4")
def one_unpins_for_all(self: HostPages, keys: Sequence[int]) -> None:
    """The first use of a host page that ends takes away the pins of all the others."""
    for key in keys:
        self._copies[key] = replace(self._copies[key], pins=0)


@mutant(HostPages.add, "failed-fill-evicts", "H4")
def evicts_before_it_knows(
    right: Right,
    self: HostPages,
    keys: Sequence[int],
    lanes: Sequence[int],
    now: int,
    *,
    keep: frozenset[int],
) -> tuple[int, ...]:
    """Room is made lane by lane: when one has none, the others have been evicted for nothing."""
    evicted = [
        key
        for lane in sorted(set(lanes))
        for key in self.evict(lane, max(0, list(lanes).count(lane) - self.free(lane)))
    ]
    right(self, keys, lanes, now, keep=keep)
    return tuple(evicted)


@mutant(HostCache.finish, "finished-half-loaded", "H4")
def finished_before_all_layers_came(self: HostCache, load: Load) -> None:
    """A load ends when its last layer is asked for, not when it has come."""
    self.abandon(load)


# -- ranks (H5) --------------------------------------------------------------------------------------------


@mutant(host_moves.backed_up_by, "host-04", "H5", source="reported in sglang#37149")
def only_rank_zero_backs_up(
    right: Right, rank: int, fill: Fill, pages: Sequence[int], world_size: int
) -> PagePairs:
    """Rank 0 backs up for all, as if it had every page: the pages of other ranks are lost."""
    return right(rank, fill, pages, world_size) if rank == 0 else PagePairs((), ())


@mutant(host_moves.backed_up_by, "pages-by-move-number", "H5")
def pages_counted_by_move(
    right: Right, rank: int, fill: Fill, pages: Sequence[int], world_size: int
) -> PagePairs:
    """Pages are found by the number of the move, not by its position: wrong when some were on the host."""
    moves = tuple(replace(move, position=i) for i, move in enumerate(fill.moves))
    return right(rank, replace(fill, moves=moves), pages, world_size)


@mutant(HitCounts.hit, "backed-up-at-each-hit", "H5")
def due_at_every_hit(
    right: Right, self: HitCounts, keys: Sequence[int], backed_up: object = ()
) -> tuple[int, ...]:
    """A page that has a host copy is due again at its next hit: it is backed up twice."""
    return right(self, keys)
