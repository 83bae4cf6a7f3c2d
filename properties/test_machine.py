"""Any serving history holds; and if the engine were wrong, a short one would show it."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from properties.command_line import HOLDS, cpkv, refused
from properties.drawing.service import LAWS
from properties.found import write_found
from properties.fuzz import BUDGETS, MARKS, SHORT, Batch, Campaign, Tally, hunt, profile, run_batch
from properties.fuzz_text import progress_line
from properties.machine import FEWEST_STEPS, Drawn, histories, judge
from properties.mutants import admission, host, lanes, named_mutant, radix, transfer
from properties.mutants.mutant import Mutant
from properties.proofs import proves
from properties.rehearsal import Rehearsal
from sim.cases.library import parse_scenario
from sim.gate.runs import run_scenario
from sim.histories.history import (
    Backup,
    DropHost,
    Evict,
    Gap,
    History,
    Prefetch,
    Resend,
    Send,
    Step,
    Submit,
)
from sim.histories.writing import history_file
from sim.world import World

CI_BUDGET = BUDGETS["ci"]  # histories within which a mutant must be found

# Mutants that no history can show, and why.
UNREACHABLE = {
    "failed-take-keeps-part": "make_room comes first, so the engine's take never fails",
    "page-from-another-lane": "make_room comes first, so the engine's take never fails",
    "double-free": "a right engine frees no page twice",
    "double-free-ignored": "a right engine frees no page twice",
    "part-of-a-page-freed": "the engine frees by pages, never by slots",
    "a-page-for-each-rank": "the engine counts new pages by their lanes",
    "open-tail-not-counted": "the engine counts new pages by their lanes",
    "tail-page-overwritten": "the engine's slots come from page tables",
    "tail-page-last": "the engine's slots come from page tables",
    "newest-leaf-first": "which leaf goes is the one thing that the model leaves open, and ranks do alike",
    "digest-of-the-first-page": "it blinds the comparison of ranks, which all hold the same tokens",
    "last-page-copied": "the engine asks before it takes pages, so the last page is the tail",
    "flag-widens-every-batch": "the engine's KV is always shared",
    "bytes-estimated": "a batch would need more than a million tokens",
    "layers-in-page-order": "bytes return as they left: only who reads the pool itself sees the order",
    "layout-rewritten": "what a server rewrites at start-up is no history",
    "shared-kv-on-decode": "the server of a history has one role",
    "batch-flag-without-shared-kv": "the engine's KV is always shared",
    "first-and-last-slot-checked": "the engine's slots come from page tables: within a page they ascend",
    "page-twice": "the engine's slots come from page tables, which have no page twice",
    "any-lane-will-do": "the engine takes pages of the lanes it is to land in",
    "unpinned-for-all": "the page of a load is in the tree, so nobody else loads it",
    "finished-half-loaded": "the engine brings all layers before it ends a load",
    "backed-up-at-each-hit": "the host cache leaves out what it has",
    "positions-unchecked": "right senders send each position once",
    "pages-of-any-size": "a decode server with pages of another size does not start",
    "index-count-unchecked": "right senders send the index pages of their KV pages",
    "last-message-wins": "right senders send one message of a chunk",
}
ROOMS = (lanes, radix, admission, host, transfer)
OF_THE_ROOMS = [m for room in ROOMS for m in vars(room).values() if isinstance(m, Mutant)]
REACHABLE = [mutant.id for mutant in OF_THE_ROOMS if mutant.id not in UNREACHABLE]


@proves(*LAWS)
@settings(max_examples=settings().max_examples // 2, phases=[Phase.generate, Phase.reuse])
@given(histories())
def test_any_history_holds(drawn: Drawn) -> None:
    judge(drawn)


@pytest.mark.slow
def test_a_hunt_reaches_every_place_that_hurts_and_finds_nothing() -> None:
    tally = hunt(Campaign(seed=1, examples=500), threading.Event(), lambda _: None)
    assert not tally.found, progress_line(tally, 1.0)
    assert set(tally.marks) >= set(MARKS), progress_line(tally, 1.0)
    assert tally.steps >= FEWEST_STEPS * tally.histories


# Each is caught by a property too, in every run (test_mutants.py): a hunt from scratch takes seconds more.
@pytest.mark.slow
@pytest.mark.parametrize("mutant_id", REACHABLE[::8] if profile() == "dev" else REACHABLE)
def test_a_wrong_engine_is_found_by_a_short_history(mutant_id: str) -> None:
    stop = threading.Event()

    def enough(tally: Tally) -> None:
        if tally.known:
            stop.set()

    with named_mutant(mutant_id).in_place():
        tally = hunt(Campaign(seed=0, examples=CI_BUDGET), stop, enough)
    assert tally.found, f"not found in {tally.histories} histories"
    found = min(tally.found.values(), key=lambda found: len(found.history.history))
    assert len(found.history.history) <= SHORT
    with World.lockstep(found.history.world_size) as world:
        assert run_scenario(found.history, world).held, "the right engine fails too"


def test_mutants_that_are_left_out_exist() -> None:
    assert UNREACHABLE.keys() <= {mutant.id for mutant in OF_THE_ROOMS}


def test_what_was_found_is_a_file_that_the_gate_replays(tmp_path: Path) -> None:
    with named_mutant("duplicates-leak").in_place():
        (found,) = run_batch(Batch(seed=0, examples=100), threading.Event()).found.values()
        result = cpkv("gate", write_found(found, tmp_path))
        assert result.exit_code == 1, result.output
        assert found.finding.law in result.output
        known = run_batch(Batch(seed=0, examples=20, known=[found.key]), threading.Event())
        assert found.key not in known.found
    assert cpkv("gate", tmp_path / found.file_name).exit_code == 0
    assert cpkv("fuzz", "--replay", tmp_path / found.file_name).exit_code == 0


def test_a_rehearsal_knows_hits_refusals_and_free_pages() -> None:
    """Worked by hand: W = 2, P = 4, two pages a lane; twelve tokens lie in lanes 0, 1, 1.

    So lane 1 is full, and b, which needs a page there for its copy or its last page, locks all that is in it.
    """
    steps = [
        Step(submit=Submit("a", 12)),
        Step(forward=["a"]),
        Step(submit=Submit("b", 12, "a", 6)),
        Step(decode=["b"]),
        Step(forward=["b"]),
        Step(finish="a"),
        Step(forward=["b"]),
        Step(abort="b"),
        Step(evict=Evict(1, 2)),
    ]
    rehearsal = Rehearsal(History("By hand", "Small.", ["L4"], 2, 4, 2, history=[]))
    for step in steps:
        rehearsal.step(step)
    assert not rehearsal.findings
    done = rehearsal.history.history
    assert [step.refused for step in done] == [False, False, False, True, True, False, True, False, False]
    assert done[0].expect.valid == {"a": 0}
    assert (done[1].expect.valid, done[1].expect.free) == ({"a": 12}, [1, 0])
    assert done[2].expect.valid == {"b": 6}
    assert done[7].expect.free == [1, 0]
    assert rehearsal.model.free_pages() == (2, 2)
    with World.lockstep(2) as world:
        assert run_scenario(rehearsal.history, world).held


def test_a_rehearsal_knows_what_is_loaded_back_and_what_is_lost_on_the_way() -> None:
    """Worked by hand: W = 2, P = 4, twelve tokens lie in lanes 0, 1, 1, and all have host copies.

    b hits eleven of them from the host: one is left to compute. Of its chunk rank 1 has the pages 1 and 2.
    """
    steps = [
        Step(submit=Submit("a", 12)),
        Step(forward=["a"]),
        Step(finish="a"),
        Step(evict=Evict(0, 3)),
        Step(evict=Evict(1, 3)),
        Step(submit=Submit("b", 12, "a", 12)),
        Step(drop_host=DropHost(1, 2)),
        Step(forward=["b"]),
        Step(send=Send("b", lose=(1,))),
        Step(finish="b"),
        Step(backup=Backup("b", 2, 6)),
        Step(resend=Resend("b", [1])),
        Step(finish="b"),
    ]
    setting = History("By hand", "Small.", ["H3"], 2, 4, 3, history=[], host_pages_per_lane=2)
    rehearsal = Rehearsal(setting)
    for step in steps:
        rehearsal.step(step)
    assert not rehearsal.findings
    done = rehearsal.history.history
    assert [number for number, step in enumerate(done) if step.refused] == [9, 10]
    assert (done[5].expect.valid, done[5].expect.free) == ({"b": 11}, [2, 1])
    assert done[8].send is not None
    assert done[11].resend is not None
    assert done[8].send.missing == [Gap(1, 0, [1, 2])]
    assert done[11].resend.missing == []
    with World.lockstep(2) as world:
        assert run_scenario(rehearsal.history, world).held


def test_a_history_survives_its_file() -> None:
    steps = [
        Step(submit=Submit("a", 9)),
        Step(evict=Evict(0, 1)),
        Step(finish="a", refused=True),
        Step(send=Send("a", 4, lose=(1,), missing=[Gap(1, 0, [0])])),
        Step(prefetch=Prefetch("a", 2, {"kv": 1})),
    ]
    history = History("T", "W", ["L1"], 2, 4, 3, steps, hit="page", chunk=8, rotate=True)
    assert parse_scenario(history_file(history), "") == history


def test_the_command_says_how_much_was_done(tmp_path: Path) -> None:
    report = tmp_path / "fuzz.json"
    places = ("--out", tmp_path / "found", "--database", tmp_path / "base", "--json", report)
    result = cpkv("fuzz", "--examples", 20, *places)
    assert result.exit_code == 0, result.output
    assert "fuzz held: 20 histories" in result.output
    numbers = json.loads(report.read_bytes())
    assert (numbers["histories"], numbers["held"], numbers["found"]) == (20, True, [])
    assert f"20 histories and {numbers['steps']} steps" in result.output
    assert "--json" in refused("fuzz", "--json", tmp_path)
    assert not (tmp_path / "found").exists()


def test_the_command_writes_what_it_finds_and_exits_with_1(tmp_path: Path) -> None:
    with named_mutant("coverage-taken-for-valid").in_place():
        result = cpkv("fuzz", "--examples", 60, "--out", tmp_path, "--json", tmp_path / "fuzz.json")
    assert result.exit_code == 1, result.output
    (line, *_) = [line for line in result.output.splitlines() if line.strip().startswith("replay")]
    assert any(str(file) in line for file in tmp_path.iterdir())
    numbers = json.loads((tmp_path / "fuzz.json").read_bytes())
    assert not numbers["held"]
    assert {Path(found["file"]).suffix for found in numbers["found"]} == {".yaml"}
    assert "fuzz broke: " in result.output


def test_an_early_end_keeps_what_was_found() -> None:
    stop = threading.Event()
    with named_mutant("duplicates-leak").in_place():
        tally = hunt(Campaign(examples=10_000), stop, lambda tally: stop.set() if tally.found else None)
    assert len(tally.found) == 1
    assert run_batch(Batch(seed=0, examples=50), stop).histories == 0


def test_bad_options_are_refused(tmp_path: Path, scenario: Callable[[str], Path]) -> None:
    no_history = scenario(HOLDS)
    assert "lockstep or gloo" in refused("fuzz", "--world", "nccl")
    assert "absent.yaml" in refused("fuzz", "--replay", tmp_path / "absent.yaml")
    assert "a history" in refused("fuzz", "--replay", no_history)


@pytest.mark.slow
def test_processes_hunt_beside_each_other() -> None:
    tally = hunt(
        Campaign(examples=150, jobs=2), multiprocessing.get_context("forkserver").Event(), lambda _: None
    )
    assert tally.histories >= 150
    assert not tally.found
