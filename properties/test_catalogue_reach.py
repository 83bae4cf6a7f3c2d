"""The catalogue goes everywhere: to every law, mark, size, format and incident."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from properties.catalogued import CATALOGUE, HISTORIES, OF_FORWARDS, ON_GLOO
from refmodel.laws import LAWS
from refmodel.layout.ownership import current_slots
from refmodel.storage.reuse import ViewPath
from refmodel.storage.write import write_verdict
from sim.cases.build import build_case
from sim.cases.library import theme_of
from sim.gate.marks import MARKS, marks_of

# Faults that real systems had and that a run can show. Not among them: attn-04, whose error stays within the
# budget on a model of this size, and topk-04, which builds what nobody reads.
INCIDENTS = (
    *(f"split-{number:02}" for number in range(1, 15)),
    *(f"own-{number:02}" for number in range(1, 7)),
    *(f"view-{number:02}" for number in range(1, 9)),
    *(f"attn-{number:02}" for number in range(1, 4)),
    *(f"topk-{number:02}" for number in range(1, 4)),
    *(f"fmt-{number:02}" for number in range(1, 4)),
    *(f"draft-{number:02}" for number in range(1, 4)),
    *(f"radix-{number:02}" for number in range(1, 6)),
    *(f"host-{number:02}" for number in range(1, 8)),
    *(f"pd-{number:02}" for number in range(1, 8)),
    *(f"adm-{number:02}" for number in range(1, 4)),
)


def test_the_catalogue_is_large_and_nothing_in_it_is_a_copy() -> None:
    assert len(OF_FORWARDS) >= 190
    assert len(HISTORIES) >= 60
    twice = [title for title, times in Counter(s.title for s in CATALOGUE).items() if times > 1]
    assert not twice


def test_every_world_size_and_page_size_occurs() -> None:
    assert {scenario.world_size for scenario in CATALOGUE} >= {1, 2, 3, 4, 5, 7, 8}
    assert {scenario.page_size for scenario in CATALOGUE} >= {1, 2, 3, 16, 64}


@pytest.mark.parametrize("model", [False, True], ids=["identities", "model"])
def test_every_format_is_viewed_in_every_way(model: bool) -> None:
    """As far as there is such a thing: no model computes tags, and who has none does not attend to shards."""
    scenarios = [scenario for scenario in OF_FORWARDS if ("attention" in scenario.checks) == model]
    formats = {"f64", "f32", "bf16", "fp8"}
    assert {scenario.format for scenario in scenarios} == (formats if model else formats | {"tag"})
    paths = set(ViewPath)
    assert {scenario.view for scenario in scenarios} == (paths if model else paths - {ViewPath.NONE})


def test_every_law_is_named_by_a_scenario() -> None:
    assert {law for scenario in CATALOGUE for law in scenario.laws} == set(LAWS)


def test_every_mark_is_reached() -> None:
    seen: set[str] = set()
    for scenario in OF_FORWARDS:
        case = build_case(scenario)
        for forward in case.forwards:
            plan = forward.plan(case.grid, case.split)
            seen.update(marks_of(plan, write_verdict(plan, current_slots(plan, forward.tables))))
    assert seen == set(MARKS)


def test_every_incident_has_a_scenario_named_after_it() -> None:
    incidents = [scenario for scenario in CATALOGUE if scenario.incident]
    assert {scenario.incident for scenario in incidents} >= set(INCIDENTS)
    for scenario in incidents:
        assert theme_of(scenario) in {"incidents", "transfer"}
        assert Path(scenario.file).name.startswith(f"{scenario.incident}-"), scenario.file
        assert scenario.source, scenario.file


def test_gloo_runs_a_share_of_small_worlds() -> None:
    assert len(ON_GLOO) >= 25
    assert {scenario.world_size for scenario in ON_GLOO} == {2, 4}
    assert {"reuse", "model", "draft"} <= {theme_of(scenario) for scenario in ON_GLOO}
