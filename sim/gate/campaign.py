"""A gate run as a whole: everything it was asked for is chosen and checked before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from refmodel.errors import Finding
from sim.cases.library import AnyScenario, catalogue, find_scenarios
from sim.faults.fault import check_faults
from sim.gate.kernels import kernel_uses
from sim.gate.record import Entry, Report, broken, entry_of, report_of
from sim.gate.runs import Worlds, check_scenario, choose_runs, run_all
from sim.gate.services import ServiceRun, run_service
from sim.gate.setting import Setting
from sim.gate.traces import TraceRun, run_trace
from sim.kernels.uses import Uses, sum_of
from sim.timeline import Timed, timed_run

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Campaign:
    """What runs: scenarios on kinds of worlds, then traces."""

    scenarios: Sequence[tuple[AnyScenario, str]]
    traces: Sequence[TraceRun | ServiceRun]
    whole_catalogue: bool
    setting: Setting

    @property
    def ticks(self) -> int:
        """How often :func:`execute` ticks: once a scenario and world, once a request of a trace."""
        return len(self.scenarios) + sum(len(trace.requests) for trace in self.traces)


def named_scenarios(names: Sequence[str]) -> list[AnyScenario]:
    """The scenarios of all names, each once, in the order named; the whole catalogue without names."""
    if not names:
        return list(catalogue())
    return list({scenario.file: scenario for name in names for scenario in find_scenarios(name)}.values())


def plan_campaign(
    scenarios: Sequence[AnyScenario],
    traces: Sequence[TraceRun | ServiceRun],
    *,
    worlds: Sequence[str],
    named: bool,
    setting: Setting,
) -> Campaign:
    """:class:`InvalidInput` for a scenario that makes no sense, or a world that fits none."""
    runs = choose_runs(scenarios, worlds) if scenarios else []
    chosen = {scenario.file for scenario, _ in runs}
    whole = bool(scenarios) and not named and chosen == {scenario.file for scenario in scenarios}
    campaign = Campaign(runs, traces, whole_catalogue=whole, setting=setting)
    for scenario in scenarios:
        check_scenario(scenario)
        check_faults(setting.faults, scenario.world_size)
    for world in campaign_worlds(campaign):
        setting.open(world).close()
    return campaign


def campaign_worlds(campaign: Campaign) -> set[str]:
    """The worlds it runs on, "lockstep:4"."""
    sized = {f"{kind}:{scenario.world_size}" for scenario, kind in campaign.scenarios}
    return sized | {trace.world for trace in campaign.traces}


def is_started(campaign: Campaign) -> bool:
    """Whether it runs in the world that this process was started in, by torchrun."""
    return any(world.startswith("torchrun") for world in campaign_worlds(campaign))


def execute(campaign: Campaign, tick: Tick, timed: list[Timed] | None = None) -> Report:
    """Run it all. ``tick(label)`` follows the progress; ``timed`` is given the spans of every run."""
    start = time.perf_counter()
    heard = _Heard([] if timed is None else timed)
    entries = [*_run_scenarios(campaign, tick, heard), *_run_traces(campaign, tick, heard)]
    kernels = campaign.setting.kernels
    return report_of(
        entries,
        heard.marks,
        whole_catalogue=campaign.whole_catalogue,
        seed=campaign.setting.seed,
        seconds=time.perf_counter() - start,
        kernels=None if kernels is None else kernel_uses(kernels, sum_of(heard.uses)),
    )


@dataclass(slots=True)
class _Heard:
    """What runs tell beside their entries."""

    timed: list[Timed]
    marks: set[str] = field(default_factory=set)
    uses: list[Uses] = field(default_factory=list)


def _run_scenarios(campaign: Campaign, tick: Tick, heard: _Heard) -> Iterator[Entry]:
    with Worlds(campaign.setting) as worlds:
        for outcome in run_all(campaign.scenarios, worlds):
            heard.marks |= outcome.marks
            heard.uses.append(outcome.uses)
            tick(f"{outcome.scenario.file} on {outcome.world}")
            heard.timed.append(timed_run(outcome.scenario.file, outcome.world, outcome.spans))
            yield entry_of(outcome)


def _run_traces(campaign: Campaign, tick: Tick, heard: _Heard) -> Iterator[Entry]:
    """One trace on some worlds: what its ranks see must not depend on them."""
    first: Entry | None = None
    for trace in campaign.traces:
        with trace.open_world() as world:
            told = partial(tick, f"trace on {trace.world}")
            entry, verdict = (
                run_service(trace, world, told)
                if isinstance(trace, ServiceRun)
                else run_trace(trace, world, told)
            )
        heard.uses.append(verdict.uses)
        heard.timed.append(timed_run(f"trace {trace.source}", trace.world, verdict.spans))
        first = first or entry
        yield _agreeing(entry, first)


def _agreeing(entry: Entry, first: Entry) -> Entry:
    """The entry; broken if its digest is not that of the first."""
    if not (entry.held and first.held) or entry.digest == first.digest:
        return entry
    finding = Finding("V1", "digest of all views", f"{first.digest[:16]}…, as on {first.world}", entry.digest)
    return msgspec.structs.replace(entry, held=False, findings=[broken(finding)])
