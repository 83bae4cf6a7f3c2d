"""Whose a row is, as an identity: a function of the tokens up to its own, or up to the next (law L8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.storage.identity import Cache
from sim.engine.truth import Ids, prefix_hashes, sampled_id, tags


@dataclass(frozen=True, slots=True)
class TagTruth:
    """The truth of every layer and cache."""

    pairs_from: int | None  # first layer of a draft model whose rows depend on the next token too, if any

    def rows(self, ids: Ids, hashes: Ids, stop: int, layer: int, cache: Cache) -> torch.Tensor:
        """int64 [stop] of the first tokens of ``ids``; behind the last of those stands what it samples."""
        if self.pairs_from is not None and layer >= self.pairs_from:
            hashes = prefix_hashes(sampled_id(ids, hashes))[1:]
        return tags(hashes[:stop], layer, cache)
