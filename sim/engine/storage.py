"""The bytes of one rank, and every view compared with the truth (laws V1, L5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from refmodel.collectives import device_of, gather_buffers
from refmodel.errors import Finding, Where
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import PageTable, local_page, owner
from refmodel.layout.plan import Plan
from refmodel.layout.rows import buffer_places
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache
from refmodel.storage.passage import open_passage
from refmodel.storage.reuse import Reading
from refmodel.storage.shard import Shard, empty_shard
from refmodel.storage.traffic import Traffic
from sim.engine.truth import tags
from sim.engine.turn import Copy, Turn
from sim.histories.history import History

CACHES = (Cache.KV, Cache.INDEX)


class Storage:
    """The shards of one rank, of both caches in every layer."""

    def __init__(self, history: History, rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
        self.grid = Grid(history.world_size, history.page_size)
        self.reading = Reading(history.view, history.prefetch)
        self.local_pages = history.pages_per_lane + 1
        self.device = device_of(group)
        self.layers: tuple[dict[Cache, Shard], ...] = tuple(
            {
                cache: empty_shard(self.grid, rank, TAG, self.local_pages, device=self.device)
                for cache in CACHES
            }
            for _ in range(history.layers + history.draft_layers)
        )
        self.digest = hashlib.sha256()
        self.findings: list[Finding] = []
        self.rows_checked = 0
        self.before_layer: Callable[[int], None] = _ready  # called before anything of a layer is read

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        """Whole pages from their owners to those of their copies: one gather a cache and layer (L5)."""
        if not copies:
            return
        W = self.grid.world_size
        owners = [owner(copy.old, W) for copy in copies]
        order = sorted(range(len(copies)), key=owners.__getitem__)  # as the gather brings them
        counts = [owners.count(rank) for rank in range(W)]
        places = dict(zip(order, buffer_places(counts).tolist(), strict=True))
        landing = [i for i, copy in enumerate(copies) if owner(copy.new, W) == self.rank]
        mine = self._index(local_page(copies[i].old, W) for i in order if owners[i] == self.rank)
        source = self._index(places[i] for i in landing)
        to = self._index(local_page(copies[i].new, W) for i in landing)
        for shards in self.layers:
            for cache, shard in shards.items():
                site = f"{cache.name.lower()}.copy"
                shard.pages[to] = gather_buffers(shard.take(mine), counts, group=self.group, site=site)[
                    source
                ]

    def _index(self, numbers: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)

    def exchange(self, turns: Sequence[Turn], plan: Plan, tables: Sequence[Sequence[int]]) -> None:
        """Write the new rows of a forward, and compare every view with the truth."""
        page_tables = [PageTable(torch.tensor(pages), self.grid) for pages in tables]
        passage = open_passage(
            plan,
            page_tables,
            self.rank,
            local_pages=self.local_pages,
            asked=self.reading,
            device=self.device,
        )
        traffic = Traffic(passage, self.layers, self.group)
        ahead = int(passage.read.prefetch)  # layers whose history is read before this one attends (V5)
        for layer in range(len(self.layers)):
            for needed in range(layer, min(layer + ahead + 1, len(self.layers))):
                self.before_layer(needed)
            truth = {cache: [_truth(turn, layer, cache) for turn in turns] for cache in CACHES}
            rows = {cache: self._local_rows(plan, turns, truth[cache]) for cache in CACHES}
            for cache, view in traffic.views(layer, rows).items():
                self._compare(view.cpu(), torch.cat(truth[cache]), turns, layer, cache)

    def _local_rows(self, plan: Plan, turns: Sequence[Turn], truth: Sequence[torch.Tensor]) -> torch.Tensor:
        """What this rank's projections would give for its rows."""
        batch = torch.cat([rows[turn.extent.prefix :] for turn, rows in zip(turns, truth, strict=True)])
        return TAG.encode(plan.take(batch, self.rank)).to(self.device)

    def _compare(
        self, view: torch.Tensor, truth: torch.Tensor, turns: Sequence[Turn], layer: int, cache: Cache
    ) -> None:
        self.digest.update(view.numpy().tobytes())
        self.rows_checked += len(view)
        rows = TAG.unpack(view)[:, 0]
        if not torch.equal(rows, truth):
            self.findings.append(
                _wrong(rows, truth, turns, Where(rank=self.rank, layer=layer, cache=cache.name))
            )


def _ready(layer: int) -> None:
    """Nothing is loaded while a forward runs."""


def _truth(turn: Turn, layer: int, cache: Cache) -> torch.Tensor:
    return tags(turn.hashes[: turn.extent.end], layer, cache)


def _wrong(rows: torch.Tensor, truth: torch.Tensor, turns: Sequence[Turn], where: Where) -> Finding:
    """The first wrong row of a view, by name."""
    if len(rows) != len(truth):
        return Finding("V1", "length of the view", str(len(truth)), str(len(rows)), where)
    wrong = (rows != truth).nonzero().flatten()
    position = int(wrong[0])
    for turn in turns:
        name = turn.name
        if position < turn.extent.end:
            break
        position -= turn.extent.end
    return Finding(
        "V1",
        f"{len(wrong)} of {len(truth)} rows of the view, first",
        f"token {position} of request {name}",
        _who(int(rows[wrong[0]]), turns, where),
        replace(where, request=name, position=position),
    )


def _who(tag: int, turns: Sequence[Turn], where: Where) -> str:
    """Whose row a tag is, as far as the batch knows."""
    if tag < 0:
        return "poison: nobody wrote this slot"
    for turn in turns:
        for cache in CACHES:
            for layer in range((where.layer or 0) + 1):
                found = (_truth(turn, layer, cache) == tag).nonzero().flatten()
                if len(found):
                    return (
                        f"token {int(found[0])} of request {turn.name} ({cache.name.lower()}, layer {layer})"
                    )
    return "a token of another request"
