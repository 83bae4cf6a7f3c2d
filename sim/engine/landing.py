"""The bytes of a transfer: from the shards of all ranks to decode's cache (laws T2, T4, T5).

Every rank plays decode beside itself, with a cache of its own: so each knows what decode would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from refmodel.collectives import gather_buffers
from refmodel.errors import Finding, Where
from refmodel.layout.ownership import PageTable
from refmodel.layout.rows import buffer_places
from refmodel.serving.transfer import put_pages, take_pages
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Shard, empty_shard
from sim.engine.request import Request
from sim.engine.sending import Arrived, Parcel, decode_grid, decode_pages
from sim.engine.storage import Storage
from sim.engine.tag_rows import CACHES
from sim.engine.truth import tags
from sim.histories.history import History


class Landing:
    """Decode's cache, of both caches in every layer. :meth:`land` alone writes it."""

    def __init__(self, history: History, storage: Storage) -> None:
        self.storage = storage
        self.grid = decode_grid(history)
        self.local_pages = decode_pages(history) + 1

    @cached_property
    def layers(self) -> tuple[dict[Cache, Shard], ...]:
        """Made with the first pages that arrive: most histories send nothing."""
        device = self.storage.device
        return tuple(
            {cache: empty_shard(self.grid, 0, TAG, self.local_pages, device=device) for cache in CACHES}
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

    def compare(self, name: str, request: Request, arrived: Arrived) -> None:
        """What decode reads of a request, beside the truth (T5)."""
        table = PageTable(torch.tensor(arrived.pages), self.grid, name)
        slots = table.slots(torch.arange(arrived.tokens)).to(self.storage.device)
        for layer, shards in enumerate(self.layers):
            for cache, shard in shards.items():
                packed = shard.rows[slots].cpu()
                self.storage.digest.update(packed.numpy().tobytes())
                self.storage.rows_checked += len(packed)
                truth = tags(request.hashes[: arrived.tokens], layer, cache)
                where = Where(rank=self.storage.rank, request=name, layer=layer, cache=cache.name)
                self.storage.findings += _wrong(TAG.unpack(packed)[:, 0], truth, where)


def _wrong(rows: torch.Tensor, truth: torch.Tensor, where: Where) -> list[Finding]:
    """The first row that decode has wrong, by name."""
    wrong = (rows != truth).nonzero().flatten().tolist()
    if not wrong:
        return []
    position = wrong[0]
    known = (truth == rows[position]).nonzero().flatten().tolist()
    if known:
        received = f"its token {known[0]}"
    else:
        received = "a row of another request" if rows[position] >= 0 else "poison: nobody wrote this slot"
    return [
        Finding(
            "T5",
            f"{len(wrong)} of {len(truth)} rows on decode, first",
            f"token {position} of request {where.request}",
            received,
            replace(where, position=position),
        )
    ]
