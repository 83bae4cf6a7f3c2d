"""Law L8 in a service: every draft row that is hit was computed with the next token of who hits it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.catalogued import history_named
from properties.mutants import named_mutant
from properties.proofs import proves
from refmodel.layout.split import Split
from refmodel.storage.reuse import ViewPath
from sim.gate.histories import try_history
from sim.gate.runs import run_scenario
from sim.histories.history import After, History, Send, Step, Submit
from sim.world import World

pytestmark = pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")


@dataclass
class Spoken:
    """Requests as lists of symbols: what is not shared is one's own, what is sampled follows from all."""

    page_size: int
    by_pages: bool
    tokens: dict[str, list[object]] = field(default_factory=dict)
    cached: list[list[object]] = field(default_factory=list)  # of requests that have finished

    def submit(self, name: str, length: int, like: str | None, shared: int) -> int:
        """A new prompt; how much of it must be hit."""
        head = self.tokens[like][:shared] if like else []
        prompt = [*head, *((name, i) for i in range(len(head), length))]
        self.tokens[name] = prompt
        most = max((_common(prompt, other) for other in self.cached), default=0)
        hit = max(0, min(most, len(prompt)) - 1)  # as many pairs as tokens but one
        return hit - hit % self.page_size if self.by_pages else hit

    def sample(self, name: str) -> None:
        self.tokens[name].append(hash(tuple(self.tokens[name])))

    def finish(self, name: str, on_prefill: int | None) -> None:
        """It leaves; prefill has all its tokens, or the first so many."""
        self.cached.append(self.tokens[name][:on_prefill])


def _common(one: list[object], other: list[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@st.composite
def conversations(draw: st.DrawFn) -> History:
    """Requests one after the other, each like one before; some in chunks, some go on on decode."""
    W, P = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    hit = draw(st.sampled_from(["token", "page"]))
    spoken, steps = Spoken(P, hit == "page"), list[Step]()
    chunk = draw(st.none() | st.integers(P, 3 * P))
    for name in "abcde"[: draw(st.integers(2, 5))]:
        like = draw(st.sampled_from(sorted(spoken.tokens))) if spoken.tokens else None
        most = len(spoken.tokens[like]) if like else 0
        shared = draw(st.sampled_from([most, most]) | st.integers(0, most))
        length = max(1, shared + draw(st.integers(0, 2 * P)))
        valid = spoken.submit(name, length, like, shared)
        steps.append(Step(submit=Submit(name, length, like, shared), expect=After(valid={name: valid})))
        while valid < length:
            steps.append(Step(forward=[name]))
            rest = length - valid
            valid = length if chunk is None or rest <= chunk else (valid + chunk) // P * P
        sent = draw(st.booleans())
        steps += [Step(send=Send(name))] if sent else []
        for _ in range(draw(st.integers(0, P + 1))):
            steps.append(Step(decode=[name]))
            spoken.sample(name)
        steps.append(Step(finish=name))
        spoken.finish(name, length if sent else None)
    return History(
        title="drawn",
        why="drawn",
        laws=["L8"],
        world_size=W,
        page_size=P,
        pages_per_lane=80,
        history=steps,
        hit=hit,  # type: ignore[arg-type]
        chunk=chunk,
        layers=draw(st.integers(1, 2)),
        draft_layers=draw(st.integers(1, 2)),
        bigram=True,
        split=draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        view=draw(st.sampled_from([ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL])),
        prefetch=draw(st.booleans()),
        rotate=draw(st.booleans()),
    )


@proves("L4", "L8", "V1", "T5")
@settings(max_examples=60)
@given(conversations())
def test_a_hit_ends_where_the_next_token_is_not_known(history: History) -> None:
    with World.lockstep(history.world_size) as world:
        assert not try_history(world, history).findings


@pytest.mark.parametrize("mutant", ["radix-02", "page-key-of-p-tokens", "draft-rows-keyed-by-tokens"])
def test_histories_show_wrong_keys(mutant: str) -> None:
    names = ("radix/pairs-by-pages", "incidents/radix-02-page-key-read-past-the-tokens")
    with named_mutant(mutant).in_place():
        outcomes = []
        for name in names:
            history = history_named(name)
            with World.lockstep(history.world_size) as world:
                outcomes.append(run_scenario(history, world))
    assert not all(outcome.held for outcome in outcomes)


def test_a_draft_row_with_another_next_token_is_named() -> None:
    """Keyed by tokens, c hits 64 tokens of a, and the draft row of the last was computed with a's next."""
    history = history_named("incidents/radix-02-page-key-read-past-the-tokens")
    with named_mutant("draft-rows-keyed-by-tokens").in_place(), World.lockstep(2) as world:
        findings = run_scenario(history, world).findings
    of_the_draft = [finding for finding in findings if finding.law == "V1"]
    assert {finding.where.layer for finding in of_the_draft} == {1}  # the model's own layer is right
    assert (of_the_draft[0].where.request, of_the_draft[0].where.position) == ("b", 64)
