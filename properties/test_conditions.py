"""How a gate runs: schedules, faults, self-checks, and the timeline of what happened."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from properties.command_line import cpkv
from sim.failures import InfrastructureFailed
from sim.world import Run, World


def test_a_fault_is_named_and_its_replay_line_repeats_it() -> None:
    result = cpkv("gate", "worked/tokens-300", "--world", "lockstep", "--fault", "skip rank=1 at=kv.view")
    assert result.exit_code == 1
    assert "rank 1 skipped #0 kv.view" in result.output
    replay = next(line for line in result.output.splitlines() if line.strip().startswith("replay"))
    again = cpkv(*shlex.split(replay)[2:])
    assert again.exit_code == 1
    assert "rank 1 skipped #0 kv.view" in again.output


def test_altered_values_are_found_by_identity_with_rank_page_and_slot() -> None:
    result = cpkv("gate", "worked/tokens-300", "--fault", "values rank=1 at=kv.view")
    assert result.exit_code == 1
    assert "V1 broke" in result.output
    assert re.search(
        r"where +step 1, rank 0, request a, layer 0, cache kv, page \d+, slot 0, position 64", result.output
    )


@pytest.mark.parametrize("schedule", ["in-order", "pct", "pct:5"])
def test_any_schedule_gives_the_same_digests(schedule: str, tmp_path: Path) -> None:
    def digests(*options: str) -> list[str]:
        file = tmp_path / "report.json"
        assert cpkv("gate", "worked", "--world", "lockstep", "--json", file, *options).exit_code == 0
        return [run["digest"] for run in json.loads(file.read_bytes())["runs"]]

    assert digests("--schedule", schedule) == digests()


def test_the_token_of_a_run_is_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    def token(*options: object) -> str:
        result = cpkv("gate", "worked/tokens-300", "--world", "lockstep", "--json", file, *options)
        assert result.exit_code == 0, result.output
        return str(json.loads(file.read_bytes())["runs"][0]["schedule"])

    drawn = token("--seed", 5)
    assert token("--schedule", drawn) == drawn != token("--seed", 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fault", "skip rank=1"], "fault: expected"),
        (["--fault", "melt rank=1 at=kv.view"], "melt"),
        (["--fault", "skip rank=9 at=kv.view"], "rank"),
        (["--schedule", "no-such-token"], "schedule"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(options: list[str], said: str) -> None:
    result = cpkv("gate", "worked/tokens-300", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_self_check_holds_on_the_reference() -> None:
    assert cpkv("gate", "worked", "short_tail", "--self-check").exit_code == 0


def test_a_timeline_has_a_track_for_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert cpkv("gate", "worked/tokens-300", "--world", "lockstep", "--timeline", file).exit_code == 0
    events = json.loads(file.read_bytes())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {"kv.view", "index.view"}
    assert len(slices) == 8


@pytest.mark.parametrize("world", ["lockstep", pytest.param("gloo", marks=pytest.mark.gloo)])
def test_a_run_that_fails_has_a_timeline_up_to_there(world: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    options = ("--fault", "skip rank=1 at=kv.view", "--timeline", file)
    assert cpkv("gate", "worked/tokens-300", "--world", world, *options).exit_code == 1
    events = json.loads(file.read_bytes())["traceEvents"]
    first_calls = {event["tid"]: event["name"] for event in reversed(events) if event["ph"] == "X"}
    assert first_calls == {0: "kv.view", 1: "index.view", 2: "kv.view", 3: "kv.view"}


# -- what the ranks run on ---------------------------------------------------------------------------------


def test_a_machine_that_breaks_twice_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*told: object, **named: object) -> None:
        raise InfrastructureFailed("gloo:2 does not start", expected="2 processes", received="1")

    monkeypatch.setattr(World, "execute", breaks)
    file = tmp_path / "gate.xml"
    result = cpkv("gate", "worked/tokens-300", "--world", "lockstep", "--junit", file)
    assert result.exit_code == 2
    assert "nothing is said about the program" in result.output
    case = ET.parse(file).getroot().find(".//testcase")
    assert case is not None
    assert case.find("error") is not None
    assert case.find("failure") is None


def test_a_second_attempt_leaves_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = World.execute

    def at_second(self: World, *told: Any, **named: Any) -> Run[Any]:
        return replace(execute(self, *told, **named), retried=True)

    monkeypatch.setattr(World, "execute", at_second)
    file = tmp_path / "gate.xml"
    result = cpkv("gate", "worked/tokens-300", "--world", "lockstep", "--junit", file)
    assert result.exit_code == 0
    assert "1 of them at a second attempt" in result.output
    mark = ET.parse(file).getroot().find(".//property[@name='retried']")
    assert mark is not None
    assert mark.get("value") == "true"
