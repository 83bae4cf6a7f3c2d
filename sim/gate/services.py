"""A trace through the serving engine, with a verdict and what it cost."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from refmodel.collectives import Call
from refmodel.errors import Finding, InvalidInput, Where
from sim.cases.service import Service, trace_service
from sim.cases.trace import Request
from sim.engine.serve import LEAVES, Served, Tally, serve
from sim.gate.histories import REFUSAL
from sim.gate.record import Entry, ServiceNumbers, entry_of_trace
from sim.gate.setting import PLAIN, Setting
from sim.gate.traces import DEFAULT_PAGE, read_source, sized
from sim.gate.verdict import Verdict, folded, try_program
from sim.world import Watch, World

DEFAULT_CHUNK = 8192
DEFAULT_EVERY = 100

# A run on processes that takes ten times as long as it should is stuck.
_START_SECONDS, _REQUEST_SECONDS = 60.0, 5.0


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """A trace to serve, and how."""

    source: str  # a file, or "embedded"
    service: Service
    world: str  # "lockstep:4"
    pool: float  # percent
    setting: Setting = PLAIN

    @property
    def requests(self) -> Sequence[Request]:
        return self.service.requests

    def open_world(self) -> World:
        """The world to run on, with time enough for all requests."""
        world = self.setting.open(self.world)
        if world.kind != "gloo":
            return world
        return World.gloo(world.size, timeout=_START_SECONDS + _REQUEST_SECONDS * len(self.requests))

    @property
    def replay(self) -> str:
        """The one line that runs this again."""
        history = self.service.setting
        return (
            f"cpkv gate --trace {shlex.quote(self.source)} --requests {len(self.requests)} "
            f"--world {self.world} --page {history.page_size} --pool {self.pool:g}% --chunk {history.chunk} "
            f"--every {self.service.every} {self.setting.options}"
        )


def try_service(
    world: World, service: Service, setting: Setting = PLAIN, watch: Watch | None = None
) -> Verdict[Served]:
    """Serve a trace and judge it. A run that fails is a finding; a world that is missing is an error."""
    return try_program(world, serve, service, lambda run: judge_service(run.results), setting, watch)


def judge_service(served: Sequence[Served]) -> Iterator[Finding]:
    """What ranks found, and where they did not do alike."""
    yield from folded(finding for each in served for finding in each.findings)
    for what, law, values in (
        ("digest of all views", "V1", [each.digest for each in served]),
        ("numbers of the service", "L7", [each.tally for each in served]),
    ):
        odd = [each.rank for each, value in zip(served, values, strict=True) if value != values[0]]
        if odd:
            yield Finding(law, what, "rank 0's", f"another on ranks {odd}", Where(rank=odd[0]))
    if served[0].refusal is not None:
        step, text = served[0].refusal
        yield Finding(REFUSAL, "a step of the driver", "none", text, Where(step=step))


def run_service(
    run: ServiceRun,
    world: World,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Entry, Verdict[Served]]:
    """Serve a trace, judge it and record it. ``tick`` is called when a request has finished."""
    start = time.perf_counter()

    def watch(rank: int, call: Call) -> None:
        if rank == 0 and call.site == LEAVES:
            tick()

    verdict = try_service(world, run.service, run.setting, watch)
    entry = entry_of_trace(
        run,
        verdict,
        title=f"{len(run.requests)} requests through the serving engine",
        laws=run.service.setting.laws,
        seconds=time.perf_counter() - start,
        service=_numbers(run, verdict.said[0].tally) if verdict.said else None,
    )
    return entry, verdict


def _numbers(run: ServiceRun, tally: Tally) -> ServiceNumbers:
    setting = run.service.setting
    return ServiceNumbers(
        source=run.source,
        world_size=setting.world_size,
        page_size=setting.page_size,
        chunk=setting.chunk or 0,
        pool=run.pool,
        distinct_pages=run.service.distinct_pages,
        pages_per_lane=setting.pages_per_lane,
        host_pages_per_lane=setting.host_pages_per_lane,
        requests=tally.requests,
        tokens=tally.tokens,
        device_tokens=tally.device_tokens,
        host_tokens=tally.host_tokens,
        storage_tokens=tally.storage_tokens,
        chunks=tally.chunks,
        decodes=tally.decodes,
        evicted_pages=tally.evicted_pages,
        returned=tally.returned,
        dropped=tally.dropped,
        peak_live_tokens=tally.peak_live_tokens,
        bytes_per_live_token=tally.peak_token_bytes / max(1, tally.peak_live_tokens),
    )


def choose_services(
    source: str,
    *,
    limit: int | None,
    worlds: Sequence[str],
    ranks: int | None,
    page_size: int | None,
    pool: str,
    chunk: int | None,
    every: int | None,
    setting: Setting,
) -> list[ServiceRun]:
    """One run a world named; by default lockstep. ``ranks`` is the size where a world has none."""
    requests = read_source(source, limit)
    return [
        _service_run(
            source,
            requests,
            sized(world, ranks),
            DEFAULT_PAGE if page_size is None else page_size,
            percent(pool),
            DEFAULT_CHUNK if chunk is None else chunk,
            DEFAULT_EVERY if every is None else every,
            setting,
        )
        for world in worlds or ["lockstep"]
    ]


def _service_run(
    source: str,
    requests: Sequence[Request],
    world: str,
    page_size: int,
    pool: float,
    chunk: int,
    every: int,
    setting: Setting,
) -> ServiceRun:
    service = trace_service(
        requests,
        world_size=int(world.partition(":")[2]),
        page_size=page_size,
        pool=pool,
        chunk=chunk,
        every=every,
    )
    return ServiceRun(source, service, world, pool, setting)


def percent(text: str) -> float:
    """ "25%" → 25.0. :class:`InvalidInput` for what is no percentage above 0.

    >>> percent("12.5%")
    12.5
    """
    number = text.removesuffix("%")
    if number == text or not number.replace(".", "", 1).isdecimal() or not 0 < float(number) <= 1000:
        raise InvalidInput("--pool", expected="a percentage such as 25%, of the trace's pages", received=text)
    return float(number)
