"""Rows that say whose they are: every view is compared with the truth, token by token (law V1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from refmodel.errors import Finding, Where
from refmodel.storage.formats import TAG, Format
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage
from refmodel.storage.traffic import Traffic
from sim.engine.read import Read
from sim.engine.truth import tags
from sim.engine.turn import Turn

CACHES = (Cache.KV, Cache.INDEX)


class TagRows:
    """The rows of a rank as identities."""

    formats: dict[Cache, Format] = dict.fromkeys(CACHES, TAG)

    def serve(self, passage: Passage, turns: Sequence[Turn], read: Read) -> Iterator[torch.Tensor]:
        """Write the new rows of a forward, and compare; the views, in order."""
        traffic = Traffic(passage, read.layers, read.group)
        ahead = int(passage.read.prefetch)  # layers whose history is read before this one attends (V5)
        hashes = np.concatenate([turn.hashes[: turn.extent.end] for turn in turns])
        mine = _places_of_rows(passage)
        for layer in range(len(read.layers)):
            for needed in range(layer, min(layer + ahead + 1, len(read.layers))):
                read.before_layer(needed)
            truth = {cache: tags(hashes, layer, cache) for cache in CACHES}
            rows = {cache: TAG.encode(truth[cache][mine]).to(read.device) for cache in CACHES}
            for cache, view in traffic.views(layer, rows).items():
                received = view.cpu()
                yield received
                stored = TAG.unpack(received)[:, 0]
                if not torch.equal(stored, truth[cache]):
                    where = Where(rank=passage.rank, layer=layer, cache=cache.name.lower())
                    read.findings.append(_wrong(stored, truth[cache], turns, where))


def _places_of_rows(passage: Passage) -> torch.Tensor:
    """[row_counts[rank]] where this rank's rows are among all tokens of the batch, history and new ones."""
    plan = passage.plan
    rows = plan.rows(passage.rank)
    return torch.tensor(plan.key_starts)[plan.request_of_row[rows]] + plan.positions[rows]


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
                known = tags(turn.hashes[: turn.extent.end], layer, cache)
                found = (known == tag).nonzero().flatten()
                if len(found):
                    return (
                        f"token {int(found[0])} of request {turn.name} ({cache.name.lower()}, layer {layer})"
                    )
    return "a token of another request"
