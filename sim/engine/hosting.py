"""The host pages of one rank, and how bytes get there and back (laws H1, H4, H5).

Each rank backs up and loads the pages it owns. Only a page that lands in another lane than that of its host
copy travels between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from refmodel.collectives import gather_buffers
from refmodel.config import ServingConfig
from refmodel.errors import Finding, Where
from refmodel.layout.rows import buffer_places
from refmodel.serving.host_layouts import HostPool, empty_host_pool
from refmodel.serving.host_moves import Fill, Landing, Move, backed_up_by
from refmodel.serving.page_groups import PagePairs
from refmodel.serving.stored_prefix import own_prefix
from refmodel.storage.identity import Cache
from sim.engine.loading import cache_layers
from sim.engine.shelf import Shelf
from sim.engine.storage import Storage
from sim.histories.history import History

CACHE_OF = {"kv": Cache.KV, "index": Cache.INDEX, "draft_kv": Cache.KV, "draft_index": Cache.INDEX}


class Hosting:
    """The pools of one rank, one a cache, beside its shards; with storage, its files too."""

    def __init__(self, history: History, settings: ServingConfig, storage: Storage) -> None:
        self.storage = storage
        self.rank, self.grid = storage.rank, storage.grid
        self.first_draft_layer = history.layers
        self.layers = cache_layers(history)
        self.pools: dict[str, HostPool] = {
            cache: empty_host_pool(
                settings.host_layout,
                settings.copy_engine,
                CACHE_OF[cache],
                storage.layers[0][CACHE_OF[cache]].format,
                page_size=history.page_size,
                layers=layers,
                num_pages=history.host_pages_per_lane,
            )
            for cache, layers in self.layers.items()
        }
        self.shelf = Shelf(self.rank) if history.storage else None

    def close(self) -> None:
        """Remove the files."""
        if self.shelf is not None:
            self.shelf.close()

    # -- device and host ---------------------------------------------------------------------------------

    def back_up(self, fill: Fill, pages: Sequence[int]) -> None:
        """Device pages that this rank owns to its host pages, and to its storage (H5)."""
        mine = backed_up_by(self.rank, fill, pages, self.grid.world_size)
        for cache, pool in self.pools.items():
            for layer in range(pool.layers):
                pool.store(mine, layer, self._device_pages(cache, layer))
        if self.shelf is not None:
            own = [move for move in fill.moves if move.lane == self.rank and move.host_page in mine.host]
            for cache in self.pools:
                contents = self._taken_out(cache, [move.host_page for move in own])
                for move, data in zip(own, contents, strict=True):
                    self.shelf.put(move.key, cache, data)

    def bring(self, landing: Landing, cache: str, layer: int) -> None:
        """One layer of a cache of a load to the device; what moved comes from another rank (H4)."""
        pages = self._device_pages(cache, layer)
        self.pools[cache].load(landing.pairs(self.rank, self.rank), layer, pages)
        if landing.moved:
            self._bring_moved(landing, cache, layer, pages)

    def _bring_moved(self, landing: Landing, cache: str, layer: int, pages: torch.Tensor) -> None:
        """The pages that changed their owner: one gather, each lane's in the order of who gets them."""
        ranks = range(self.grid.world_size)
        ways = {(lane, to): landing.pairs(lane, to) for lane in ranks for to in ranks if to != lane}
        counts = [sum(len(pairs) for way, pairs in ways.items() if way[0] == lane) for lane in ranks]
        sent = [host for way, pairs in ways.items() if way[0] == self.rank for host in pairs.host]
        staged = self._staged(cache, len(sent))
        self.pools[cache].load(PagePairs(tuple(sent), tuple(range(1, len(sent) + 1))), layer, staged)
        site = f"{cache}.load"
        gathered = gather_buffers(staged[1:], counts, group=self.storage.group, site=site)
        every = [(to, page) for (_, to), pairs in ways.items() for page in pairs.device]
        places = buffer_places(counts).tolist()
        mine = [(place, page) for place, (to, page) in zip(places, every, strict=True) if to == self.rank]
        index = torch.tensor(mine, dtype=torch.int64, device=pages.device).view(-1, 2)
        pages[index[:, 1]] = gathered[index[:, 0]]

    def _device_pages(self, cache: str, layer: int) -> torch.Tensor:
        """uint8 [local pages, page bytes] of a layer, of the model or of its draft model."""
        behind = self.first_draft_layer if cache.startswith("draft") else 0
        return self.storage.layers[behind + layer][CACHE_OF[cache]].pages

    def _page_bytes(self, cache: str) -> int:
        return self.pools[cache].format.page_bytes(self.grid.page_size)

    def _staged(self, cache: str, count: int) -> torch.Tensor:
        """Room for so many pages of a layer, behind a dummy page."""
        size = self._page_bytes(cache)
        return torch.zeros(count + 1, size, dtype=torch.uint8, device=self.storage.device)

    # -- host and storage --------------------------------------------------------------------------------

    def _taken_out(self, cache: str, host_pages: Sequence[int]) -> list[bytes]:
        """The bytes of each host page, layer by layer: the same whatever the layout."""
        pool, count = self.pools[cache], len(host_pages)
        layers = []
        for layer in range(pool.layers):
            staged = self._staged(cache, count)
            pool.load(PagePairs(tuple(host_pages), tuple(range(1, count + 1))), layer, staged)
            layers.append(staged[1:].cpu().numpy())
        return [b"".join(layer[i].tobytes() for layer in layers) for i in range(count)]

    def _put_in(self, cache: str, host_page: int, data: bytes) -> None:
        pool, staged = self.pools[cache], self._staged(cache, 1)
        layers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(pool.layers, -1)
        for layer, part in enumerate(layers):
            staged[1] = part
            pool.store(PagePairs((host_page,), (1,)), layer, staged)

    def _read(self, key: int, cache: str) -> bytes | None:
        """The file of a page, if it is there and sound."""
        if self.shelf is None:
            return None
        return self.shelf.get(key, cache, self.layers[cache] * self._page_bytes(cache))

    def available(self, keys: Sequence[int], lanes: Sequence[int]) -> int:
        """Leading pages that the storage of all ranks has: the least number over ranks (H3)."""
        own = [key for key, lane in zip(keys, lanes, strict=True) if lane == self.rank]
        present = {cache: [self._read(key, cache) is not None for key in own] for cache in self.pools}
        count = own_prefix(lanes, self.rank, present, list(self.pools))
        counts = [1] * self.grid.world_size
        mine = torch.tensor([[count]], device=self.storage.device)
        return int(gather_buffers(mine, counts, group=self.storage.group, site="storage.prefix").min())

    def fetch(self, fill: Fill, keys: Sequence[int], arrived: Mapping[str, int]) -> None:
        """Files of this rank to its host pages: of each cache the first so many moves (H5)."""
        for cache, count in arrived.items():
            for move in fill.moves[:count]:
                if move.lane != self.rank:
                    continue
                data = self._read(keys[move.position], cache)
                if data is None:
                    self.storage.findings.append(_missed(move, cache))
                else:
                    self._put_in(cache, move.host_page, data)

    def spoil(self, key: int, cache: str, how: str) -> None:
        """A file of this rank goes bad; nothing happens where another rank has it."""
        if self.shelf is not None:
            self.shelf.spoil(key, cache, how)


def _missed(move: Move, cache: str) -> Finding:
    """Ranks agreed on what storage has."""
    where = Where(rank=move.lane, cache=cache)
    return Finding("H3", "file of a page that is fetched", "there and sound", "a miss", where)
