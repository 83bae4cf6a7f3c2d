"""The bytes of one rank, and every view compared with the truth (laws V1, L5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from refmodel.collectives import device_of, gather_buffers
from refmodel.errors import Finding
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import PageTable, local_page, owner
from refmodel.layout.plan import Plan
from refmodel.layout.rows import buffer_places
from refmodel.storage.identity import Cache
from refmodel.storage.passage import open_passage
from refmodel.storage.reuse import Reading
from refmodel.storage.shard import Shard, empty_shard
from sim.engine.model_rows import ModelRows
from sim.engine.read import Read
from sim.engine.tag_rows import TagRows
from sim.engine.tag_truth import TagTruth
from sim.engine.turn import Copy, Turn
from sim.histories.history import History


class Storage:
    """The shards of one rank, of both caches in every layer."""

    def __init__(self, history: History, rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
        self.grid = Grid(history.world_size, history.page_size)
        self.reading = Reading(history.view, history.prefetch)
        self.local_pages = history.pages_per_lane + 1
        self.device = device_of(group)
        self.rows: TagRows | ModelRows = _rows(history)
        self.layers: tuple[dict[Cache, Shard], ...] = tuple(
            {
                cache: empty_shard(self.grid, rank, row_format, self.local_pages, device=self.device)
                for cache, row_format in self.rows.formats.items()
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
                sent = shard.take(mine)
                shard.pages[to] = gather_buffers(sent, counts, group=self.group, site=site)[source]

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
        read = Read(self.layers, self.group, self.device, self.before_layer, self.findings)
        for rows in self.rows.serve(passage, turns, read):
            self.digest.update(rows.numpy().tobytes())
            self.rows_checked += len(rows)


def _rows(history: History) -> TagRows | ModelRows:
    if not history.model:
        return TagRows(TagTruth(history.layers if history.bigram else None))
    return ModelRows(history.layers, history.world_size * history.pages_per_lane * history.page_size)


def _ready(layer: int) -> None:
    """Nothing is loaded while a forward runs."""
