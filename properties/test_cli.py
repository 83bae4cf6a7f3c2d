"""The command: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from typer.testing import Result

from properties.command_line import HOLDS, PLAIN, cpkv, refused
from properties.mutants import MUTANTS
from refmodel.laws import LAWS
from sim.cases.trace import read_trace
from sim.cli import commands
from sim.gate import campaign
from sim.gate.marks import MARKS
from sim.gate.record import Entry
from sim.gate.traces import TraceRun, run_trace
from sim.gate.verdict import Verdict
from sim.report.console import LOG_COLUMNS
from sim.world import World

BREAKS = HOLDS.replace("[1, 2]", "[2, 1]")


@dataclass(frozen=True)
class Whole:
    """The catalogue on lockstep, then a small trace."""

    result: Result
    json: dict[str, Any]
    junit: ET.Element


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("reports")
    files = {"json": folder / "gate.json", "junit": folder / "gate.xml"}
    options = [part for name, file in files.items() for part in (f"--{name}", file)]
    result = cpkv("gate", "--world", "lockstep", "--requests", 5, *options)
    return Whole(result, json.loads(files["json"].read_text()), ET.parse(files["junit"]).getroot())


# -- gate: all holds ---------------------------------------------------------------------------------------


def test_the_catalogue_holds_and_reaches_every_mark(whole: Whole) -> None:
    assert whole.result.exit_code == 0, whole.result.output
    assert whole.result.output.splitlines()[-1].startswith("gate held: ")
    assert whole.json["marks"] == {"reached": list(MARKS), "missing": []}


def test_the_table_has_a_line_a_theme_and_fits_a_log(whole: Whole) -> None:
    lines = whole.result.output.splitlines()
    for theme in {run["theme"] for run in whole.json["runs"]}:
        assert sum(bool(re.match(rf"{theme} .* held\s*$", line)) for line in lines) == 1
    assert max(map(len, lines)) <= LOG_COLUMNS


def test_json_has_a_record_a_run(whole: Whole) -> None:
    report = whole.json
    assert report["schema"] == 1
    assert report["held"] is True
    assert report["version"] == importlib.metadata.version("cpkv-testbed")
    assert all(run["held"] and not run["findings"] for run in report["runs"])
    refused = [run for run in report["runs"] if not run["digest"]]
    assert all({"X1", "H6", "T6"} & set(run["laws"]) for run in refused)  # a server that does not start
    assert all(run["collectives"] for run in report["runs"] if run not in refused)
    (trace,) = [run["trace"] for run in report["runs"] if run["trace"]]
    assert trace["requests"] == 5
    assert trace["bytes_fullest_rank"] < trace["bytes_replicated"]


def test_junit_has_a_case_a_run_with_its_theme_as_class(whole: Whole) -> None:
    cases = list(whole.junit.iter("testcase"))
    runs = [(run["theme"], f"{run['name']} on {run['world']}") for run in whole.json["runs"]]
    expected = [*runs, ("reachability", "marks")]
    assert sorted((case.get("classname"), case.get("name")) for case in cases) == sorted(expected)
    assert whole.junit.get("tests") == str(len(cases))
    assert whole.junit.get("failures") == "0"
    assert not list(whole.junit.iter("failure"))


def test_a_scenario_runs_by_name_theme_file_and_folder(scenario: Callable[[str], Path]) -> None:
    file = scenario(HOLDS)
    for name in ("worked/tokens-300", "worked/tokens-300.yaml", file, file.parent):
        result = cpkv("gate", name, "--world", "lockstep")
        assert result.exit_code == 0, result.output
        assert "gate held: 1 run;" in result.output
    assert cpkv("gate", file, "worked", "--world", "lockstep").exit_code == 0


def test_list_runs_nothing() -> None:
    result = cpkv("gate", "worked", "--list")
    assert result.exit_code == 0
    assert "worked/tokens-300" in result.output
    assert "gate held" not in result.output


@pytest.mark.gloo
def test_processes_say_nothing_and_agree(scenario: Callable[[str], Path]) -> None:
    """A gathered write warns; the gate counts that, and a worker must not print it."""
    result = _process("gate", scenario(HOLDS), "--world", "lockstep", "--world", "gloo:2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "lockstep 2, gloo 2" in result.stdout


# -- gate: a law broke -------------------------------------------------------------------------------------


def test_a_failure_says_which_law_where_and_how_to_run_it_again(scenario: Callable[[str], Path]) -> None:
    file = scenario(BREAKS)
    result = cpkv("gate", file, "--seed", 7)
    assert result.exit_code == 1
    output = result.output
    assert f"O6 broke: {LAWS['O6'].statement}" in output
    assert "mine on lockstep:2, seed 7" in output
    assert _value("where", output) == "step 1"
    assert _value("expected", output) == "[2, 1]"
    assert _value("received", output) == "[1, 2]"
    replay = _value("replay", output)
    assert replay == f"cpkv gate {file} --world lockstep:2 --seed 7"
    assert output.splitlines()[-1].startswith("gate broke: 1 of 1 run broke;")
    assert _failures(cpkv(*replay.split()[1:]).output) == _failures(output)


def test_a_finding_of_a_rank_names_rank_page_and_slot() -> None:
    (wrong,) = [mutant for mutant in MUTANTS if mutant.id == "pages-in-id-order"]
    with wrong.in_place():
        result = cpkv("gate", "worked/tokens-1000", "placement", "--world", "lockstep")
    assert result.exit_code == 1
    assert re.search(r"where .*rank 0, request \S+, layer 0, cache kv, page \d+, slot \d+", result.output)
    assert re.search(r"expected +token \d+ of request \S+", result.output)


def test_a_failure_is_in_junit_and_json(scenario: Callable[[str], Path], tmp_path: Path) -> None:
    file, xml, report = scenario(BREAKS), tmp_path / "gate.xml", tmp_path / "gate.json"
    assert cpkv("gate", file, "--junit", xml, "--json", report).exit_code == 1
    root = ET.parse(xml).getroot()
    (failure,) = root.iter("failure")
    assert (root.get("failures"), failure.get("type")) == ("1", "O6")
    assert "replay: cpkv gate " in (failure.text or "")
    (run,) = json.loads(report.read_text())["runs"]
    (finding,) = run["findings"]
    assert finding["law"] == "O6"
    assert finding["where"] == {"step": 1}
    assert (finding["expected"], finding["received"]) == ("[2, 1]", "[1, 2]")
    assert run["held"] is False


def test_github_gets_an_annotation_beside_the_file(scenario: Callable[[str], Path]) -> None:
    file = scenario(BREAKS)
    result = cpkv("gate", file, env={"GITHUB_ACTIONS": "true"})
    (line,) = [line for line in result.output.splitlines() if line.startswith("::error ")]
    assert line.startswith(f"::error file={file},title=O6 in mine on lockstep%3A2::new_pages, ")
    assert "%0Areplay: cpkv gate " in line


def test_a_mark_that_the_catalogue_never_reaches_breaks_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    one = campaign.named_scenarios(["worked/tokens-300"])
    monkeypatch.setattr(campaign, "catalogue", lambda: iter(one))
    result = cpkv("gate", "--requests", 1, env={"GITHUB_ACTIONS": "true"})
    assert result.exit_code == 1
    missing = "empty rank, mid-page prefix, batch, padding rows, gathered write"
    assert f"never reached: {missing}; " in result.output
    assert f"::error title=cpkv gate::the catalogue never reached {missing}" in result.output


def test_marks_are_not_judged_when_only_some_scenarios_ran() -> None:
    result = cpkv("gate", "worked/tokens-300")
    assert result.exit_code == 0
    assert "never reached" not in result.output


# -- gate: bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOLDS.replace("tokens: 40", "tokens: forty"), "steps[0].extend[0].tokens"),
        (HOLDS.replace("[V1]", "[V99]"), "laws[0]"),
        (HOLDS.replace("tokens: 5}", "tokens: 5, prefix: 7}"), "steps[1].extend[0]"),
        (HOLDS.replace("steps:", "steps: ["), "line "),
    ],
)
def test_a_bad_scenario_is_named_with_file_and_path(
    scenario: Callable[[str], Path], text: str, said: str
) -> None:
    file = scenario(text)
    result = cpkv("gate", file)
    assert result.exit_code == 2
    assert str(file) in result.output
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-theme"], "cpkv gate --list"),
        (["worked", "--world", "mpi:4"], "mpi"),
        (["worked/tokens-300", "--world", "lockstep:3"], "world sizes [4]"),
        (["worked", "--junit", "no/such/folder/gate.xml"], "--junit"),
        (["worked", "--json", "."], "--json"),
        (["worked", "--cp", "4"], "--trace FILE"),
        (["--trace", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--trace", "embedded", "--cp", "4", "--world", "lockstep:8"], "--cp"),
        (["--trace", "embedded", "--world", "lockstep:4096"], "4096"),
        (["--trace", "embedded", "--rotation", "sideways"], "sideways"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_before_anything_runs(args: Sequence[str], said: str) -> None:
    result = cpkv("gate", *args)
    assert result.exit_code == 2
    assert said in result.output
    assert "gate held" not in result.output
    assert "Traceback" not in result.output


# -- gate: traces ------------------------------------------------------------------------------------------


def test_a_written_trace_runs_alone_and_its_replay_line_repeats_it(tmp_path: Path) -> None:
    file, report = tmp_path / "trace.jsonl", tmp_path / "gate.json"
    assert cpkv("trace", "--requests", 9, "--seed", 4, "--out", file).exit_code == 0
    assert len(read_trace(file)) == 9
    sizes = ("--cp", 3, "--page", 32, "--rotation", "least-full", "--seed", 5)
    result = cpkv("gate", "--trace", file, "--requests", 6, *sizes, "--json", report)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["theme"], run["world"], run["trace"]["page_size"]) == ("trace", "lockstep:3", 32)
    assert run["digest"] in result.output
    again = cpkv(*run["replay"].split()[1:])
    assert again.exit_code == 0
    assert run["digest"] in again.output


@pytest.mark.gloo
def test_a_trace_is_the_same_on_processes() -> None:
    result = cpkv(
        "gate", "--trace", "embedded", "--requests", 4, "--world", "lockstep:3", "--world", "gloo:2"
    )
    assert result.exit_code == 0, result.output
    assert len(set(re.findall(r"digest +(\w+)", result.output))) == 1


def test_a_trace_that_is_another_on_another_world_breaks_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_differently(run: TraceRun, world: World, *told: Any) -> tuple[Entry, Verdict[Any]]:
        entry, verdict = run_trace(run, world, *told)
        return msgspec.structs.replace(entry, digest=run.world), verdict

    monkeypatch.setattr(campaign, "run_trace", run_differently)
    worlds = ("--world", "lockstep:2", "--world", "lockstep:3")
    result = cpkv("gate", "--trace", "embedded", "--requests", 2, *worlds)
    assert result.exit_code == 1
    assert "V1 broke" in result.output
    assert "gate broke: 1 of 2 runs broke" in result.output


# -- the rest ----------------------------------------------------------------------------------------------


def test_worlds_names_every_kind() -> None:
    kinds = {world["kind"]: world for world in json.loads(cpkv("worlds", "--json").output)}
    assert kinds["lockstep"]["available"]
    output = cpkv("worlds").output
    assert all(kind in output for kind in kinds)


def test_laws_lists_all_of_them_with_what_proves_and_breaks_them() -> None:
    records = json.loads(cpkv("laws", "--json").output)
    assert [record["id"] for record in records] == list(LAWS)
    output = cpkv("laws").output
    assert all(re.search(rf"^{law_id} ", output, re.MULTILINE) for law_id in LAWS)


def test_one_law_in_detail() -> None:
    output = cpkv("laws", "o6").output
    assert LAWS["O6"].statement in output
    assert "test_trace.test_a_request_adds_its_share_of_pages_to_any_lane" in output
    assert "`cpkv laws` lists them" in refused("laws", "Z9")


def test_every_command_teaches() -> None:
    for name, entry in commands().items():
        result = cpkv(name, "--help")
        assert result.exit_code == 0, entry
        assert f"cpkv {name}" in result.output
        assert "Examples" in result.output


def test_a_command_that_cannot_be_loaded_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = importlib.metadata.EntryPoint("broken", "no.such:module", "cpkv.commands")
    monkeypatch.setattr("sim.cli.entry_points", lambda group: [broken])
    result = cpkv("--help")
    assert result.exit_code == 0
    assert "command broken (no.such:module) cannot be loaded" in result.output
    assert cpkv("worlds").exit_code == 0


def test_python_m_sim_is_the_command_and_its_version_needs_no_torch() -> None:
    result = _process("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"cpkv {importlib.metadata.version('cpkv-testbed')}\n"
    loaded = "import sys, sim.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"


def test_a_process_ends_with_the_exit_code_and_messages_on_standard_error(
    scenario: Callable[[str], Path],
) -> None:
    broke = _process("gate", scenario(BREAKS))
    assert (broke.returncode, broke.stderr) == (1, "")
    assert "\x1b" not in broke.stdout
    refused = _process("gate", "no-such-theme")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("cpkv: scenario: expected ")


def _process(*args: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in PLAIN}
    command = [sys.executable, "-m", "sim", *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def _value(name: str, output: str) -> str:
    """What stands behind a name in a failure."""
    (value,) = re.findall(rf"^  {name} +(.*)$", output, re.MULTILINE)
    return str(value)


def _failures(output: str) -> list[str]:
    """The failures alone, without times."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if " on lockstep:2, seed " in line)
    return lines[first:-1]
