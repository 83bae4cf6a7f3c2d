"""Any serving history holds; and if the engine were wrong, a short one would show it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from properties.command_line import HOLDS, cpkv, refused
from properties.fuzz import Batch, Campaign, Tally, hunt, run_batch, write_found
from properties.fuzz_text import progress_line
from properties.machine import LAWS, STEPS, HistoryMachine
from properties.mutants import admission, lanes, named_mutant, radix
from properties.mutants.mutant import Mutant
from properties.proofs import proves
from properties.rehearsal import MARKS, Rehearsal
from properties.shrinking import shrunk
from sim.cases.library import parse_scenario
from sim.gate.runs import run_scenario
from sim.histories.history import Evict, History, Step, Submit
from sim.histories.writing import history_file
from sim.world import World

CI_BUDGET = 300  # histories within which a mutant must be found
LONGEST = 8  # steps of a history that shows one

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
    "radix-02": "of bigram trees, which the engine has none of",
    "page-key-of-p-tokens": "of bigram trees, which the engine has none of",
    "newest-leaf-first": "which leaf goes is the one thing that the model leaves open, and ranks do alike",
    "digest-of-the-first-page": "it blinds the comparison of ranks, which all hold the same tokens",
    "last-page-copied": "the engine asks before it takes pages, so the last page is the tail",
    "flag-widens-every-batch": "the engine's KV is always shared",
    "batch-flag-ignored": "the machine draws no history without the batch flag",
    "bytes-estimated": "a batch would need more than a million tokens",
}
# Found, but a history that shows it may hold when it is played again, so it does not shrink reliably.
WAVERING = {"radix-04"}  # its victims depend on where objects lie in memory
ROOMS = (lanes, radix, admission)
OF_THE_ROOMS = [m for room in ROOMS for m in vars(room).values() if isinstance(m, Mutant)]
REACHABLE = [
    mutant.id
    for mutant in OF_THE_ROOMS
    if mutant.id not in UNREACHABLE and not mutant.place.startswith("refmodel.config.")
]


@proves(*LAWS)
def test_any_history_holds() -> None:
    run_state_machine_as_test(
        HistoryMachine,
        settings=settings(max_examples=settings().max_examples // 2, stateful_step_count=STEPS),
    )


@pytest.mark.slow
def test_a_hunt_reaches_every_place_that_hurts_and_finds_nothing() -> None:
    tally = hunt(Campaign(seed=1, examples=250), threading.Event(), lambda _: None)
    assert not tally.found, progress_line(tally, 1.0)
    assert set(tally.marks) >= set(MARKS) - {"victims of one age"}, progress_line(tally, 1.0)
    assert tally.steps >= 12 * tally.histories


@pytest.mark.slow
@pytest.mark.parametrize("mutant_id", REACHABLE)
def test_a_wrong_engine_is_found_by_a_short_history(mutant_id: str) -> None:
    stop = threading.Event()

    def enough(tally: Tally) -> None:
        if tally.found:
            stop.set()

    with named_mutant(mutant_id).in_place():
        tally = hunt(Campaign(seed=0, examples=CI_BUDGET), stop, enough)
    assert tally.found, f"not found in {tally.histories} histories"
    (found,) = tally.found.values()
    assert len(found.history.history) <= LONGEST or mutant_id in WAVERING
    with World.lockstep(found.history.world_size) as world:
        assert run_scenario(found.history, world).held, "the right engine fails too"


def test_mutants_that_no_history_can_show_exist() -> None:
    assert set(UNREACHABLE) <= {mutant.id for mutant in OF_THE_ROOMS}


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
    assert rehearsal.free_pages() == (2, 2)
    with World.lockstep(2) as world:
        assert run_scenario(rehearsal.history, world).held


def test_a_history_survives_its_file() -> None:
    steps = [Step(submit=Submit("a", 9)), Step(evict=Evict(0, 1)), Step(finish="a", refused=True)]
    history = History("T", "W", ["L1"], 2, 4, 3, steps, hit="page", chunk=8, rotate=True)
    assert parse_scenario(history_file(history), "") == history


def test_a_history_is_shrunk_to_what_matters() -> None:
    steps = [Step(submit=Submit(name, 30)) for name in "abcdef"]
    history = History("T", "W", ["L1"], 8, 16, 6, steps, prefetch=True)
    small = shrunk(history, lambda h: sum(s.submit.tokens > 2 for s in h.history if s.submit) > 1)
    assert [step.submit for step in small.history if step.submit] == [
        Submit(step.submit.request, 3) for step in small.history if step.submit
    ]
    assert (len(small.history), small.world_size, small.page_size, small.prefetch) == (2, 1, 1, False)


def test_the_command_says_how_much_was_done(tmp_path: Path) -> None:
    result = cpkv("fuzz", "--examples", 20, "--out", tmp_path / "found", "--database", tmp_path / "base")
    assert result.exit_code == 0, result.output
    assert "fuzz held: 20 histories" in result.output
    assert not (tmp_path / "found").exists()


def test_the_command_writes_what_it_finds_and_exits_with_1(tmp_path: Path) -> None:
    with named_mutant("coverage-taken-for-valid").in_place():
        result = cpkv("fuzz", "--examples", 60, "--out", tmp_path)
    assert result.exit_code == 1, result.output
    (line, *_) = [line for line in result.output.splitlines() if line.strip().startswith("replay")]
    assert any(str(file) in line for file in tmp_path.iterdir())
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
