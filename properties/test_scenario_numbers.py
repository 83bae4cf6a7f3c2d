"""The worked numbers of a scenario are compared with what comes out."""

from __future__ import annotations

import pytest

from properties.smallest_scenario import SMALLEST, expecting
from sim.cases.library import parse_scenario
from sim.gate.runs import run_scenario
from sim.world import World


@pytest.mark.parametrize(
    ("number", "law"),
    [
        ("segments: [[3, 2, 0, 0]]", "S1"),
        ("bounds: [[0, 4, 4, 5, 5]]", "S1"),
        ("units: [[0, 3]]", "S2"),
        ("rows: [3, 2]", "S4"),
        ("max_rank_rows: 3", "S4"),
        ("prev_rows: [2, 1]", "S5"),
        ("kv_stop: [[4, 5], [5, 4]]", "S6"),
        ('rank_rows: ["a[0:4]", "a[4:5] |"]', "S1"),
        ("new_pages: [2, 0]", "O6"),
        ("write: gathered", "O5"),
        ("view: partial", "V4"),
    ],
)
def test_a_wrong_number_is_found(number: str, law: str) -> None:
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(expecting(number), "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == [law]
    assert outcome.findings[0].where.step == 1


def test_a_wrong_remap_is_found() -> None:
    text = SMALLEST + "remap: [{slot: 13, owner: 1, local_page: 1, physical: 4}]\n"
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(text, "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == ["O2"]


def test_wrong_offsets_are_found() -> None:
    """Slot 5 is row 1 of page 1, and a page of four is 528 bytes: 4 · 128 of keys, then 4 · 4 of scales."""
    slot = "cache: index, format: fp8, slot: 5, fields:"
    text = f"{SMALLEST}offsets: [{{{slot} [656, 1044]}}, {{{slot} [660, 788]}}]\n"
    with World.lockstep(2) as world:
        outcome = run_scenario(parse_scenario(text, "mine.yaml"), world)
    assert [finding.law for finding in outcome.findings] == ["F2"]
    assert (outcome.findings[0].where.page, outcome.findings[0].where.slot) == (1, 1)
