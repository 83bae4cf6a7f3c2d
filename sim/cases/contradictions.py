"""What types cannot say about a scenario: keys that exclude each other, numbers that do not exist."""

from __future__ import annotations

from collections.abc import Iterator

from refmodel.attention.transform import Transform
from refmodel.errors import CpkvError
from refmodel.laws import law
from refmodel.layout.split import Split
from refmodel.storage.reuse import ViewPath
from sim.cases.scenario import Scenario, Step


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, object]]:
    """(path, expected, received) of what types cannot say."""
    for i, law_id in enumerate(scenario.laws):
        try:
            law(law_id)
        except CpkvError as error:
            yield f"laws[{i}]", error.expected, law_id
    yield from _of_the_model(scenario)
    yield from _of_the_draft(scenario)
    for i, step in enumerate(scenario.steps):
        for path, expected, received in _step_contradictions(scenario, step):
            yield f"steps[{i}].{path}", expected, received


def _of_the_model(scenario: Scenario) -> Iterator[tuple[str, str, object]]:
    """What only a model has a use for, and what it needs."""
    if "attention" in scenario.checks:
        if scenario.format == "tag":
            yield "format", "f64, f32, bf16 or fp8 with the attention check", scenario.format
        return
    if scenario.view is ViewPath.NONE:
        yield "view", "full, current or partial without the attention check", scenario.view.value
    for key, default in (("transform", Transform.PAGED), ("ids", "random"), ("top_k", None)):
        if getattr(scenario, key) != default:
            yield key, "no such key without the attention check: no model runs", getattr(scenario, key)


def _of_the_draft(scenario: Scenario) -> Iterator[tuple[str, str, object]]:
    for i, step in enumerate(scenario.steps):
        if step.draft != "current" and "draft" not in scenario.checks:
            yield f"steps[{i}].draft", "no such key without the draft check", step.draft
        if step.draft == "stale" and not i:
            yield "steps[0].draft", "current or missing: no step came before", step.draft


def _step_contradictions(scenario: Scenario, step: Step) -> Iterator[tuple[str, str, object]]:
    """Rotations fit the world, and a worked number exists under the split and batch it is stated for."""
    zigzag = scenario.split is not Split.ROUND_ROBIN
    for i, extend in enumerate(step.extend):
        stop = scenario.world_size if zigzag else 1
        if extend.rotation >= stop:
            expected = f"0 … {stop - 1}" if zigzag else "0 with split round_robin"
            yield f"extend[{i}].rotation", expected, extend.rotation
    of_segments = ("segments", "bounds", "prev_rows", "kv_stop", "rank_rows")
    for name in () if zigzag else of_segments:
        if getattr(step.expect, name) is not None:
            yield f"expect.{name}", "none: split round_robin has no segments", getattr(step.expect, name)
    if step.expect.units is not None and scenario.split is not Split.PAGE_ALIGNED:
        yield "expect.units", "none unless the split is page_aligned", step.expect.units
    if step.expect.kv_stop is not None and len(step.extend) > 1:
        yield "expect.kv_stop", "none in a batch of several requests", step.expect.kv_stop
