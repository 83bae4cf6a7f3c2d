"""The rank program: every forward of a case, on one rank. Runs unchanged on every world."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from refmodel.attention.mla import dense_mla
from refmodel.collectives import all_gather_rows, device_of, rank_and_size
from refmodel.errors import Finding, InvalidInput
from refmodel.layout.ownership import current_slots, to_physical
from refmodel.layout.plan import PADDING, Plan
from refmodel.storage.baseline import Replica, empty_replica
from refmodel.storage.identity import PADDING_TAG, Cache, contents, pack
from refmodel.storage.shard import Shard, empty_shard
from refmodel.storage.view import ViewLayout, materialize, view_layout
from refmodel.storage.write import Verdict, warn_of_fallback, write_current, write_verdict
from sim.cases.case import ATTENTION, Case, Forward
from sim.serving.checks import check_bytes, check_shard, check_view

MOST_FINDINGS = 5  # a rank stops looking after so many; one is enough to fail
SM_SCALE = ATTENTION.width**-0.5


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """What one rank found."""

    rank: int
    digest: str  # of every view and output, in order: equal on all ranks, worlds and runs
    findings: tuple[Finding, ...]
    fallbacks: int  # forwards that took the gathered write
    rows_checked: int
    outputs: tuple[torch.Tensor, ...]  # attention in batch order, each forward and layer; on rank 0 only


def serve(group: dist.ProcessGroup, case: Case) -> RankReport:
    """Run a case on this rank: plan → write → materialize → check → attend, forward by forward."""
    rank, size = rank_and_size(group)
    if size != case.grid.world_size:
        raise InvalidInput("world of a case", expected=f"{case.grid.world_size} ranks", received=size)
    server = Server(case, rank, group)
    server.preload()
    for forward in case.forwards:
        server.step(forward)
    return server.report()


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The index work of one forward, done once and shared by all caches and layers (O1)."""

    forward: Forward
    plan: Plan
    physical: torch.Tensor  # [num_rows] physical slots of the batch rows on this rank
    verdict: Verdict
    layout: ViewLayout


