"""Scenarios on worlds, with verdicts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from refmodel.errors import Finding, InvalidInput
from refmodel.layout.ownership import current_slots
from refmodel.storage.write import write_verdict
from sim.cases.build import build_case
from sim.cases.case import Case
from sim.cases.expect import check_expectations
from sim.cases.library import AnyScenario
from sim.cases.scenario import Scenario
from sim.gate.histories import try_history
from sim.gate.judge import fallbacks_of, try_case
from sim.gate.marks import marks_of
from sim.gate.setting import PLAIN, Setting, kind_and_size
from sim.gate.verdict import Verdict
from sim.histories.history import History
from sim.kernels.uses import NO_USES, Uses
from sim.surface.recorder import Span
from sim.world import World


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario on one world."""

    scenario: AnyScenario
    world: str  # "lockstep:4"
    setting: Setting
    findings: tuple[Finding, ...]
    digest: str = ""  # the same on every world and every run
    schedule: str = ""  # the token that replays the order of ranks; of lockstep only
    retried: bool = False  # held at the second attempt, after a failure of the infrastructure
    seconds: float = 0.0
    rows_checked: int = 0
    calls: int = 0  # collectives a rank issued
    fallbacks: int = 0
    marks: frozenset[str] = frozenset()
    spans: tuple[tuple[Span, ...], ...] = ()  # of each rank's calls, for a timeline
    uses: Uses = NO_USES  # of kernels

    @property
    def held(self) -> bool:
        return not self.findings

    @property
    def replay(self) -> str:
        """The one line that runs this again."""
        return f"cpkv gate {shlex.quote(self.scenario.file)} --world {self.world} {self.setting.options}"


class Worlds:
    """Worlds by kind and size, started when first asked for and closed together."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._open: dict[str, World] = {}
        self._stack = ExitStack()

    def get(self, kind: str, size: int) -> World:
        name = f"{kind}:{size}"
        if name not in self._open:
            self._open[name] = self._stack.enter_context(self.setting.open(name))
        return self._open[name]

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def choose_runs(scenarios: Sequence[AnyScenario], worlds: Sequence[str]) -> list[tuple[AnyScenario, str]]:
    """Which scenario runs on which kind of world.

    Without ``worlds`` a scenario runs on those it lists. ``gloo`` takes all scenarios to that kind of world,
    ``gloo:4`` those with 4 ranks.
    """
    if not worlds:
        return [(scenario, kind) for scenario in scenarios for kind in scenario.worlds]
    runs = []
    for world in worlds:
        kind, size = kind_and_size(world)
        for scenario in scenarios:
            if size in (None, scenario.world_size):
                runs.append((scenario, kind))
    if not runs:
        sizes = sorted({scenario.world_size for scenario in scenarios})
        raise InvalidInput(
            "--world",
            expected=f"a world that fits a scenario: world sizes {sizes}",
            received=", ".join(worlds),
            fix="The world size is part of a scenario; leave it out, or name the one it has.",
        )
    return runs


def run_all(runs: Iterable[tuple[AnyScenario, str]], worlds: Worlds) -> Iterator[Outcome]:
    """Run one after the other; a digest that differs between worlds is a finding of the later one."""
    digests: dict[str, tuple[str, str]] = {}
    for scenario, kind in runs:
        outcome = run_scenario(scenario, worlds.get(kind, scenario.world_size), worlds.setting)
        first_world, first_digest = digests.setdefault(scenario.file, (outcome.world, outcome.digest))
        if outcome.held and first_digest and outcome.digest != first_digest:
            differs = Finding(
                "V6", "digest", f"{first_digest[:16]}… as on {first_world}", outcome.digest[:16]
            )
            outcome = _with_findings(outcome, differs)
        yield outcome


def _with_findings(outcome: Outcome, *findings: Finding) -> Outcome:
    return replace(outcome, findings=(*outcome.findings, *findings))


def run_scenario(scenario: AnyScenario, world: World, setting: Setting = PLAIN) -> Outcome:
    """Run one scenario on the world, and judge it."""
    start = time.perf_counter()
    if isinstance(scenario, History):
        findings, marks, fallbacks = list[Finding](), frozenset[str](), 0
        verdict: Verdict[Any] = try_history(world, scenario, setting)
    else:
        case = build_case(scenario)
        findings, marks = list(check_expectations(scenario, case)), frozenset(_marks(case))
        verdict = try_case(world, case, setting)
        fallbacks = fallbacks_of(verdict)
    return Outcome(
        scenario=scenario,
        world=str(world),
        setting=setting,
        findings=(*findings, *verdict.findings),
        digest=verdict.digest,
        schedule=verdict.schedule,
        retried=verdict.retried,
        seconds=time.perf_counter() - start,
        rows_checked=verdict.rows_checked,
        calls=verdict.calls,
        fallbacks=fallbacks,
        marks=marks,
        spans=verdict.spans,
        uses=verdict.uses,
    )


def check_scenario(scenario: AnyScenario) -> None:
    """:class:`InvalidInput` for one that cannot be worked out. Of a history, that shows when it is played."""
    if isinstance(scenario, Scenario):
        build_case(scenario)


def _marks(case: Case) -> Iterator[str]:
    for forward in case.forwards:
        plan = forward.plan(case.grid, case.split)
        yield from marks_of(plan, write_verdict(plan, current_slots(plan, forward.tables)))
