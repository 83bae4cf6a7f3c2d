"""Laws T1–T5, X1 in a service: chunks go to decode from all ranks; messages get lost, late or repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scenarios
from properties.mutants import named_mutant
from properties.proofs import proves
from properties.strategies import grids
from refmodel.errors import Finding
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.split import Split
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


# -- a model that knows tokens and messages, and no pages ----------------------------------------------------


@dataclass
class Life:
    """One request. Each method does a step, and says whether it must be accepted."""

    world_size: int
    page_size: int
    chunk: int | None
    tokens: int
    valid: int = 0
    has_left: bool = False
    cancelled: bool = False
    sent: list[int] = field(default_factory=list)  # tokens of whole pages sent, after each chunk
    is_over: bool = False  # the last chunk was sent
    lost: set[tuple[int, int]] = field(default_factory=set)  # (rank, chunk)
    late: set[tuple[int, int]] = field(default_factory=set)
    rows: int = 0  # rows that were compared with the truth, of one cache and layer

    @property
    def done(self) -> bool:
        return self.is_over and not self.lost and not self.late and not self.cancelled

    @property
    def settled(self) -> bool:
        return not self.sent or self.done or self.cancelled

    def sensible(self) -> list[str]:
        """Operations that may be accepted; those of a transfer more often."""
        complete = self.valid == self.tokens
        under_way = bool(self.sent) and not self.settled
        weights = {
            "forward": 2 * (not complete),
            "send": 3 * (self.valid > 0 and not self.is_over and not self.cancelled),
            "resend": 6 * (bool(self.lost) and not self.cancelled),
            "cancel": int(under_way),
            "decode": int(complete and self.settled),
            "finish": int(complete and self.settled),
        }
        return [name for name, weight in weights.items() for _ in range(0 if self.has_left else weight)]

    def forward(self) -> bool:
        if self.has_left or self.valid == self.tokens:
            return False
        if self.chunk is None or self.tokens - self.valid <= self.chunk:
            self.valid = self.tokens
        else:
            self.valid = (self.valid + self.chunk) // self.page_size * self.page_size
        self.rows += self.valid
        return True

    def decode(self) -> bool:
        if self.has_left or self.valid < self.tokens or not self.settled:
            return False
        self.tokens += 1
        self.valid += 1
        self.rows += self.valid
        return True

    def send(self, wanted: Send) -> bool:
        end = self.valid if wanted.tokens is None else wanted.tokens
        is_last = end == self.tokens
        fates = [*wanted.lose, *wanted.repeat, *wanted.late]
        fits = max([1, *self.sent[-1:]]) <= end <= self.valid
        if self.has_left or self.is_over or self.cancelled or not fits or len(set(fates)) != len(fates):
            return False
        if is_last and wanted.late:
            return False
        self.lost |= {(rank, len(self.sent)) for rank in wanted.lose}
        self.late = {(rank, len(self.sent)) for rank in wanted.late}
        self.sent.append(end // self.page_size * self.page_size)
        self.is_over = is_last
        self._compared()
        return True

    def resend(self, ranks: list[int]) -> bool:
        if self.has_left or self.cancelled or not set(ranks) <= {rank for rank, _ in self.lost}:
            return False
        self.lost = {(rank, chunk) for rank, chunk in self.lost if rank not in ranks}
        self._compared()
        return True

    def _compared(self) -> None:
        """Decode's rows are looked at as it gets the last of them, and as the request leaves."""
        if self.done:
            self.rows += self.tokens

    def cancel(self) -> bool:
        accepted = not self.has_left and bool(self.sent) and not self.done and not self.cancelled
        self.cancelled |= accepted
        return accepted

    def finish(self) -> bool:
        accepted = not self.has_left and self.valid == self.tokens and self.settled
        self.has_left |= accepted
        self.rows += self.valid if accepted and self.done else 0
        return accepted

    def abort(self) -> bool:
        accepted = not self.has_left and self.settled
        self.has_left |= accepted
        return accepted


