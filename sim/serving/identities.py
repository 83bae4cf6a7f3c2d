"""Caches that hold who each token is: a wrong row names the token, not a tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from refmodel.collectives import device_of
from refmodel.errors import Finding
from refmodel.layout.ownership import PageTable
from refmodel.layout.plan import PADDING
from refmodel.model.forward import Output
from refmodel.model.replicated import Replicated
from refmodel.storage.baseline import Replica, empty_replica
from refmodel.storage.identity import PADDING_TAG, Cache, pack
from refmodel.storage.passage import Passage
from refmodel.storage.traffic import Shards, Traffic
from sim.cases.case import Case, Forward, Origin, Turn
from sim.serving.checks import check_bytes, check_shard, check_view


class Identities:
    """Rows that are functions of identity, the replicated baseline beside them, and the truth of both."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.outputs: tuple[Output, ...] = ()  # nothing is computed
        self.prefixes: dict[int, Replicated] = {}
        self.replicas: dict[tuple[int, Cache], Replica] = {}
        if "bytes" in case.checks:
            P, pages = case.grid.page_size, case.local_pages * case.grid.world_size
            self.replicas = {
                (layer, cache): empty_replica(P, case.formats[cache], pages) for layer, cache in case.planes()
            }

    def cached(self, table: PageTable, origin: Origin, layer: int, cache: Cache) -> torch.Tensor:
        """The packed rows of what was in cache before the first step; the baseline gets them too."""
        rows = self.case.formats[cache].encode(origin.tags(layer, cache))
        if self.replicas:
            self.replicas[layer, cache].write(table.pages, origin.start, rows)
        return rows

    def views(
        self, group: dist.ProcessGroup, passage: Passage, forward: Forward, shards: Sequence[Shards]
    ) -> Iterator[tuple[int, Cache, torch.Tensor]]:
        """Serve one forward: (layer, cache, view), in order."""
        traffic = Traffic(passage, tuple(shards), group)
        for layer in range(self.case.layers):
            rows = {
                cache: row_format.encode(self._local_tags(passage, forward, layer, cache)).to(
                    device_of(group)
                )
                for cache, row_format in self.case.formats.items()
            }
            for cache, view in traffic.views(layer, rows).items():
                yield layer, cache, view.cpu()

    def check(self, view: torch.Tensor, forward: Forward, layer: int, cache: Cache) -> list[Finding]:
        """V1: every row is who it should be, and its bytes are those of the baseline."""
        wrong = list(check_view(view, self.case, forward, layer, cache, self.rank))
        if self.replicas:
            whole = self._baseline_view(forward, layer, cache)
            wrong = wrong or list(check_bytes(view, whole, forward, layer, cache, self.rank))
        return wrong

    def check_shards(self, shards: Sequence[Shards]) -> list[Finding]:
        """O3: each shard holds the tokens it owns, and nothing else."""
        return [
            finding
            for layer, of_layer in enumerate(shards)
            for cache, shard in of_layer.items()
            for finding in check_shard(shard, self.case, layer, cache, partial(self._truth, layer, cache))
        ]

    def _truth(self, layer: int, cache: Cache, turn: Turn) -> torch.Tensor:
        return self.case.formats[cache].encode(turn.tags(layer, cache))

    def _local_tags(self, passage: Passage, forward: Forward, layer: int, cache: Cache) -> torch.Tensor:
        """Identities of this rank's local rows: what its projections would compute."""
        plan = passage.plan
        rows = plan.rows(self.rank)
        requests = plan.request_of_row[rows]
        tags = pack(
            request=torch.tensor([turn.request for turn in forward.turns])[requests],
            position=plan.positions[rows].clamp(min=0),
            layer=layer,
            cache=cache,
            write=forward.step,
        )
        return torch.where(requests != PADDING, tags, PADDING_TAG)

    def _baseline_view(self, forward: Forward, layer: int, cache: Cache) -> torch.Tensor:
        """Write the new rows of all requests into the replicated baseline and read the batch back."""
        replica = self.replicas[layer, cache]
        for turn in forward.turns:
            new = turn.tags(layer, cache)[turn.extent.prefix :]
            replica.write(turn.table.pages, turn.extent.prefix, self.case.formats[cache].encode(new))
        return replica.view([(turn.table.pages, turn.extent.end) for turn in forward.turns])
