"""The rank program: every forward of a case, on one rank. Runs unchanged on every world."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.distributed as dist

from refmodel.collectives import device_of, rank_and_size
from refmodel.errors import Finding, InvalidInput
from refmodel.layout.ownership import to_physical
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage, open_passage
from refmodel.storage.shard import Shard, destinations, empty_shard
from sim.cases.case import Case, Forward
from sim.serving.drafting import embed_draft_rows
from sim.serving.identities import Identities
from sim.serving.numbers import Numbers
from sim.serving.report import RankReport

MOST_FINDINGS = 5  # a rank stops looking after so many; one is enough to fail


def serve(group: dist.ProcessGroup, case: Case) -> RankReport:
    """Run a case on this rank: plan → write → view → check, forward by forward."""
    rank, size = rank_and_size(group)
    if size != case.grid.world_size:
        raise InvalidInput("world of a case", expected=f"{case.grid.world_size} ranks", received=size)
    server = Server(case, rank, group)
    server.preload()
    for forward in case.forwards:
        server.step(forward)
    return server.report()


class Server:
    """One rank: its shards, what they should hold, and what it found so far."""

    def __init__(self, case: Case, rank: int, group: dist.ProcessGroup) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.device = device_of(group)  # rows live there
        self.shards = tuple(
            {
                cache: empty_shard(case.grid, rank, row_format, case.local_pages, device=self.device)
                for cache, row_format in case.formats.items()
            }
            for _ in range(case.layers)
        )
        self.rows: Identities | Numbers = (
            Identities(case, rank) if case.arithmetic is None else Numbers(case, case.arithmetic)
        )
        self.digest = hashlib.sha256()
        self.findings: list[Finding] = []
        self.fallbacks = 0
        self.rows_checked = 0

    def preload(self) -> None:
        """Put what the scenario finds in cache where it lies; no collective."""
        for table, origin in self.case.preloads():
            slots = table.slots(torch.arange(origin.start, origin.stop))
            physical = to_physical(slots, self.rank, self.case.grid)
            for layer, shards in enumerate(self.shards):
                for cache, shard in shards.items():
                    to = destinations(physical, shard.num_slots, self.rank, device=self.device)
                    shard.write(to, self.rows.cached(table, origin, layer, cache).to(self.device))

    def step(self, forward: Forward) -> None:
        passage = self.open(forward)
        self.fallbacks += passage.warn()
        for layer, cache, view in self.rows.views(self.group, passage, forward, self.shards):
            self._digest(view)
            self.rows_checked += len(view)
            self._find(*self.rows.check(view, forward, layer, cache))
        if "draft" in self.case.checks:
            drafted = embed_draft_rows(self.case, forward.step - 1, self.rank)
            self.fallbacks += drafted.fell_back
            self._find(*drafted.findings)
        if isinstance(self.rows, Numbers):
            self._digest(self.rows.outputs[-1].hidden)

    def open(self, forward: Forward) -> Passage:
        """The index work of a forward, done once for all caches and layers (O1)."""
        return open_passage(
            forward.plan(self.case.grid, self.case.split),
            forward.tables,
            self.rank,
            local_pages=self.case.local_pages,
            asked=self.case.reading,
            device=self.device,
        )

    def _digest(self, rows: torch.Tensor) -> None:
        self.digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())

    def _find(self, *findings: Finding) -> None:
        self.findings.extend(findings[: MOST_FINDINGS - len(self.findings)])

    def report(self) -> RankReport:
        if "isolation" in self.case.checks:
            self._find(*self.rows.check_shards(self.shards))
        return RankReport(
            rank=self.rank,
            digest=self.digest.hexdigest(),
            findings=tuple(self.findings),
            fallbacks=self.fallbacks,
            rows_checked=self.rows_checked,
            outputs=tuple(self.rows.outputs),
            cached=self.rows.prefixes,
            shards=self._stored() if self.case.arithmetic is not None else (),
        )

    def _stored(self) -> tuple[dict[Cache, Shard], ...]:
        """The shards as they are now, on the CPU."""
        return tuple(
            {cache: replace(shard, pages=shard.pages.cpu()) for cache, shard in shards.items()}
            for shards in self.shards
        )