OPERATIONS = ["forward", "send", "resend", "decode", "cancel", "finish", "abort"]


FATES = ["arrives", "arrives", "lose", "repeat", "late"]


@st.composite
def sends(draw: st.DrawFn, name: str, life: Life) -> Send:
    """Most end where the forward did, and most messages arrive."""
    end = draw(st.sampled_from([None, None, None, max(1, life.valid - 1), life.valid + 1]))
    fates = [draw(st.sampled_from(FATES)) for _ in range(life.world_size)]
    lose, repeat, late = (
        tuple(rank for rank, its in enumerate(fates) if its == fate) for fate in ("lose", "repeat", "late")
    )
    if end is None and life.valid == life.tokens and draw(st.booleans()):
        late = ()  # in the last chunk that is refused
    return Send(name, tokens=end, lose=lose, repeat=repeat, late=late)


@st.composite
def lives(draw: st.DrawFn) -> tuple[History, int]:
    """A history of requests that share nothing, and the rows of each cache and layer to be compared in it."""
    W, P = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    chunk = draw(st.none() | st.integers(P, 4 * P))
    sizes = draw(st.lists(st.integers(1, 9 * P), min_size=1, max_size=2))
    requests = {"ab"[i]: Life(W, P, chunk, tokens) for i, tokens in enumerate(sizes)}
    steps = [Step(submit=Submit(name, life.tokens)) for name, life in requests.items()]
    for _ in range(draw(st.integers(6, 16))):
        name = draw(st.sampled_from(sorted(requests)))
        life = requests[name]
        operation = draw(st.sampled_from(life.sensible() * 3 + OPERATIONS))
        steps.append(draw(step_of(name, life, operation)))
    history = History(
        title="drawn",
        why="drawn",
        laws=["T5"],
        world_size=W,
        page_size=P,
        pages_per_lane=60,  # for all, wherever they lie
        history=steps,
        chunk=chunk,
        layers=draw(st.integers(1, 2)),
        split=draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        rotate=draw(st.booleans()),
        decode_pages=sum(num_pages(size + 16, P) for size in sizes),
    )
    return history, sum(life.rows for life in requests.values()) * 2 * history.layers


@st.composite
def step_of(draw: st.DrawFn, name: str, life: Life, operation: str) -> Step:
    """One step, done by the model."""
    wanted: Any = name
    if operation in ("forward", "decode"):
        wanted = [name]
    elif operation == "send":
        wanted = draw(sends(name, life))
    elif operation == "resend":
        lost = sorted({rank for rank, _ in life.lost})
        some = st.sampled_from(lost or [0]) | st.integers(0, life.world_size - 1)
        ranks = draw(st.lists(some, min_size=1, max_size=2, unique=True))
        wanted = Resend(name, ranks)
    if isinstance(wanted, Send):
        accepted = life.send(wanted)
    elif isinstance(wanted, Resend):
        accepted = life.resend(wanted.ranks)
    else:
        accepted = getattr(life, operation)()
    return Step(**{operation: wanted}, refused=not accepted)


@proves("T1", "T2", "T3", "T4", "T5")
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


@pytest.mark.parametrize("incident", [f"pd-{number:02}" for number in range(1, 8)])
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


@proves("X1")
@settings(max_examples=20)
@given(grids(max_world=4, max_page=4), st.none() | st.integers(1, 8), st.integers(1, 20))
def test_a_transfer_to_other_page_sizes_does_not_begin(grid: Grid, decode: int | None, tokens: int) -> None:
    history = msgspec.structs.replace(
        history_of("pd-06-page-sizes-differ"),
        world_size=grid.world_size,
        page_size=grid.page_size,
        pages_per_lane=20,
        decode_page_size=decode,
        decode_pages=20,
        history=[
            Step(submit=Submit("a", tokens)),
            Step(forward=["a"]),
            Step(send=Send("a"), refused=decode not in (None, grid.page_size)),
            Step(finish="a"),
        ],
    )
    assert broken(history) == []


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
