"""Worked numbers in a scenario, against the plan: what a person computed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise

import torch

from refmodel.errors import Finding, Where
from refmodel.layout.geometry import num_pages
from refmodel.layout.ownership import current_slots, local_page, owner, to_physical
from refmodel.layout.plan import Plan, Segment
from refmodel.model.model import cache_formats
from refmodel.model.shape import DEEPSEEK_V32
from refmodel.storage.identity import Cache
from refmodel.storage.pages import byte_offsets
from refmodel.storage.reuse import read_verdict
from refmodel.storage.write import write_verdict
from sim.cases.case import Case, Forward
from sim.cases.scenario import Expect, Offsets, Scenario

_LAWS = {
    "segments": "S1",
    "bounds": "S1",
    "units": "S2",
    "rows": "S4",
    "max_rank_rows": "S4",
    "prev_rows": "S5",
    "kv_stop": "S6",
    "rank_rows": "S1",
    "new_pages": "O6",
    "write": "O5",
    "view": "V4",
}


def check_expectations(scenario: Scenario, case: Case) -> Iterator[Finding]:
    """Every number the scenario states and the reference does not give."""
    for step, forward in zip(scenario.steps, case.forwards, strict=True):
        yield from _check_step(step.expect, case, forward)
    for remap in scenario.remap:
        yield from _check_remap(remap.slot, (remap.owner, remap.local_page, remap.physical), case)
    for offsets in scenario.offsets:
        yield from _check_offsets(offsets, scenario.page_size)


def _check_step(expect: Expect, case: Case, forward: Forward) -> Iterator[Finding]:
    stated = {name: getattr(expect, name) for name in _LAWS if getattr(expect, name) is not None}
    if not stated:
        return
    actual = _numbers(case, forward)
    for name, number in stated.items():
        if actual[name] != number:
            yield Finding(
                _LAWS[name],
                f"{name}, as the scenario states it",
                _shown(number),
                _shown(actual[name]),
                Where(step=forward.step),
            )


def _numbers(case: Case, forward: Forward) -> dict[str, object]:
    plan = forward.plan(case.grid, case.split)
    ranks = range(case.grid.world_size)
    bounds = [list(b) for b in plan.bounds]
    units = [turn.extent.page_positions(case.grid.page_size) for turn in forward.turns]
    new = [t.table.pages[num_pages(t.extent.prefix, case.grid.page_size) :] for t in forward.turns]
    lanes = owner(torch.cat(new), case.grid.world_size)
    return {
        "segments": [[b - a for a, b in pairwise(cut)] for cut in bounds],
        "bounds": bounds,
        "units": [[unit.start, unit.stop] for unit in units],
        "rows": list(plan.row_counts),
        "max_rank_rows": plan.max_rank_rows,
        "prev_rows": [len(plan.halves(rank)[0].rows) for rank in ranks],
        "kv_stop": [[s.stop for half in plan.halves(rank) for s in half.segments] for rank in ranks],
        "rank_rows": [rank_rows(plan, forward, rank) for rank in ranks],
        "new_pages": torch.bincount(lanes, minlength=case.grid.world_size).tolist(),
        "write": write_verdict(plan, current_slots(plan, forward.tables)).path,
        "view": read_verdict(case.reading, plan.extents).path,
    }


def _shown(number: object) -> str:
    return number.value if isinstance(number, Enum) else str(number)


def rank_rows(plan: Plan, forward: Forward, rank: int) -> str:
    """A rank's segments in local order, e.g. ``a[0:2] b[0:1] | a[4:5]``: prev | next, without empty ones."""

    def name(segment: Segment) -> str:
        return f"{forward.turns[segment.request].name}[{segment.start}:{segment.stop}]"

    halves = (
        " ".join(name(segment) for segment in half.segments if segment.tokens) for half in plan.halves(rank)
    )
    return " | ".join(halves).strip()


def _check_remap(slot: int, expected: tuple[int, int, int], case: Case) -> Iterator[Finding]:
    grid = case.grid
    page = slot // grid.page_size
    rank = owner(page, grid.world_size)
    physical = int(to_physical(torch.tensor([slot]), rank, grid))
    actual = (rank, local_page(page, grid.world_size), physical)
    if actual != expected:
        yield Finding(
            "O2",
            f"(owner, local page, physical) of slot {slot}",
            str(expected),
            str(actual),
            Where(page=page),
        )


def _check_offsets(offsets: Offsets, page_size: int) -> Iterator[Finding]:
    """In 32 bits, as kernels take slots: it is the product that must not be (F2)."""
    row_format = cache_formats(DEEPSEEK_V32, offsets.format)[Cache[offsets.cache.upper()]]
    slots = torch.tensor([offsets.slot], dtype=torch.int32)
    actual = byte_offsets(slots, row_format, page_size)[0].tolist()
    if actual != offsets.fields:
        where = Where(cache=offsets.cache, page=offsets.slot // page_size, slot=offsets.slot % page_size)
        what = f"byte offsets of slot {offsets.slot} in {row_format.name}"
        yield Finding("F2", what, str(offsets.fields), str(actual), where)
