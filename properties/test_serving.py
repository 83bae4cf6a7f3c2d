"""Whole forwards on several ranks: write, materialize, attend, compare (laws V, O3, O5, S9, A5, A6)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import grids, prefixes, token_counts
from refmodel.attention.transform import Transform
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import current_slots
from refmodel.layout.split import Split
from refmodel.storage.formats import PRECISIONS
from refmodel.storage.reuse import ViewPath
from refmodel.storage.write import write_verdict
from sim.cases.build import build_case
from sim.cases.scenario import Check, Extend, Scenario, Step
from sim.gate.runs import Outcome, run_scenario
from sim.serving.program import serve
from sim.world import World

ALL_CHECKS: tuple[Check, ...] = ("identity", "bytes", "isolation", "attention")
pytestmark = pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")
EXAMPLES = settings(max_examples=25)


@st.composite
def scenarios(draw: st.DrawFn, *, attention: bool = False) -> Scenario:
    """One to three steps of one to three requests; a request that comes back goes on where it was."""
    grid = draw(grids(max_page=4))
    split = draw(st.sampled_from(Split))
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        steps.append(
            Step(
                extend=[draw(_extend(grid, split, name, steps)) for name in names],
                padding=draw(st.integers(0, grid.world_size + 1)),
            )
        )
    return Scenario(
        title="drawn",
        why="drawn",
        laws=["V1"],
        world_size=grid.world_size,
        page_size=grid.page_size,
        split=split,
        steps=steps,
        format=draw(st.sampled_from(PRECISIONS if attention else ("tag", *PRECISIONS))),
        layers=draw(st.integers(1, 2)),
        placement=draw(st.sampled_from(["compute_owner", "scrambled"])),
        view=draw(st.sampled_from([path for path in ViewPath if attention or path is not ViewPath.NONE])),
        prefetch=draw(st.booleans()),
        transform=draw(st.sampled_from(Transform)) if attention else Transform.PAGED,
        seed=draw(st.integers(0, 99)),
        checks=ALL_CHECKS if attention else ALL_CHECKS[:3],
        file="drawn",
    )


@st.composite
def _extend(draw: st.DrawFn, grid: Grid, split: Split, name: str, steps: list[Step]) -> Extend:
    known = any(extend.request == name for step in steps for extend in step.extend)
    return Extend(
        request=name,
        tokens=draw(token_counts(grid)),
        prefix=None if known else draw(prefixes(grid)),
        rotation=0 if split is Split.ROUND_ROBIN else draw(st.integers(0, grid.world_size - 1)),
    )


def _hold(scenario: Scenario, seed: int = 0) -> Outcome:
    case = build_case(scenario)
    for forward in case.forwards:
        plan = forward.plan(case.grid, case.split)
        reached.note(plan, write_verdict(plan, current_slots(plan, forward.tables)))
    outcome = run_scenario(scenario, World.lockstep(scenario.world_size, seed=seed))
    assert outcome.held, "\n".join(map(str, outcome.findings))
    return outcome


@proves("V1", "V2", "V3", "V4", "V6", "V8", "O3", "O5", "S9")
@EXAMPLES
@given(scenarios(), st.integers(0, 9))
def test_what_was_written_is_what_every_rank_sees(scenario: Scenario, seed: int) -> None:
    _hold(scenario, seed)


@proves("A5", "A6", "S5", "S6")
@EXAMPLES
@given(scenarios(attention=True))
def test_sharded_attention_is_the_dense_oracle(scenario: Scenario) -> None:
    _hold(scenario)


@proves("V7")
@EXAMPLES
@given(scenarios(), st.integers(100, 199))
def test_other_pages_give_the_same_digest(scenario: Scenario, seed: int) -> None:
    elsewhere = msgspec.structs.replace(scenario, seed=seed, placement="scrambled")
    assert _hold(scenario).digest == _hold(elsewhere).digest


@proves("V7")
@EXAMPLES
@given(scenarios(attention=True).filter(lambda scenario: scenario.view is not ViewPath.NONE))
def test_outputs_do_not_depend_on_the_placement(scenario: Scenario) -> None:
    """Of a forward with a view: without one, who stores a key decides in which order its share is added."""
    here, there = (msgspec.structs.replace(scenario, placement=p) for p in ("compute_owner", "scrambled"))
    assert _hold(here).digest == _hold(there).digest


@proves("V6")
@EXAMPLES
@given(scenarios(), st.integers(0, 9), st.integers(10, 19))
def test_digest_and_ledgers_do_not_depend_on_the_schedule(scenario: Scenario, one: int, other: int) -> None:
    case = build_case(scenario)
    runs = [World.lockstep(scenario.world_size, seed=seed).execute(serve, case) for seed in (one, one, other)]
    assert len({report.digest for run in runs for report in run.results}) == 1
    assert len({run.ledgers for run in runs}) == 1
    assert len(set(runs[0].ledgers)) == 1


@proves("O5")
@EXAMPLES
@given(scenarios())
def test_gathered_write_gives_the_bytes_of_the_direct_write(scenario: Scenario) -> None:
    """Compute-owner placement against any lane: where direct write is allowed, it stores the same view."""
    direct = _hold(msgspec.structs.replace(scenario, placement="compute_owner"))
    gathered = _hold(msgspec.structs.replace(scenario, placement="scrambled"))
    assert direct.digest == gathered.digest
