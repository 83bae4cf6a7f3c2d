"""A request on decode: its tokens, and where decode keeps their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from refmodel.errors import Where
from refmodel.storage.identity import Cache
from refmodel.storage.pages import read_rows
from refmodel.storage.traffic import Shards
from sim.engine.truth import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Decode's cache as a request sees it. Each rank plays decode beside itself."""

    name: str
    ids: Ids  # [tokens], those that have rows
    slots: torch.Tensor  # [tokens] of decode's cache, on its device
    layers: Sequence[Shards]
    rank: int  # which plays decode

    def packed(self, layer: int, cache: Cache) -> torch.Tensor:
        """The rows of all tokens [tokens, bytes a token], on the CPU."""
        shard = self.layers[layer][cache]
        return read_rows(shard.pages, self.slots, shard.format).cpu()

    def where(self, layer: int, cache: Cache) -> Where:
        return Where(rank=self.rank, request=self.name, layer=layer, cache=cache.name.lower())
