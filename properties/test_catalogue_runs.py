"""Every scenario of the catalogue holds on every world, whatever the order of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from properties import reached
from properties.catalogued import CATALOGUE, ON_GLOO
from sim.cases.library import AnyScenario, find_scenarios
from sim.gate.runs import Outcome, run_scenario
from sim.world import World


def name(scenario: AnyScenario) -> str:
    return scenario.file.removesuffix(".yaml")


def require_held(outcome: Outcome) -> None:
    findings = "\n  ".join(map(str, outcome.findings))
    assert outcome.held, f"{outcome.scenario.title}\n  {findings}\n  replay: {outcome.replay}"


@pytest.mark.parametrize("scenario", CATALOGUE, ids=name)
def test_every_scenario_holds_on_lockstep(scenario: AnyScenario) -> None:
    with World.lockstep(scenario.world_size) as world:
        outcome = run_scenario(scenario, world)
    reached.marks.update(outcome.marks)
    require_held(outcome)


@pytest.mark.gloo
@pytest.mark.parametrize("scenario", ON_GLOO, ids=name)
def test_gloo_gives_the_digest_of_lockstep(scenario: AnyScenario, gloo_world: Callable[[int], World]) -> None:
    outcome = run_scenario(scenario, gloo_world(scenario.world_size))
    require_held(outcome)
    with World.lockstep(scenario.world_size) as lockstep:
        assert outcome.digest == run_scenario(scenario, lockstep).digest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_schedule_of_ranks_changes_nothing(seed: int) -> None:
    (scenario,) = find_scenarios("batch/padding-with-gathered-write")
    with World.lockstep(2) as first, World.lockstep(2, seed=seed) as other:
        assert run_scenario(scenario, other).digest == run_scenario(scenario, first).digest
