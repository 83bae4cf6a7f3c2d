"""Laws T1–T5 in a service: chunks go to decode from all ranks; messages get lost, late or repeated."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scenarios
from properties.mutants import named_mutant
from properties.proofs import proves
from properties.transfer_lives import lives
from refmodel.errors import Finding
from refmodel.storage.reuse import ViewPath
from sim.cases.library import load_scenario
from sim.engine.play import Played, play
from sim.engine.sending import Transfers
from sim.histories.history import Evict, Gap, History, Resend, Send, Step, Submit
from sim.world import World

pytestmark = pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")
FILES = {path.stem: path for path in sorted(Path(scenarios.__path__[0]).glob("*/*.yaml"))}


def history_of(name: str) -> History:
    """One of the catalogue."""
    history = load_scenario(FILES[name])
    assert isinstance(history, History)
    return history


def played_on_all_ranks(history: History, seed: int = 0) -> Played:
    """What rank 0 says, where all ranks say the same."""
    with World.lockstep(history.world_size, seed=seed) as world:
        first, *others = world.run(play, history)
    for other in others:
        assert (other.fingerprints, other.refusals) == (first.fingerprints, first.refusals)
        assert other.digest == first.digest
        assert bool(other.findings) == bool(first.findings)
    return first


def broken(history: History) -> list[Finding | str]:
    """What is wrong with a history on the code as it is: findings, and refusals that were not foreseen."""
    played = played_on_all_ranks(history)
    unforeseen = [
        f"{step.name}: {refusal or 'not refused'}"
        for step, refusal in zip(history.history, played.refusals, strict=False)
        if step.refused != (refusal is not None)
    ]
    return [*played.findings, *unforeseen]


@proves("L1", "T1", "T2", "T3", "T4", "T5")
@settings(max_examples=50)
@given(lives(), st.integers(0, 99))
def test_decode_has_every_token_or_it_is_known_what_is_missing(drawn: tuple[History, int], seed: int) -> None:
    history, rows = drawn
    played = played_on_all_ranks(history, seed)
    assert played.findings == ()
    assert [step.refused for step in history.history] == [r is not None for r in played.refusals]
    assert played.rows_checked == rows


# -- shared pages --------------------------------------------------------------------------------------------


@st.composite
def families(draw: st.DrawFn) -> History:
    """Requests like each other, computed in turns, all sent while others come, are evicted and leave."""
    W, P = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    steps: list[Step] = []
    size, open_ = draw(st.integers(1, 6 * P)), []
    for i, name in enumerate("abc"):
        shared = draw(st.integers(0, size)) if i else 0
        size = max(draw(st.integers(1, 6 * P)), shared)
        steps.append(Step(submit=Submit(name, size, "abc"[i - 1] if i else None, shared)))
        steps.append(Step(forward=[name]))
        open_.append(name)
        lose = draw(st.lists(st.integers(0, W - 1), max_size=W, unique=True))
        steps.append(Step(send=Send(name, lose=tuple(lose))))
        if draw(st.booleans()):
            steps.append(Step(evict=Evict(draw(st.integers(0, W - 1)), 30)))
        if lose:
            steps.append(Step(resend=Resend(name, lose)))
        if draw(st.booleans()):
            steps.append(Step(finish=open_.pop()))
    steps += [Step(finish=name) for name in open_]
    return History(
        title="drawn",
        why="drawn",
        laws=["T5"],
        world_size=W,
        page_size=P,
        pages_per_lane=30,
        history=steps,
        hit=draw(st.sampled_from(["token", "page"])),
        view=draw(st.sampled_from([ViewPath.FULL, ViewPath.PARTIAL])),
        rotate=draw(st.booleans()),
    )


@proves("T2", "T5", "L6")
@settings(max_examples=30)
@given(families())
def test_pages_of_the_tree_are_sent_to_each_request_that_has_them(history: History) -> None:
    assert not [each for each in broken(history) if not str(each).startswith("evict")]


# -- faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incident", ["pd-01", "pd-02", "pd-03", "pd-04", "pd-05", "pd-07"])
def test_the_history_of_an_incident_exposes_it(incident: str) -> None:
    (name,) = (name for name in FILES if name.startswith(incident))
    history = history_of(name)
    assert history.incident == incident
    assert broken(history) == []
    with named_mutant(incident).in_place():
        assert broken(history)


def test_a_page_freed_while_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of("tail-would-be-a-duplicate")
    assert broken(history) == []
    monkeypatch.setattr(Transfers, "require_settled", lambda *_: None)
    found = [str(each) for each in broken(history)]
    assert any(each.startswith("T5 broke: page on its way: expected") for each in found)


def test_a_wrong_number_in_a_history_is_found() -> None:
    history = history_of("lost-message-named")
    step = history.history[2]
    assert step.send is not None
    wrong = msgspec.structs.replace(step.send, missing=[Gap(rank=1, chunk=0, positions=[2, 3, 4])])
    steps = [*history.history[:2], Step(send=wrong), *history.history[3:]]
    (finding,) = broken(msgspec.structs.replace(history, history=steps))
    assert str(finding) == (
        "T3 broke: messages missing: expected rank 1, chunk 0, positions [2, 3, 4], "
        "got rank 1, chunk 0, positions [2, 3, 4, 5] (step 3, request a)"
    )


def test_index_pages_travel_with_kv_pages_and_nothing_without_pages() -> None:
    history = history_of("chunks-w2")
    with World.lockstep(2) as world:
        run = world.execute(play, history)
    sent = [(call.site, call.shape) for call in run.ledgers[0] if call.site.endswith(".send")]
    # Two layers; the longest rank has two pages of the first chunks, one of the last: 4 slots of 8 bytes.
    a_layer = [[(f"{cache}.send", (pages, 32)) for cache in ("kv", "index")] for pages in (2, 2, 1)]
    assert sent == [call for calls in a_layer for call in calls * 2]

    all_lost = history_of("all-of-the-last-chunk-lost")
    steps = all_lost.history[:3]
    with World.lockstep(2) as world:
        run = world.execute(play, msgspec.structs.replace(all_lost, history=steps))
    assert not [call for call in run.ledgers[0] if call.site.endswith(".send")]
