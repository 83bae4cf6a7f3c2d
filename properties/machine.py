"""A state machine whose examples are histories: operations drawn one by one, then played and judged at once.

The next operation is drawn from what is there: a request to forward, a prompt to share. A rehearsal beside it
(:mod:`properties.rehearsal`) runs without ranks, and says beforehand what each step must come to. At the end
all ranks play the whole history. Each example has some operations switched off (swarm testing), so that
histories without a single finish come up too, in which lanes fill to the last page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from properties.rehearsal import Rehearsal
from refmodel.errors import Finding
from refmodel.layout.geometry import ceil_div
from refmodel.layout.split import Split
from refmodel.storage.reuse import ViewPath
from sim.engine.request import Phase
from sim.gate.histories import try_history
from sim.histories.history import Evict, History, Step, Submit
from sim.world import World

Steps = st.SearchStrategy[list[Step]]

STEPS = 20  # most operations of a history
MOST_RUNNING = 4  # requests at a time: more only make histories long
LAWS = ("L1", "L2", "L3", "L4", "L5", "L6", "L7", "G2", "G4", "V1", "V6")


class Stopped(KeyboardInterrupt):
    """No more histories are wanted. Hypothesis lets an interrupt through, and keeps nothing of it."""


class Broken(AssertionError):
    """A history that does not hold."""

    def __init__(self, history: History, findings: tuple[Finding, ...], seed: int) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.history, self.findings, self.seed = history, findings, seed


@st.composite
def settings_of_a_service(draw: st.DrawFn) -> History:
    """A history without steps: few small pages, so that lanes run out and tails are everywhere."""
    W = draw(st.sampled_from([1, 2, 3, 4, 4, 8]))
    P = draw(st.sampled_from([1, 2, 3, 4, 4, 5, 16]))
    pages = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8]))
    return History(
        title="Found by a machine",
        why="A law broke in this history.",
        laws=list(LAWS),
        world_size=W,
        page_size=P,
        pages_per_lane=pages,
        history=[],
        hit=draw(st.sampled_from(["token", "token", "token", "page"])),
        split=draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        view=draw(st.sampled_from([ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL])),
        prefetch=draw(st.booleans()),
        layers=draw(st.integers(1, 2)),
        chunk=draw(st.none() | st.integers(P, 4 * P)),
        max_requests=draw(st.none() | st.integers(1, 3)),
        max_tokens=draw(st.none() | st.integers(1, 6).map(lambda units: units * P)),
        rotate=draw(st.booleans()),
    )


# -- operations: each a strategy of the steps that can come next ---------------------------------------------


@st.composite
def _submit_fresh(draw: st.DrawFn, so_far: Rehearsal) -> list[Step]:
    """Prompts that nobody has seen, some at a time: around page multiples, up to a third of all pages."""
    W, P = so_far.setting.world_size, so_far.setting.page_size
    most = W * P * so_far.setting.pages_per_lane
    near = {place + d for place in (P, 2 * P, W * P) for d in (-1, 0, 1)} | {1}
    sizes = st.sampled_from(sorted(n for n in near if 1 <= n <= most)) | st.integers(1, ceil_div(most, 3))
    room = MOST_RUNNING - len(so_far.running)
    prompts = draw(st.lists(sizes, min_size=1, max_size=room))
    return [Step(submit=Submit(so_far.new_name(i), tokens)) for i, tokens in enumerate(prompts)]


@st.composite
def _submit_alike(draw: st.DrawFn, so_far: Rehearsal) -> list[Step]:
    """A prompt that begins as another did: up to a page, inside one, or all of it."""
    seen, P = so_far.engine.tables.seen, so_far.setting.page_size
    computed = [name for name, request in seen.items() if request.valid]
    like = draw(st.sampled_from(computed[-2:] or list(seen)) | st.sampled_from(list(seen)))
    known = len(seen[like].ids)
    edges = [n for edge in range(P, known + 1, P) for n in (edge - 1, edge, edge + 1) if 0 < n <= known]
    shared = draw(st.sampled_from([known, *edges]) | st.integers(1, known))
    tokens = shared + draw(st.sampled_from([0, 1, P]) | st.integers(0, 2 * P))
    return [Step(submit=Submit(so_far.new_name(), tokens, like, shared))]


def _forward(so_far: Rehearsal) -> Steps:
    return _some(so_far.names(Phase.PREFILL)).map(lambda names: [Step(forward=names)])


def _decode(so_far: Rehearsal) -> Steps:
    return _some(so_far.names(Phase.READY)).map(lambda names: [Step(decode=names)])


def _some(names: list[str]) -> st.SearchStrategy[list[str]]:
    return st.just(names) | st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)


def _finish(so_far: Rehearsal) -> Steps:
    return st.sampled_from(so_far.names(Phase.READY)).map(lambda name: [Step(finish=name)])


def _abort(so_far: Rehearsal) -> Steps:
    return st.sampled_from(so_far.names()).map(lambda name: [Step(abort=name)])


@st.composite
def _abort_all(draw: st.DrawFn, so_far: Rehearsal) -> list[Step]:
    """Clients that hang up together: what a batch computed for them is loose, and of one age."""
    return [Step(abort=name) for name in draw(st.permutations(so_far.names()))]


def _evict(so_far: Rehearsal) -> Steps:
    """A page more than are free in a lane, or all of them."""
    most = so_far.setting.pages_per_lane
    wanted = [
        (lane, n) for lane, free in enumerate(so_far.free_pages()) for n in (free + 1, most) if n <= most
    ]
    return st.sampled_from(wanted).map(lambda each: [Step(evict=Evict(*each))])


def _nonsense(so_far: Rehearsal) -> Steps:
    """What must be refused: unknown requests, wrong phases, more than all pages."""
    setting, running = so_far.setting, so_far.running
    pages = setting.world_size * setting.pages_per_lane
    steps = [
        Step(finish="nobody"),
        Step(forward=[]),
        Step(submit=Submit(so_far.new_name(), pages * setting.page_size + 1)),
        Step(submit=Submit(so_far.new_name(), 1, "nobody", 1)),
        Step(evict=Evict(setting.world_size, 1)),
        Step(evict=Evict(0, setting.pages_per_lane + 1)),
    ]
    for name in so_far.engine.tables.seen:
        steps.append(Step(submit=Submit(name, 1)))
        if name not in running:
            steps += [Step(forward=[name]), Step(decode=[name]), Step(abort=name)]
    for name in so_far.names(Phase.PREFILL):
        steps += [Step(decode=[name]), Step(finish=name), Step(forward=[name, name])]
    steps += [Step(forward=[name]) for name in so_far.names(Phase.READY)]
    return st.sampled_from(steps).map(lambda step: [step])


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of step: how often it is drawn, when it can be, and what it is."""

    weight: int
    when_crowded: int  # its weight after a step that found no pages
    possible: Callable[[Rehearsal], object]
    steps: Callable[[Rehearsal], Steps]


