"""A trace on a world, with a verdict and what it cost."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from refmodel.collectives import Call
from refmodel.errors import InvalidInput
from sim.cases.trace import Request, Rotation, TraceCase, generate_trace, read_trace, trace_case
from sim.gate.judge import fallbacks_of, try_case
from sim.gate.record import Entry, TraceNumbers, entry_of_trace
from sim.gate.setting import PLAIN, Setting, kind_and_size
from sim.gate.verdict import Verdict
from sim.serving.report import RankReport
from sim.world import World

EMBEDDED = "embedded"
EMBEDDED_REQUESTS = 60
DEFAULT_RANKS = 8
DEFAULT_PAGE = 64

# A run on processes that takes ten times as long as it should is stuck.
_START_SECONDS, _REQUEST_SECONDS = 60.0, 2.0


@dataclass(frozen=True, slots=True)
class TraceRun:
    """A trace to run, and how."""

    source: str  # a file, or "embedded": a generated one, always the same
    requests: Sequence[Request]  # the first of them, or all
    world: str  # "lockstep:8"
    page_size: int
    rotation: Rotation
    setting: Setting = PLAIN  # its seed is also that of the order in which lanes hand out pages

    @property
    def world_size(self) -> int:
        return int(self.world.partition(":")[2])

    def open_world(self) -> World:
        """The world to run on, with time enough for all requests."""
        world = self.setting.open(self.world)
        if world.kind != "gloo":
            return world
        return World.gloo(world.size, timeout=_START_SECONDS + _REQUEST_SECONDS * len(self.requests))

    @property
    def replay(self) -> str:
        """The one line that runs this again."""
        return (
            f"cpkv gate --trace {shlex.quote(self.source)} --requests {len(self.requests)} "
            f"--world {self.world} --page {self.page_size} --rotation {self.rotation} {self.setting.options}"
        )


def read_source(source: str, limit: int | None) -> list[Request]:
    """The first ``limit`` requests of a source. :class:`InvalidInput` names the file and the bad line."""
    if source == EMBEDDED:
        return generate_trace(EMBEDDED_REQUESTS if limit is None else limit)
    return read_trace(Path(source), limit)


def run_trace(
    run: TraceRun,
    world: World,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Entry, Verdict[RankReport]]:
    """Plan a trace, serve it, judge it and record it. ``tick``: rank 0 begins the view of a request."""
    start = time.perf_counter()
    trace = trace_case(
        run.requests,
        world_size=run.world_size,
        page_size=run.page_size,
        rotation=run.rotation,
        seed=run.setting.seed,
    )

    def watch(rank: int, call: Call) -> None:
        if rank == 0 and call.site == "kv.view":
            tick()

    verdict = try_case(world, trace.case, run.setting, watch)
    entry = entry_of_trace(
        run,
        verdict,
        title=f"{trace.requests} requests at full length",
        laws=["V1", "V6", "V8", "O3"],
        seconds=time.perf_counter() - start,
        fallbacks=fallbacks_of(verdict),
        trace=_numbers(run, trace, verdict.ledgers),
    )
    return entry, verdict


def _numbers(run: TraceRun, trace: TraceCase, ledgers: Sequence[Sequence[Call]]) -> TraceNumbers:
    page_bytes = run.page_size * sum(f.bytes_per_token for f in trace.case.formats.values())
    return TraceNumbers(
        source=run.source,
        world_size=run.world_size,
        page_size=run.page_size,
        rotation=run.rotation,
        requests=trace.requests,
        tokens=trace.tokens,
        pages=sum(trace.lane_pages),
        hit_share=trace.hit_share,
        imbalance=trace.imbalance,
        bytes_moved=bytes_moved(ledgers),
        bytes_fullest_rank=max(trace.lane_pages) * page_bytes,
        bytes_replicated=sum(trace.lane_pages) * page_bytes,
    )


def bytes_moved(ledgers: Sequence[Sequence[Call]]) -> int:
    """What the ranks sent to each other: each contribution goes to every other rank of its group."""
    return sum(call.num_bytes * (call.group_size - 1) for ledger in ledgers for call in ledger)


def choose_traces(
    source: str,
    *,
    limit: int | None,
    worlds: Sequence[str],
    ranks: int | None,
    page_size: int | None,
    rotation: Rotation | None,
    setting: Setting,
) -> list[TraceRun]:
    """One run a world named; by default lockstep. ``ranks`` is the size where a world has none."""
    requests = read_source(source, limit)
    return [
        TraceRun(
            source=source,
            requests=requests,
            world=sized(world, ranks),
            page_size=DEFAULT_PAGE if page_size is None else page_size,
            rotation=rotation or "none",
            setting=setting,
        )
        for world in worlds or ["lockstep"]
    ]


def sized(world: str, ranks: int | None) -> str:
    """ "lockstep" → "lockstep:8": with the ranks asked for, where the name has none of its own."""
    kind, size = kind_and_size(world)
    if size is not None and ranks is not None and size != ranks:
        raise InvalidInput(
            "--cp",
            expected=f"{size}, as in --world {world}",
            received=ranks,
            fix="Leave one of the two out.",
        )
    return f"{kind}:{size or ranks or DEFAULT_RANKS}"
