"""Caches that hold what a model computes, judged when all ranks are together.

Arithmetic is on the CPU in every world, since the bits of a sum depend on the device; rows lie and travel on
the device of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from refmodel.errors import Finding
from refmodel.layout.ownership import PageTable
from refmodel.model.batch import batch_rows
from refmodel.model.forward import Output, forward
from refmodel.model.replicated import Replicated, replicated
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage
from refmodel.storage.traffic import Shards
from sim.cases.arithmetic import Arithmetic
from sim.cases.case import Case, Forward, Origin


class Numbers:
    """Rows of a model."""

    def __init__(self, case: Case, arithmetic: Arithmetic) -> None:
        self.case, self.arithmetic = case, arithmetic
        self.model = arithmetic.model()
        self.outputs: list[Output] = []
        self.prefixes: dict[int, Replicated] = {}

    def cached(self, table: PageTable, origin: Origin, layer: int, cache: Cache) -> torch.Tensor:
        """The packed rows of a prefix that was in cache before the first step: as one rank computes them."""
        if origin.request not in self.prefixes:
            ids = self.arithmetic.tokens(origin.request, origin.stop)
            self.prefixes[origin.request] = replicated(self.model, ids)
        return self.prefixes[origin.request].layers[layer].rows[cache]

    def views(
        self, group: dist.ProcessGroup, passage: Passage, step: Forward, shards: Sequence[Shards]
    ) -> Iterator[tuple[int, Cache, torch.Tensor]]:
        """Serve one forward: (layer, cache, view), in order."""
        ids = [
            self.arithmetic.tokens(turn.request, turn.extent.end)[turn.extent.prefix :] for turn in step.turns
        ]
        batch = batch_rows(passage, torch.cat(ids), self.model.device)
        output = forward(group, self.model, batch, shards)
        self.outputs.append(output)
        for layer, trace in enumerate(output.layers):
            for cache, view in trace.views.items():
                yield layer, cache, view

    def check(self, view: torch.Tensor, step: Forward, layer: int, cache: Cache) -> list[Finding]:
        """Nothing yet: no rank knows the rows of the others."""
        return []

    def check_shards(self, shards: Sequence[Shards]) -> list[Finding]:
        """Nor what its shards should hold."""
        return []