def _has_room(so_far: Rehearsal) -> bool:
    return len(so_far.running) < MOST_RUNNING


OPERATIONS = {
    "forward": Operation(7, 2, lambda so_far: so_far.names(Phase.PREFILL), _forward),
    "submit fresh": Operation(2, 1, _has_room, _submit_fresh),
    "submit alike": Operation(
        6, 2, lambda so_far: _has_room(so_far) and so_far.engine.tables.seen, _submit_alike
    ),
    "decode": Operation(4, 1, lambda so_far: so_far.names(Phase.READY), _decode),
    "finish": Operation(3, 6, lambda so_far: so_far.names(Phase.READY), _finish),
    "abort": Operation(1, 3, lambda so_far: so_far.running, _abort),
    "abort all": Operation(1, 1, lambda so_far: len(so_far.running) > 1, _abort_all),
    "evict": Operation(2, 2, lambda so_far: so_far.contents, _evict),
    "nonsense": Operation(1, 1, lambda so_far: True, _nonsense),
}
MAY_BE_OFF = tuple(OPERATIONS)[2:]


def next_steps(so_far: Rehearsal, off: Collection[str]) -> Steps:
    """Any step that can come next, but for the operations that are switched off."""
    possible = {name: op for name, op in OPERATIONS.items() if op.possible(so_far)}
    names = [name for name in possible if name not in off] or ["nonsense"]
    weight = attrgetter("when_crowded" if so_far.crowded else "weight")
    weighted = [name for name in names for _ in range(weight(OPERATIONS[name]))]
    return st.sampled_from(weighted).flatmap(lambda name: OPERATIONS[name].steps(so_far))


# -- the machine -------------------------------------------------------------------------------------------


class HistoryMachine(RuleBasedStateMachine):
    """Draws a history and has it judged: by simulated ranks, unless a subclass says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.rehearsal: Rehearsal
        self.setting: History
        self.judged = False

    # -- what a subclass changes -------------------------------------------------------------------------

    def judge(self, rehearsal: Rehearsal, seed: int) -> None:
        """Play the history on simulated ranks. :class:`Broken` if it does not hold."""
        with World.lockstep(rehearsal.setting.world_size, seed=seed) as world:
            findings = try_history(world, rehearsal.history).findings or tuple(rehearsal.findings)
        if findings:
            raise Broken(rehearsal.history, findings, seed)

    def is_over(self) -> bool:
        """Whether no more histories are wanted."""
        return False

    # -- rules -------------------------------------------------------------------------------------------

    @initialize(
        setting=settings_of_a_service(),
        off=st.sets(st.sampled_from(MAY_BE_OFF), max_size=2),
        seed=st.integers(0, 2**16),
    )
    def start(self, setting: History, off: set[str], seed: int) -> None:
        if self.is_over():
            raise Stopped
        self.setting, self.off, self.seed = setting, off, seed
        self.rehearsal = Rehearsal(setting)

    def _end(self) -> None:
        if self.judged:
            return
        self.judged = True
        tables = self.rehearsal.engine.tables
        used = [
            tables.lanes.held(lane) + tables.lanes.cached(lane) for lane in range(self.setting.world_size)
        ]
        target(float(max(used) - min(used)), label="lanes uneven by")
        target(float(self.rehearsal.evictions), label="evictions")
        target(float(self.rehearsal.of_one_age), label="victims of one age")
        target(
            float(sum(r.valid % self.setting.page_size for r in tables.seen.values())),
            label="tokens in tails",
        )
        self.judge(self.rehearsal, self.seed)

    def teardown(self) -> None:
        # Hypothesis comes here too when it gives an example up, and wants no verdict on a part of one.
        if sys.exc_info()[0] is None and self.rehearsal.steps:
            self._end()

    @rule(steps=st.runner().flatmap(lambda machine: next_steps(machine.rehearsal, machine.off)))
    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if self.judged:  # what was found is known, and from here on nothing means anything
                return
            self.rehearsal.step(step)
            if self.rehearsal.findings:
                self._end()
