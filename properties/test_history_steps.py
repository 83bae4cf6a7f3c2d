"""A history is shown as a line a step, and its pages add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from properties.catalogued import HISTORIES, history_named
from properties.command_line import cpkv, refused
from properties.smallest_history import SMALLEST
from sim.histories.history import History
from sim.picture.ledger_of_steps import ledger_of_steps

STARTED = tuple(history for history in HISTORIES if history.refused_at_start is None)


@pytest.mark.parametrize("history", STARTED, ids=lambda history: history.file.removesuffix(".yaml"))
def test_every_history_can_be_shown_and_its_pages_add_up(history: History) -> None:
    lines = ledger_of_steps(history)
    assert [line.step for line in lines] == [*range(1, len(history.history) + 1)]
    for step, line in zip(history.history, lines, strict=True):
        assert line.refused == step.refused
        assert step.expect.free in (None, line.free)
        assert all(0 <= free <= history.pages_per_lane for free in line.free)


def test_show_tells_hits_evictions_and_refusals() -> None:
    by_step = {line.step: line for line in ledger_of_steps(history_named("lanes/more-than-one-victim"))}
    assert by_step[5].taken == [4, 4]
    assert (by_step[11].taken, by_step[11].evicted, by_step[11].free) == ([1, 2], [2, 2], [1, 0])
    assert by_step[11].outcome == "e 0 → 12"
    assert by_step[13].outcome == "g hits 8 of 9"
    assert by_step[13].operation == "submit g tokens 9 like c shared 8"
    waiting = ledger_of_steps(history_named("admission/nobody-is-passed-over"))
    assert waiting[3].outcome == "a 0 → 8, b waits, c waits"


def test_show_prints_a_line_a_step(tmp_path: Path, scenario: Callable[[str], Path]) -> None:
    output = cpkv("show", "lanes/exhausted").output
    assert output.startswith("A lane runs out while the other has room\n")
    assert "refused: pages of lane 0: expected 1 free," in output
    only = json.loads(cpkv("show", scenario(SMALLEST), "--step", 2, "--json").output)
    assert [(line["operation"], line["taken"]) for line in only] == [("forward a", [1, 1])]
    assert "1 … 2" in refused("show", scenario(SMALLEST), "--step", 3)
    assert "a scenario of forwards" in refused("show", scenario(SMALLEST), "--png", tmp_path / "no.png")
