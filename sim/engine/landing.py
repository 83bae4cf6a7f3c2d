"""The bytes of decode: they come from the shards of all ranks, then decode goes on alone (laws T2, T4, T5).

Every rank plays decode beside itself, with a cache of its own: so each knows what decode would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from refmodel.collectives import gather_buffers
from refmodel.layout.ownership import PageTable
from refmodel.layout.rows import buffer_places
from refmodel.serving.transfer import put_pages, take_pages
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Shard, empty_shard
from sim.engine.decode_server import Decoding, decode_grid, decode_pages
from sim.engine.held import Held
from sim.engine.storage import Storage
from sim.engine.transfer import Parcel
from sim.histories.history import History


class Landing:
    """Decode's cache, of both caches in every layer. :meth:`land` and :meth:`decode` write it."""

    def __init__(self, history: History, storage: Storage) -> None:
        self.storage = storage
        self.grid = decode_grid(history)
        self.local_pages = decode_pages(history) + 1

    @cached_property
    def layers(self) -> tuple[dict[Cache, Shard], ...]:
        """Made with the first pages that arrive: most histories send nothing."""
        device, formats = self.storage.device, self.storage.rows.formats
        return tuple(
            {
                cache: empty_shard(self.grid, 0, row_format, self.local_pages, device=device)
                for cache, row_format in formats.items()
            }
            for _ in self.storage.layers
        )

    def land(self, parcels: Sequence[Parcel]) -> None:
        """Bring the pages of these parcels: one gather a cache and layer, none if there are no pages."""
        if not parcels:
            return
        ranks = range(self.storage.grid.world_size)
        by_rank = [[parcel for parcel in parcels if parcel.message.rank == rank] for rank in ranks]
        counts = [sum(len(parcel.pages) for parcel in of_rank) for of_rank in by_rank]
        places = buffer_places(counts).to(self.storage.device)
        to = [page for of_rank in by_rank for parcel in of_rank for page in parcel.pages]
        mine = [parcel.message for parcel in by_rank[self.storage.rank]]
        pairs = {
            Cache.KV: [pair for message in mine for pair in message.pairs],
            Cache.INDEX: [pair for message in mine for pair in message.index_pairs],
        }
        for shards, landing in zip(self.storage.layers, self.layers, strict=True):
            for cache, shard in shards.items():
                taken = take_pages(shard, pairs[cache])
                site = f"{cache.name.lower()}.send"
                buffers = gather_buffers(taken, counts, group=self.storage.group, site=site)
                put_pages(landing[cache], to, buffers[places])

    def decode(self, name: str, decoding: Decoding) -> None:
        """Compute the last token of a request on decode's own rows, and compare (T5)."""
        held = self._held(name, decoding)
        self.storage.findings += self.storage.rows.append(held)
        self._compare(held)

    def compare(self, name: str, decoding: Decoding) -> None:
        """What decode reads of a request, beside the truth (T5)."""
        self._compare(self._held(name, decoding))

    def _compare(self, held: Held) -> None:
        for layer, shards in enumerate(self.layers):
            for cache in shards:
                packed = held.packed(layer, cache)
                self.storage.digest.update(packed.numpy().tobytes())
                self.storage.rows_checked += len(packed)
        self.storage.findings += self.storage.rows.compare(held)

    def _held(self, name: str, decoding: Decoding) -> Held:
        table = PageTable(torch.tensor(decoding.pages), self.grid, name)
        slots = table.slots(torch.arange(len(decoding.ids))).to(self.storage.device)
        return Held(name, decoding.ids, slots, self.layers, self.storage.rank)
