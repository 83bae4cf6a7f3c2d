"""The gate runs a history as any scenario: in any order, with faults, in reports and lists."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from properties.command_line import cpkv
from properties.smallest_history import then
from sim.cases.library import find_scenarios
from sim.gate.histories import REFUSAL
from sim.gate.runs import run_scenario
from sim.gate.setting import Setting
from sim.world import World

CONVERSATION = "radix/a-conversation"


@pytest.mark.parametrize(
    "setting",
    [Setting(seed=3), Setting(schedule="pct"), Setting(schedule="in-order"), Setting(self_check=True)],
    ids=lambda setting: setting.options,
)
def test_the_order_of_ranks_changes_nothing(setting: Setting) -> None:
    (history,) = find_scenarios(CONVERSATION)
    with World.lockstep(4) as plain, setting.open("lockstep:4") as world:
        outcome = run_scenario(history, world, setting)
        assert outcome.held
        assert outcome.digest == run_scenario(history, plain).digest != ""


@pytest.mark.parametrize("fault", ["skip rank=1 at=kv.view", "swap rank=2 at=kv.view"])
def test_a_fault_is_found(fault: str) -> None:
    result = cpkv("gate", CONVERSATION, "--world", "lockstep", "--fault", fault)
    assert result.exit_code == 1, result.output
    assert "V6 broke" in result.output
    assert f"replay        cpkv gate {CONVERSATION}.yaml --world lockstep:4" in result.output


def test_reports_have_a_history_like_any_scenario(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(then("{decode: [a], refused: true}"), encoding="utf-8")
    junit, json_file = tmp_path / "gate.xml", tmp_path / "gate.json"
    result = cpkv("gate", file, "--junit", junit, "--json", json_file)
    assert result.exit_code == 1
    assert "refusal: A step of a history is refused if it says so, and only then." in result.output
    (run,) = json.loads(json_file.read_text())["runs"]
    assert (run["title"], run["laws"], run["world"], run["held"]) == (
        "Five tokens",
        ["L1"],
        "lockstep:2",
        False,
    )
    assert run["rows_checked"] == 2 * 2 * (5 + 6)  # ranks, caches, views of forward and decode
    (failure,) = ET.parse(junit).getroot().iter("failure")
    assert failure.get("type") == REFUSAL


def test_histories_are_listed() -> None:
    output = cpkv("gate", "--list", "lanes", env={"COLUMNS": "200"}).output
    assert "lanes/exhausted" in output
    assert "A lane runs out while the other has room" in output
