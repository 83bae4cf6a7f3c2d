"""Histories: files that make no sense are refused, runs are judged, steps are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from properties.command_line import cpkv, refused
from properties.mutants import named_mutant
from refmodel.errors import InvalidInput
from sim.cases.library import catalogue, find_scenarios, parse_scenario, theme_of
from sim.engine.play import Played, play
from sim.gate.histories import REFUSAL, judge_history
from sim.gate.runs import run_scenario
from sim.gate.setting import Setting
from sim.histories.history import OPERATIONS, History
from sim.histories.writing import history_file
from sim.picture.ledger_of_steps import ledger_of_steps
from sim.world import World

HISTORIES = tuple(scenario for scenario in catalogue() if isinstance(scenario, History))

STARTED = tuple(history for history in HISTORIES if history.refused_at_start is None)

SMALLEST = """\
title: Five tokens
why: The smallest history there is.
laws: [L1]
world_size: 2
page_size: 4
pages_per_lane: 3
history:
  - submit: {request: a, tokens: 5}
  - forward: [a]
"""


def parsed(text: str) -> History:
    history = parse_scenario(text, "mine.yaml")
    assert isinstance(history, History)
    return history


def then(*steps: str) -> str:
    """The smallest history, and what happens next."""
    return SMALLEST + "".join(f"  - {step}\n" for step in steps)


def changed(old: str, new: str) -> str:
    assert SMALLEST.count(old) == 1
    return SMALLEST.replace(old, new)


# -- what makes no sense is refused, by name ---------------------------------------------------------------

REFUSED = {
    "steps too": (SMALLEST + "steps: []\n", "the whole file", "known keys", "steps"),
    "unknown key": (then("{submit: {request: b, tokns: 5}}"), "history[2].submit", "known keys", "'tokns'"),
    "unknown operation": (then("{preempt: a}"), "history[2]", "known keys", "preempt"),
    "no steps": (
        SMALLEST.partition("  - submit")[0].replace("history:", "history: []"),
        "history",
        ">= 1",
        "",
    ),
    "no operation": (then("{refused: true}"), "history[2]", "one operation", "none"),
    "two operations": (then("{decode: [a], finish: a}"), "history[2]", "one operation", "decode and finish"),
    "no laws": (changed("[L1]", "[]"), "laws", ">= 1", "[]"),
    "unknown law": (changed("[L1]", "[L1, L9]"), "laws[1]", "L8", "L9"),
    "no pages": (changed("pages_per_lane: 3", "pages_per_lane: 0"), "pages_per_lane", ">= 1", "0"),
    "no ranks": (changed("world_size: 2", "world_size: 0"), "world_size", ">= 1", "0"),
    "unknown hit": (SMALLEST + "hit: line\n", "hit", "token, page", "line"),
    "unknown layout": (SMALLEST + "host_layout: best\n", "host_layout", "layer_first, page_first", "best"),
    "round-robin": (SMALLEST + "split: round_robin\n", "split", "token_balanced", "round_robin"),
    "no view": (SMALLEST + "view: none\n", "view", "without model", "none"),
    "draft layers of a model": (
        SMALLEST + "model: true\ndraft_layers: 1\n",
        "draft_layers",
        "0 with model",
        "1",
    ),
    "pages of another size on decode": (
        SMALLEST + "decode_page_size: 8\n",
        "decode_page_size",
        "page_size, 4",
        "8",
    ),
    "pairs of nothing": (SMALLEST + "bigram: true\n", "bigram", "false without draft_layers", "True"),
    "pairs on the host": (
        SMALLEST + "bigram: true\ndraft_layers: 1\nhost_pages_per_lane: 3\n",
        "bigram",
        "false with a host cache",
        "True",
    ),
    "a backend of slices": (SMALLEST + "backend: nixl\n", "backend", "mooncake", "nixl"),
    "refused for nothing that is a setting": (
        SMALLEST + "refused_at_start: layers\n",
        "refused_at_start",
        "one of",
        "layers",
    ),
    "chunk below a page": (SMALLEST + "chunk: 3\n", "chunk", ">= 4", "3"),
    "layout that the engine cannot read": (
        SMALLEST + "host_layout: page_first\ncopy_engine: direct\n",
        "host_layout",
        "layer_first",
        "page_first",
    ),
    "unknown request": (then("{decode: [a, b]}"), "history[2].decode[1]", "earlier step", "b"),
    "request submitted later": (
        then("{finish: b}", "{submit: {request: b, tokens: 1}}"),
        "history[2].finish",
        "earlier step",
        "b",
    ),
    "request that was not let in": (
        then("{submit: {request: b, tokens: 99}, refused: true}", "{forward: [b]}"),
        "history[3].forward[0]",
        "earlier step",
        "b",
    ),
    "sent by nobody": (then("{send: {request: b}}"), "history[2].send.request", "earlier step", "b"),
    "like nobody": (
        then("{submit: {request: b, tokens: 5, like: c, shared: 3}}"),
        "history[2].submit.like",
        "earlier step",
        "c",
    ),
    "a name twice": (
        then("{submit: {request: a, tokens: 5}}"),
        "history[2].submit.request",
        "a new name",
        "a",
    ),
    "blocks and a likeness": (
        then("{submit: {request: b, tokens: 5, like: a, shared: 2, blocks: [1]}}"),
        "history[2].submit.like",
        "no such key with blocks",
        "a",
    ),
    "too few blocks": (
        then("{submit: {request: b, tokens: 5, blocks: [1], block_tokens: 4}}"),
        "history[2].submit.blocks",
        "2 for 5 tokens, one for 4",
        "1",
    ),
    "too many blocks": (
        then("{submit: {request: b, tokens: 512, blocks: [1, 2]}}"),
        "history[2].submit.blocks",
        "1 for 512 tokens, one for 512",
        "2",
    ),
    "a block below 0": (
        then("{submit: {request: b, tokens: 5, blocks: [-1]}}"),
        "history[2].submit.blocks[0]",
        ">= 0",
        "-1",
    ),
    "size of no block": (
        then("{submit: {request: b, tokens: 5, block_tokens: 4}}"),
        "history[2].submit.block_tokens",
        "without blocks",
        "4",
    ),
    "prefetch without storage": (
        then("{submit: {request: b, tokens: 5, prefetch: true}}"),
        "history[2].submit.prefetch",
        "false without storage",
        "True",
    ),
    "shared with nobody": (
        then("{submit: {request: b, tokens: 5, shared: 3}}"),
        "history[2].submit.shared",
        "like",
        "3",
    ),
    "more shared than there is": (
        then("{submit: {request: b, tokens: 3, like: a, shared: 4}}"),
        "history[2].submit.shared",
        "at most 3",
        "4",
    ),
    "expected of nobody": (
        then("{finish: a, expect: {valid: {b: 1}}}"),
        "history[2].expect.valid",
        "sub",
        "b",
    ),
    "too few lanes": (then("{finish: a, expect: {free: [3]}}"), "history[2].expect.free", "2 numbers", "[3]"),
}


@pytest.mark.parametrize(("text", "path", "expected", "received"), REFUSED.values(), ids=REFUSED)
def test_a_history_that_makes_no_sense_is_refused(text: str, path: str, expected: str, received: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_scenario(text, "mine.yaml")
    error = refusal.value
    assert (error.where.file, error.where.path) == ("mine.yaml", path)
    assert expected in error.expected
    assert received in error.received


def test_a_step_that_must_be_refused_may_name_anybody() -> None:
    history = parsed(then("{forward: [b], refused: true}", "{finish: a}", "{finish: a, refused: true}"))
    with World.lockstep(2) as world:
        assert run_scenario(history, world).held


@pytest.mark.parametrize("theme", ["lanes", "radix", "chunks", "admission"])
def test_a_history_is_what_its_file_says_written_anew(theme: str) -> None:
    for history in HISTORIES:
        if theme_of(history) == theme:
            assert parse_scenario(history_file(history), history.file) == history


def test_the_page_of_histories_names_every_key_and_operation() -> None:
    page = Path(__file__).parent.parent / "docs" / "histories.md"
    if not page.exists():
        pytest.skip("the documentation is not part of the installed package")
    text = page.read_text(encoding="utf-8")
    keys = [field.encode_name for field in msgspec.structs.fields(History) if field.name != "file"]
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert [name for name in OPERATIONS if f"| `{name}: " not in text] == []
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert _named("radix/shared-tail-is-copied").history[:6] == parsed(example).history


# -- the verdict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "law", "received"),
    [
        ("{submit: {request: b, tokens: 9, like: a, shared: 5}, expect: {valid: {b: 5}}}", "L4", "4"),
        ("{finish: a, expect: {valid: {a: 5}}}", "L4", "none: it has left"),
        ("{finish: a, expect: {free: [3, 2]}}", "L1", "[2, 2]"),
        ("{decode: [a], expect: {free: [1, 2]}}", "L2", "[2, 2]"),
        ("{evict: {lane: 0, free: 2}, expect: {free: [2, 3]}}", "L3", "[2, 2]"),
    ],
)
def test_a_wrong_number_is_found(step: str, law: str, received: str) -> None:
    with World.lockstep(2) as world:
        (finding,) = run_scenario(parsed(then(step)), world).findings
    assert (finding.law, finding.received, finding.where.step) == (law, received, 3)


@pytest.mark.parametrize(
    ("forward", "law"), [("{forward: [b, c], expect: {valid: {c: 1}}}", "G2"), ("{forward: [b]}", "")]
)
def test_who_waits_is_a_number_too(forward: str, law: str) -> None:
    more = ("{submit: {request: b, tokens: 4}}", "{submit: {request: c, tokens: 1}}", forward)
    with World.lockstep(2) as world:
        findings = run_scenario(parsed(then(*more) + "max_requests: 1\n"), world).findings
    assert [finding.law for finding in findings] == [law] * bool(law)


def test_a_refusal_that_nobody_expected_is_found_with_its_text() -> None:
    with World.lockstep(2) as world:
        (finding,) = run_scenario(parsed(then("{forward: [a]}")), world).findings
    assert (finding.law, finding.what, finding.expected) == (REFUSAL, "forward", "none")
    assert "expected one in phase prefill, got ready" in finding.received


def test_a_step_that_should_have_been_refused_is_found() -> None:
    with World.lockstep(2) as world:
        (finding,) = run_scenario(parsed(then("{decode: [a], refused: true}")), world).findings
    assert (finding.law, finding.expected, finding.received) == (REFUSAL, "a refusal", "none")
    assert finding.where.step == 3


def played(history: History) -> list[Played]:
    with World.lockstep(history.world_size) as world:
        return world.run(play, history)


def changed_at(numbers: tuple[int, ...], step: int) -> tuple[int, ...]:
    return (*numbers[: step - 1], numbers[step - 1] + 1, *numbers[step:])


def test_ranks_that_drift_apart_are_found_at_the_first_step_and_by_name() -> None:
    history = parsed(then("{decode: [a]}", "{finish: a}"))
    first, second = played(history)
    drifted = replace(second, fingerprints=changed_at(changed_at(second.fingerprints, 3), 4))
    (finding,) = judge_history(history, [first, drifted])
    assert (finding.law, finding.what, finding.received) == (
        "L7",
        "tables after decode",
        "another on ranks 1",
    )
    assert (finding.where.step, finding.where.rank) == (3, 1)


def test_ranks_that_refuse_another_step_or_see_other_bytes_are_found() -> None:
    history = parsed(SMALLEST)
    first, second = played(history)
    (finding,) = judge_history(history, [first, replace(second, refusals=(None, "no pages"))])
    assert (finding.law, finding.what) == ("L7", "refusal of forward")
    assert (finding.expected, finding.received) == ("rank 0's: none", "another on ranks 1: no pages")
    (finding,) = judge_history(history, [first, replace(second, digest="0")])
    assert (finding.law, finding.where.rank) == ("V1", 1)


def test_what_all_ranks_found_is_one_finding_and_a_leak_is_one_of_lanes() -> None:
    (history,) = find_scenarios("radix/duplicates-are-freed-once")
    with named_mutant("duplicates-leak").in_place(), World.lockstep(2) as world:
        findings = run_scenario(history, world).findings
    leaks = [finding for finding in findings if finding.what == "pages that requests hold"]
    assert {finding.law for finding in leaks} == {"L1"}
    steps = [finding.where.step for finding in leaks]
    assert len(set(steps)) == len(steps)


# -- conditions --------------------------------------------------------------------------------------------

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


# -- show --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", STARTED, ids=lambda history: history.file.removesuffix(".yaml"))
def test_every_history_can_be_shown_and_its_pages_add_up(history: History) -> None:
    lines = ledger_of_steps(history)
    assert [line.step for line in lines] == [*range(1, len(history.history) + 1)]
    for step, line in zip(history.history, lines, strict=True):
        assert line.refused == step.refused
        assert step.expect.free in (None, line.free)
        assert all(0 <= free <= history.pages_per_lane for free in line.free)


def test_show_tells_hits_evictions_and_refusals() -> None:
    by_step = {line.step: line for line in ledger_of_steps(_named("lanes/more-than-one-victim"))}
    assert by_step[5].taken == [4, 4]
    assert (by_step[11].taken, by_step[11].evicted, by_step[11].free) == ([1, 2], [2, 2], [1, 0])
    assert by_step[11].outcome == "e 0 → 12"
    assert by_step[13].outcome == "g hits 8 of 9"
    assert by_step[13].operation == "submit g tokens 9 like c shared 8"
    waiting = ledger_of_steps(_named("admission/nobody-is-passed-over"))
    assert waiting[3].outcome == "a 0 → 8, b waits, c waits"


def _named(name: str) -> History:
    (history,) = find_scenarios(name)
    assert isinstance(history, History)
    return history


def test_show_prints_a_line_a_step(tmp_path: Path, scenario: Callable[[str], Path]) -> None:
    output = cpkv("show", "lanes/exhausted").output
    assert output.startswith("A lane runs out while the other has room\n")
    assert "refused: pages of lane 0: expected 1 free," in output
    only = json.loads(cpkv("show", scenario(SMALLEST), "--step", 2, "--json").output)
    assert [(line["operation"], line["taken"]) for line in only] == [("forward a", [1, 1])]
    assert "1 … 2" in refused("show", scenario(SMALLEST), "--step", 3)
    assert "a scenario of forwards" in refused("show", scenario(SMALLEST), "--png", tmp_path / "no.png")
