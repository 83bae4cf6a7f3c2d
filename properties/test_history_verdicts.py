"""Runs of a history are judged: wrong numbers, refusals, and ranks that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from properties.mutants import named_mutant
from properties.smallest_history import SMALLEST, parsed, then
from sim.cases.library import find_scenarios
from sim.engine.play import Played, play
from sim.gate.histories import REFUSAL, judge_history
from sim.gate.runs import run_scenario
from sim.histories.history import History
from sim.world import World


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
