"""A gate run as a whole: everything it was asked for is chosen and checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sim.build import build_case
from sim.gate import Worlds, choose_runs, run_all
from sim.record import Entry, Report, entry_of, report_of
from sim.scenario import Scenario, catalogue, find_scenarios
from sim.trace_gate import TraceRun, run_trace
from sim.world import World

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Campaign:
    """What runs: scenarios on kinds of worlds, then traces."""

    scenarios: Sequence[tuple[Scenario, str]]
    traces: Sequence[TraceRun]
    whole_catalogue: bool
    seed: int

    @property
    def ticks(self) -> int:
        """How often :func:`execute` ticks: once a scenario and world, once a request of a trace."""
        return len(self.scenarios) + sum(len(trace.requests) for trace in self.traces)


def named_scenarios(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of all names, each once, in the order named; the whole catalogue without names."""
    if not names:
        return list(catalogue())
    return list({scenario.file: scenario for name in names for scenario in find_scenarios(name)}.values())


def plan_campaign(
    scenarios: Sequence[Scenario],
    traces: Sequence[TraceRun],
    *,
    worlds: Sequence[str],
    named: bool,
    seed: int,
) -> Campaign:
    """:class:`InvalidInput` for a scenario that makes no sense, or a world that fits none."""
    runs = choose_runs(scenarios, worlds, named=named) if scenarios else []
    chosen = {scenario.file for scenario, _ in runs}
    whole = bool(scenarios) and not named and chosen == {scenario.file for scenario in scenarios}
    campaign = Campaign(runs, traces, whole_catalogue=whole, seed=seed)
    for scenario in scenarios:
        build_case(scenario)
    for world in campaign_worlds(campaign):
        World.parse(world).close()
    return campaign


def campaign_worlds(campaign: Campaign) -> set[str]:
    """The worlds it runs on, "lockstep:4"."""
    sized = {f"{kind}:{scenario.world_size}" for scenario, kind in campaign.scenarios}
    return sized | {trace.world for trace in campaign.traces}


def execute(campaign: Campaign, tick: Tick) -> Report:
    """Run it all. ``tick(label)`` follows the progress."""
    start = time.perf_counter()
    marks: set[str] = set()
    with Worlds(campaign.seed) as worlds:
        entries = [*_run_scenarios(campaign, worlds, marks, tick), *_run_traces(campaign, worlds, tick)]
    return report_of(
        entries,
        marks,
        whole_catalogue=campaign.whole_catalogue,
        seed=campaign.seed,
        seconds=time.perf_counter() - start,
    )


def _run_scenarios(campaign: Campaign, worlds: Worlds, marks: set[str], tick: Tick) -> Iterator[Entry]:
    for outcome in run_all(campaign.scenarios, worlds):
        marks |= outcome.marks
        tick(f"{outcome.scenario.file} on {outcome.world}")
        yield entry_of(outcome)


def _run_traces(campaign: Campaign, worlds: Worlds, tick: Tick) -> Iterator[Entry]:
    for trace in campaign.traces:
        kind, _, size = trace.world.partition(":")
        yield run_trace(trace, worlds.get(kind, int(size)), partial(tick, f"trace on {trace.world}"))
