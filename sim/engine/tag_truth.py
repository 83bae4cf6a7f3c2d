"""Whose a row is, as an identity: a function of the tokens up to its own, or up to the next (law L8)."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.truth import Ids, prefix_hashes, sampled_id


@dataclass(frozen=True, slots=True)
class TagTruth:
    """The truth of every layer and cache."""

    pairs_from: int | None  # first layer of a draft model whose rows depend on the next token too, if any

    def hashes(self, ids: Ids, hashes: Ids, stop: int, layer: int) -> Ids:
        """[stop] on what each of the first rows depends. The one that follows ``ids`` is what they sample."""
        if self.pairs_from is not None and layer >= self.pairs_from:
            hashes = prefix_hashes(sampled_id(ids, hashes))[1:]
        return hashes[:stop]