class Server:
    """One rank: its shards, the replicated baseline beside them, and what it found so far."""

    def __init__(self, case: Case, rank: int, group: dist.ProcessGroup) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.device = device_of(group)  # rows live there; index tensors stay on the CPU
        self.shards: dict[tuple[int, Cache], Shard] = {
            plane: empty_shard(case.grid, rank, case.format, case.local_pages, device=self.device)
            for plane in case.planes()
        }
        self.replicas: dict[tuple[int, Cache], Replica] = {}
        if "bytes" in case.checks:
            pages = case.local_pages * case.grid.world_size
            self.replicas = {
                plane: empty_replica(case.grid.page_size, case.format, pages) for plane in case.planes()
            }
        self.digest = hashlib.sha256()
        self.findings: list[Finding] = []
        self.outputs: list[torch.Tensor] = []
        self.fallbacks = 0
        self.rows_checked = 0

    def preload(self) -> None:
        """Put what the scenario finds in cache where it lies; no collective."""
        for table, origin in self.case.preloads():
            slots = table.slots(torch.arange(origin.start, origin.stop))
            physical = to_physical(slots, self.rank, self.case.grid)
            for (layer, cache), shard in self.shards.items():
                rows = self.case.format.encode(origin.tags(layer, cache))
                shard.write(physical, rows.to(self.device))
                if self.replicas:
                    self.replicas[layer, cache].write(table.pages, origin.start, rows)

    def step(self, forward: Forward) -> None:
        prepared = self.prepare(forward)
        self.fallbacks += warn_of_fallback(prepared.verdict)
        for layer in range(self.case.layers):
            views = {cache: self.write_and_view(prepared, layer, cache) for cache in self.case.caches}
            if "attention" in self.case.checks:
                self._attend(prepared, layer, views[Cache.KV])

    def prepare(self, forward: Forward) -> Prepared:
        grid = self.case.grid
        plan = forward.plan(grid, self.case.split)
        slots = current_slots(plan, forward.tables)
        return Prepared(
            forward,
            plan,
            physical=to_physical(slots, self.rank, grid),
            verdict=write_verdict(plan, slots),
            layout=view_layout(forward.tables, forward.valid, grid),
        )

    def write_and_view(self, prepared: Prepared, layer: int, cache: Cache) -> torch.Tensor:
        forward, plan, shard = prepared.forward, prepared.plan, self.shards[layer, cache]
        rows = self.case.format.encode(self._local_tags(prepared, layer, cache)).to(self.device)
        site = cache.name.lower()
        write_current(
            shard, plan, prepared.verdict, rows, prepared.physical, group=self.group, site=f"{site}.write"
        )
        view = materialize(shard, prepared.layout, group=self.group, site=f"{site}.view").cpu()
        self.digest.update(view.numpy().tobytes())
        self.rows_checked += len(view)
        wrong = list(check_view(view, self.case, forward, layer, cache, self.rank))
        if self.replicas:
            whole = self._baseline_view(prepared, layer, cache)
            wrong = wrong or list(check_bytes(view, whole, forward, layer, cache, self.rank))
        self._find(*wrong)
        return view

    def _local_tags(self, prepared: Prepared, layer: int, cache: Cache) -> torch.Tensor:
        """Identities of this rank's local rows: what its projections would compute."""
        plan, turns = prepared.plan, prepared.forward.turns
        rows = plan.rows(self.rank)
        requests = plan.request_of_row[rows]
        real = requests != PADDING
        tags = pack(
            request=torch.tensor([turn.request for turn in turns])[requests],
            position=plan.positions[rows].clamp(min=0),
            layer=layer,
            cache=cache,
            write=prepared.forward.step,
        )
        return torch.where(real, tags, PADDING_TAG)

    def _baseline_view(self, prepared: Prepared, layer: int, cache: Cache) -> torch.Tensor:
        """Write the new rows of all requests into the replicated baseline and read the batch back."""
        replica, forward = self.replicas[layer, cache], prepared.forward
        for turn in forward.turns:
            new = turn.tags(layer, cache)[turn.extent.prefix :]
            replica.write(turn.table.pages, turn.extent.prefix, self.case.format.encode(new))
        return replica.view([(turn.table.pages, turn.extent.end) for turn in forward.turns])

    def _attend(self, prepared: Prepared, layer: int, kv: torch.Tensor) -> None:
        """Dense causal attention of this rank's rows, prev and next apart, gathered back to batch order.

        Computed on the CPU on every world, since the bits of a sum depend on the device.
        """
        plan = prepared.plan
        q = queries(self._local_tags(prepared, layer, Cache.QUERY))
        parts = []
        for half, q_half in zip(plan.halves(self.rank), plan.cut(q, self.rank), strict=True):
            ks, ke = plan.visibility(half.rows)
            parts.append(dense_mla(q_half, kv, ks, ke, latent=ATTENTION.latent, sm_scale=SM_SCALE))
        local = torch.cat(parts).to(self.device)
        gathered = all_gather_rows(local, plan.row_counts, group=self.group, site="attention.out")
        output = plan.rerange(gathered.cpu())[: plan.real_rows]
        self.digest.update(output.numpy().tobytes())
        if self.rank == 0:
            self.outputs.append(output)

    def _find(self, *findings: Finding) -> None:
        self.findings.extend(findings[: MOST_FINDINGS - len(self.findings)])

    def report(self) -> RankReport:
        if "isolation" in self.case.checks:
            for (layer, cache), shard in self.shards.items():
                self._find(*check_shard(shard, self.case, layer, cache))
        return RankReport(
            rank=self.rank,
            digest=self.digest.hexdigest(),
            findings=tuple(self.findings),
            fallbacks=self.fallbacks,
            rows_checked=self.rows_checked,
            outputs=tuple(self.outputs),
        )


def queries(tags: torch.Tensor) -> torch.Tensor:
    """Query rows [n, heads, width] of identities [n] (cache ``QUERY``), fp64."""
    rows = contents(tags, ATTENTION.heads * ATTENTION.width, torch.float64)
    return rows.view(len(tags), ATTENTION.heads, ATTENTION.width)
