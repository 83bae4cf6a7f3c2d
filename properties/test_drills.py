"""A rank with old tables never passes silently (L7), and a killed rank is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from properties import drills
from properties.command_line import cpkv, refused
from properties.drills import Drill, drill_of, parse_drill, unnoticed
from properties.found import key_of, undrilled, write_found
from properties.machine import Broken
from properties.proofs import proves
from properties.rehearsal import Rehearsal
from refmodel.errors import Finding, InvalidInput
from sim.cases.library import load_scenario
from sim.engine.stale import KINDS, Stale
from sim.faults.fault import Fault
from sim.gate import histories
from sim.gate.histories import try_history
from sim.gate.verdict import Verdict
from sim.histories.history import Evict, History, Send, Step, Submit
from sim.histories.writing import history_file
from sim.world import World

STEPS = [
    Step(submit=Submit("a", 9)),
    Step(submit=Submit("b", 6, "a", 5)),
    Step(forward=["a", "b"]),
    Step(decode=["a"]),
    Step(send=Send("b")),
    Step(finish="a"),
    Step(evict=Evict(0, 4)),
    Step(abort="b"),
]


def rehearsed(world_size: int) -> Rehearsal:
    rehearsal = Rehearsal(History("By hand", "Small.", ["L7"], world_size, 4, 4, history=[]))
    for step in STEPS:
        rehearsal.step(step)
    assert not rehearsal.findings
    return rehearsal


def effective(rehearsal: Rehearsal) -> set[Stale]:
    """All that can be tried with a history, by trying all luck there is."""
    tried = (drill_of(rehearsal, 0, luck, "lockstep") for luck in range(6_000))
    return {drill for drill in tried if isinstance(drill, Stale)}


@proves("L7")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_old_tables_is_noticed(kind: str) -> None:
    rehearsal = rehearsed(3)
    tried = [drill for drill in effective(rehearsal) if drill.kind == kind]
    assert len(tried) >= 3 * 2, "of each rank, and of several steps"
    with World.lockstep(3) as world:
        assert try_history(world, rehearsal.history).findings == ()
        assert {drill: unnoticed(world, rehearsal.history, drill) for drill in tried} == dict.fromkeys(
            tried, ()
        )


@proves("V6")
@pytest.mark.parametrize("rank", range(3))
def test_a_killed_rank_is_named(rank: int) -> None:
    history = rehearsed(3).history
    with World.lockstep(3) as world:
        calls = try_history(world, history).calls
        assert calls > 4
        for call in range(calls):
            assert unnoticed(world, history, Fault("die", rank, f"#{call}")) == ()


@pytest.mark.gloo
def test_a_killed_process_is_named(gloo_world: Callable[[int], World]) -> None:
    history = rehearsed(2).history
    assert unnoticed(gloo_world(2), history, Fault("die", 1, "#3")) == ()
    assert unnoticed(gloo_world(2), history, Stale("unheard", 1, 3)) == ()
    assert try_history(gloo_world(2), history).findings == ()


@pytest.mark.parametrize("text", ["free rank=1 step=8", "die rank=1 at=#2"])
def test_a_gate_that_sees_nothing_is_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "judge_history", lambda *_: ())
    monkeypatch.setattr(drills, "try_history", lambda *_: Verdict(()))
    with World.lockstep(2) as world:
        (finding,) = unnoticed(world, rehearsed(2).history, parse_drill(text))
    assert finding.received == "nothing"


@pytest.mark.parametrize("text", ["free rank=1 step=7", "extent rank=1 step=4", "die rank=1 at=#7"])
def test_what_is_not_noticed_is_made_small(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(histories, "judge_history", lambda *_: ())
    drill, history = parse_drill(text), rehearsed(3).history
    if isinstance(drill, Fault):  # as if it had not died
        monkeypatch.setattr(drills, "_of_a_death", lambda *_: iter([Finding("V6", "a drill", "1", "none")]))
    with ExitStack() as worlds:

        def world(size: int) -> World:
            return worlds.enter_context(World.lockstep(size))

        def look(history: History, drill: Drill) -> tuple[Finding, ...]:
            return unnoticed(world(history.world_size), history, drill)

        drawn = Broken(history, look(history, drill), seed=0)
        found = undrilled(
            drawn, drill, "lockstep", lambda tried: try_history(world(tried.world_size), tried), look
        )
        small = parse_drill(found.drill)
        assert len(found.history.history) <= 2
        assert found.history.world_size == 2
        assert found.key == key_of(look(found.history, small)[0])
        assert not isinstance(small, Stale) or small.step <= len(found.history.history)
    file = write_found(found, tmp_path)
    assert found.replay(tmp_path).endswith(f'--drill "{found.drill}"')
    assert load_scenario(file)


@pytest.mark.parametrize("drill", [Stale("unheard", 1, 3), Stale("extent", 0, 4), Fault("die", 1, "#5")])
def test_a_drill_is_a_line(drill: Drill) -> None:
    assert parse_drill(str(drill)) == drill


def test_drills_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("unheard", "unheard rank=1", "unheard rank=1 step=0", "free rank=x step=1"):
        with pytest.raises(InvalidInput, match="old tables"):
            Stale.parse(text)
    with pytest.raises(InvalidInput, match="fault"):
        parse_drill("nonsense rank=1 step=2")
    file = tmp_path / "history.yaml"
    file.write_text(history_file(rehearsed(2).history))
    assert cpkv("fuzz", "--replay", file, "--drill", "unheard rank=1 step=3").exit_code == 0
    assert "steps 1 … 8" in refused("fuzz", "--replay", file, "--drill", "unheard rank=1 step=9")
    assert "ranks 0 … 1" in refused("fuzz", "--replay", file, "--drill", "die rank=2 at=#1")
    assert "a history to replay" in refused("fuzz", "--drill", "die rank=1 at=#1")
