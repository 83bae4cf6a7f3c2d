"""The collectives of one forward, layer by layer: current rows out, views in (laws V3–V6, V8).

Sites are named after the cache: ``kv.write`` (current rows, before a full view), ``kv.view`` (the pages of a
full view), ``kv.history`` (those of history), ``kv.current`` (current rows that are part of the view).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from refmodel.collectives import PendingRows, start_gather
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage, gather_rows
from refmodel.storage.reuse import ViewPath, join_history
from refmodel.storage.shard import Shard
from refmodel.storage.view import assemble, contribute, materialize
from refmodel.storage.write import WritePath

Rows = Mapping[Cache, torch.Tensor]
Shards = Mapping[Cache, Shard]


def nothing_loads(layer: int) -> None:
    """All layers are there."""


class Traffic:
    """One forward's exchanges on one rank; ``layers`` gives the shards of each layer, in order.

    ``ready`` is called with a layer before anything of it is read: it returns when the layer is loaded (H4).
    In partial reuse a layer first gathers its history, then its current rows. With prefetch the history of
    the next layer is under way before this one's views are handed out: the same order of calls (V5).
    """

    def __init__(
        self,
        passage: Passage,
        layers: tuple[Shards, ...],
        group: dist.ProcessGroup,
        *,
        ready: Callable[[int], None] = nothing_loads,
    ) -> None:
        self.passage, self.layers, self.group, self.ready = passage, layers, group, ready
        self._under_way: dict[int, dict[Cache, PendingRows]] = {}

    def views(self, layer: int, rows: Rows) -> dict[Cache, torch.Tensor]:
        """Write this rank's packed rows [row_counts[rank], bytes a token] of each cache; the views of all."""
        self.ready(layer)
        if self.passage.read.path is ViewPath.FULL:
            return {
                cache: self._full(shard, cache, rows[cache]) for cache, shard in self.layers[layer].items()
            }
        if self.passage.read.path is ViewPath.NONE:
            for cache, shard in self.layers[layer].items():
                self._write(shard, cache, rows[cache])
            return {}
        history = self._history(layer)
        current = {
            cache: self._current(shard, cache, rows[cache]) for cache, shard in self.layers[layer].items()
        }
        if self.passage.read.prefetch and layer + 1 < len(self.layers):
            self._begin(layer + 1)
        if self.passage.read.path is ViewPath.CURRENT:
            return current
        extents = self.passage.plan.extents
        return {cache: join_history(history[cache], current[cache], extents) for cache in current}

    def _full(self, shard: Shard, cache: Cache, rows: torch.Tensor) -> torch.Tensor:
        self._write(shard, cache, rows)
        assert self.passage.pages is not None
        return materialize(shard, self.passage.pages, group=self.group, site=f"{cache.name.lower()}.view")

    def _write(self, shard: Shard, cache: Cache, rows: torch.Tensor) -> None:
        direct = self.passage.write.path is WritePath.DIRECT
        written = rows if direct else self._gathered(rows, f"{cache.name.lower()}.write")
        shard.write(self.passage.writes, written)

    def _current(self, shard: Shard, cache: Cache, rows: torch.Tensor) -> torch.Tensor:
        """The current rows of the view, [real rows, bytes a token]; written on the way."""
        batch = self._gathered(rows, f"{cache.name.lower()}.current")
        direct = self.passage.write.path is WritePath.DIRECT
        shard.write(self.passage.writes, rows if direct else batch)
        return batch[: self.passage.plan.real_rows]

    def _gathered(self, rows: torch.Tensor, site: str) -> torch.Tensor:
        """All packed rows in batch order, [num_rows, bytes a token] (S4)."""
        return gather_rows(rows, self.passage, group=self.group, site=site)

    def _begin(self, layer: int) -> None:
        pages = self.passage.pages
        if pages is None:
            return
        self.ready(layer)
        self._under_way[layer] = {
            cache: start_gather(
                contribute(shard, pages),
                pages.layout.page_counts,
                group=self.group,
                site=f"{cache.name.lower()}.history",
            )
            for cache, shard in self.layers[layer].items()
        }

    def _history(self, layer: int) -> dict[Cache, torch.Tensor]:
        if layer not in self._under_way:
            self._begin(layer)
        pages = self.passage.pages
        if pages is None:
            return {}
        return {
            cache: assemble(pending.wait(), pages, self.layers[layer][cache].format)
            for cache, pending in self._under_way.pop(layer).items()
        }
