"""The rank program of a service: a trace through the engine, step by step, in bounded memory.

Bytes are compared with the truth at every read, as in a history. Tables are compared over the ranks and
checked after every so many steps, and at the end; what ranks know of a request, as it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from refmodel.collectives import gather_buffers, rank_and_size
from refmodel.errors import Finding, InvalidInput, Where
from sim.cases.service import Service
from sim.engine.driver import Driver, Steps
from sim.engine.engine import Engine
from sim.engine.play import MOST_FINDINGS, attempt
from sim.engine.request import Request
from sim.histories.history import Step

LEAVES = "request.leaves"  # site of the one call a request, by which its ranks agree on it


@dataclass(slots=True)
class Tally:
    """What came of a service, in numbers: the same on every rank."""

    steps: int = 0
    requests: int = 0  # that finished
    tokens: int = 0  # of their prompts
    device_tokens: int = 0  # of them, found in cache on the device
    host_tokens: int = 0  # and on the host
    storage_tokens: int = 0  # and in storage
    chunks: int = 0  # of prompts, computed
    decodes: int = 0  # tokens sampled
    evicted_pages: int = 0
    returned: int = 0  # requests sent back to the queue
    dropped: int = 0  # requests that got no pages even alone
    peak_live_tokens: int = 0  # slots of pages that are not free
    peak_token_bytes: int = 0  # that tables hold for tokens


@dataclass(frozen=True, slots=True)
class Served:
    """What one rank says of a service."""

    rank: int
    digest: str  # of every view, in order
    findings: tuple[Finding, ...]
    refusal: tuple[int, str] | None  # step that made no sense, and why; none of the driver's should
    rows_checked: int
    tally: Tally


@dataclass(slots=True)
class _Serving:
    """A service under way on one rank. It ends early only where all ranks agree that something is wrong."""

    service: Service
    engine: Engine
    rank: int
    driver: Driver = field(init=False)
    tally: Tally = field(default_factory=Tally)
    findings: list[Finding] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    is_over: bool = False

    def __post_init__(self) -> None:
        self.driver = Driver(self.service, self.engine.tables)

    def run(self) -> None:
        steps = self.driver.steps()
        step: Step | None = next(steps)
        while step is not None and not self.is_over:
            step = _next(steps, self._do(step))
        self.tally.returned, self.tally.dropped = self.driver.returned, self.driver.dropped
        self.tally.evicted_pages = self.engine.tables.evicted_pages
        self._found(self.engine.tables.check())
        self._agree("tables at the end", self.engine.tables.fingerprint(), "tables.compare")

    def _do(self, step: Step) -> bool:
        """Do a step, and look at what came of it: whether there were pages for it."""
        self.tally.steps += 1
        tables = self.engine.tables
        tables.now = self.tally.steps
        before = {name: (request, request.valid) for name, request in tables.requests.items()}
        refusal, made_no_sense = attempt(self.engine, step)
        self._found(self.engine.storage.findings)
        self.engine.storage.findings.clear()
        if refusal is None:
            self._count(step, before)
        elif made_no_sense:
            self.refusal, self.is_over = (self.tally.steps, refusal), True
        elif step.evict is not None:
            self._found([Finding("L1", "lane after all requests have left", "all pages free", refusal)])
        if self.tally.steps % self.service.every == 0:
            self._look()
        return refusal is None

    def _count(self, step: Step, before: Mapping[str, tuple[Request, int]]) -> None:
        tables = self.engine.tables
        grid, lanes = tables.grid, tables.lanes
        free = sum(map(lanes.free_pages, range(grid.world_size)))
        live = (grid.world_size * lanes.pages_per_lane - free) * grid.page_size
        held = sum(request.ids.nbytes + request.hashes.nbytes for request in tables.requests.values())
        self.tally.peak_live_tokens = max(self.tally.peak_live_tokens, live)
        self.tally.peak_token_bytes = max(self.tally.peak_token_bytes, held + tables.tree.key_bytes)
        if step.forward is not None:
            self.tally.chunks += sum(before[name][0].valid > before[name][1] for name in step.forward)
        elif step.decode is not None:
            self.tally.decodes += len(step.decode)
        elif step.finish is not None:
            self._count_request(step.finish, before[step.finish][0])

    def _count_request(self, name: str, request: Request) -> None:
        self.tally.requests += 1
        self.tally.tokens += self.service.requests[self.driver.running[name]].input_length
        self.tally.device_tokens += request.found.device
        self.tally.host_tokens += request.found.host
        self.tally.storage_tokens += request.found.storage
        self._agree(f"pages of {name} as it leaves", hash((request.valid, *request.pages)), LEAVES)

    def _look(self) -> None:
        """At the tables: those of all ranks are alike, so one rank after the other checks their laws."""
        tables, turn = self.engine.tables, self.tally.steps // self.service.every
        if turn % self.engine.history.world_size == self.rank:
            self._found(tables.check())
        self._agree("tables", tables.fingerprint(), "tables.compare")

    def _agree(self, what: str, mine: int, site: str) -> None:
        """A number that all ranks must have alike (L7). If not, or if any has a finding, all are over."""
        W, storage = self.engine.history.world_size, self.engine.storage
        said = torch.tensor([[mine, len(self.findings)]], dtype=torch.int64, device=storage.device)
        of_ranks = gather_buffers(said, [1] * W, group=storage.group, site=site).tolist()
        odd = [rank for rank, (number, _) in enumerate(of_ranks) if number != of_ranks[0][0]]
        if odd:
            others = f"another on ranks {', '.join(map(str, odd))}"
            self._found([Finding("L7", what, "rank 0's", others, Where(rank=odd[0]))])
        self.is_over |= bool(odd) or any(count for _, count in of_ranks)

    def _found(self, findings: Sequence[Finding]) -> None:
        room = MOST_FINDINGS - len(self.findings)
        self.findings += [
            replace(each, where=replace(each.where, step=self.tally.steps)) for each in findings[:room]
        ]


def _next(steps: Steps, done: bool) -> Step | None:
    try:
        return steps.send(done)
    except StopIteration:
        return None


def serve(group: dist.ProcessGroup, service: Service) -> Served:
    """Serve a trace on this rank."""
    rank, size = rank_and_size(group)
    if size != service.setting.world_size:
        raise InvalidInput(
            "world of a service", expected=f"{service.setting.world_size} ranks", received=size
        )
    with closing(Engine(service.setting, rank, group)) as engine:
        serving = _Serving(service, engine, rank)
        serving.run()
        return Served(
            rank=rank,
            digest=engine.storage.digest.hexdigest(),
            findings=tuple(serving.findings),
            refusal=serving.refusal,
            rows_checked=engine.storage.rows_checked,
            tally=serving.tally,
        )
