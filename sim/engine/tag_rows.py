"""Rows that say whose they are: every view is compared with the truth, token by token (law V1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from refmodel.errors import Finding, Where
from refmodel.storage.formats import TAG, Format
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage
from refmodel.storage.shard import Destinations
from refmodel.storage.traffic import Traffic
from sim.engine.held import Held
from sim.engine.read import Read
from sim.engine.tag_truth import TagTruth
from sim.engine.truth import Ids, prefix_hashes, tags
from sim.engine.turn import Turn

CACHES = (Cache.KV, Cache.INDEX)


class TagRows:
    """The rows of a rank as identities."""

    formats: dict[Cache, Format] = dict.fromkeys(CACHES, TAG)

    def __init__(self, truth: TagTruth) -> None:
        self.truth = truth

    def serve(self, passage: Passage, turns: Sequence[Turn], read: Read) -> Iterator[torch.Tensor]:
        """Write the new rows of a forward, and compare; the views, in order."""
        traffic = Traffic(passage, read.layers, read.group, ready=read.before_layer)
        own = _own_tokens(passage, turns)
        for layer in range(len(read.layers)):
            hashes = np.concatenate([_hashes(self.truth, turn, layer) for turn in turns])
            truth = {cache: tags(hashes, layer, cache) for cache in CACHES}
            # What this rank's projections would give for its rows.
            rows = {cache: TAG.encode(truth[cache][own]).to(read.device) for cache in CACHES}
            for cache, view in traffic.views(layer, rows).items():
                received = view.cpu()
                yield received
                found = TAG.unpack(received)[:, 0]
                if not torch.equal(found, truth[cache]):
                    where = Where(rank=passage.rank, layer=layer, cache=cache.name.lower())
                    read.findings.append(_wrong(found, truth[cache], turns, where, self.truth))

    def append(self, held: Held) -> Iterator[Finding]:
        """Write the rows of the last token on decode. Nothing is computed that could be wrong."""
        last = Destinations(torch.arange(1, device=held.slots.device), held.slots[-1:])
        for layer, shards in enumerate(held.layers):
            for cache, shard in shards.items():
                shard.write(last, TAG.encode(self._truth_of(held, layer, cache)[-1:]).to(held.slots.device))
        return iter(())

    def compare(self, held: Held) -> Iterator[Finding]:
        """Where decode's rows are those of other tokens, or nobody's (T5)."""
        for layer, shards in enumerate(held.layers):
            for cache in shards:
                rows = TAG.unpack(held.packed(layer, cache))[:, 0]
                truth = self._truth_of(held, layer, cache)
                if not torch.equal(rows, truth):
                    yield _wrong_on_decode(rows, truth, held.where(layer, cache))

    def _truth_of(self, held: Held, layer: int, cache: Cache) -> torch.Tensor:
        ids = held.ids
        return tags(self.truth.hashes(ids, prefix_hashes(ids), len(ids), layer), layer, cache)


def _wrong_on_decode(rows: torch.Tensor, truth: torch.Tensor, where: Where) -> Finding:
    """The first row that decode has wrong, by name."""
    wrong = (rows != truth).nonzero().flatten().tolist()
    position = wrong[0]
    known = (truth == rows[position]).nonzero().flatten().tolist()
    if known:
        received = f"its token {known[0]}"
    else:
        received = "a row of another request" if rows[position] >= 0 else "poison: nobody wrote this slot"
    return Finding(
        "T5",
        f"{len(wrong)} of {len(truth)} rows on decode, first",
        f"token {position} of request {where.request}",
        received,
        replace(where, position=position),
    )


def _own_tokens(passage: Passage, turns: Sequence[Turn]) -> torch.Tensor:
    """int64 [rows of this rank]: their places among all tokens of the batch, prefixes included."""
    ends = accumulate(turn.extent.end for turn in turns)
    new = [torch.arange(end - turn.extent.tokens, end) for turn, end in zip(turns, ends, strict=True)]
    return passage.plan.take(torch.cat(new), passage.rank)


def _hashes(truth: TagTruth, turn: Turn, layer: int) -> Ids:
    return truth.hashes(turn.ids, turn.hashes, turn.extent.end, layer)


def _wrong(
    rows: torch.Tensor, expected: torch.Tensor, turns: Sequence[Turn], where: Where, truth: TagTruth
) -> Finding:
    """The first wrong row of a view, by name."""
    if len(rows) != len(expected):
        return Finding("V1", "length of the view", str(len(expected)), str(len(rows)), where)
    wrong = (rows != expected).nonzero().flatten()
    position = int(wrong[0])
    for turn in turns:
        name = turn.name
        if position < turn.extent.end:
            break
        position -= turn.extent.end
    return Finding(
        "V1",
        f"{len(wrong)} of {len(expected)} rows of the view, first",
        f"token {position} of request {name}",
        _who(int(rows[wrong[0]]), turns, where, truth),
        replace(where, request=name, position=position),
    )


def _who(tag: int, turns: Sequence[Turn], where: Where, truth: TagTruth) -> str:
    """Whose row a tag is, as far as the batch knows."""
    if tag < 0:
        return "poison: nobody wrote this slot"
    for turn in turns:
        for cache in CACHES:
            for layer in range((where.layer or 0) + 1):
                rows = tags(_hashes(truth, turn, layer), layer, cache)
                found = (rows == tag).nonzero().flatten()
                if len(found):
                    return (
                        f"token {int(found[0])} of request {turn.name} ({cache.name.lower()}, layer {layer})"
                    )
    return "a token of another request"
