"""Requests that come, are computed and leave, and pressure on their pages."""

from __future__ import annotations

from properties.drawing.choices import Choices
from properties.drawing.nonsense import nonsense
from properties.drawing.operation import Operation
from properties.rehearsal.model import Model
from refmodel.layout.geometry import ceil_div
from sim.engine.request import Phase
from sim.histories.history import Evict, Step, Submit

MOST_RUNNING = 3  # requests at a time: more only make histories long


def new_name(model: Model, ahead: int = 0) -> str:
    """Of the next request, or of one after it: a, b, … z, then r26, …"""
    number = len(model.seen) + ahead
    return chr(ord("a") + number) if number < 26 else f"r{number}"


def _has_room(model: Model) -> bool:
    return len(model.running) < MOST_RUNNING


def _prefilling(model: Model) -> list[str]:
    return model.names(Phase.PREFILL)


def _ready(model: Model) -> list[str]:
    """Requests that may decode or finish."""
    return [name for name in model.names(Phase.READY) if model.settled(name)]


def _settled(model: Model) -> list[str]:
    return [name for name in model.running if model.settled(name)]


def _submit_fresh(choices: Choices, model: Model) -> list[Step]:
    """Prompts that nobody has seen, some at a time: around page multiples, up to a third of all pages."""
    W, P, pages_per_lane = model.W, model.P, model.setting.pages_per_lane
    most = W * P * pages_per_lane
    near = [n for place in (P, 2 * P, W * P, 2 * W * P) for d in (-1, 0, 1) if 1 <= (n := place + d) <= most]
    sizes: list[int] = []
    for _ in range(min(choices.of([1, 1, 2, 3]), MOST_RUNNING - len(model.running))):
        largest = choices.of([2 * P, 2 * P * min(3, pages_per_lane), ceil_div(most, 4)])
        sizes.append(
            choices.of([P, *near, 1]) if choices.below(2) else choices.between(1, min(most, largest))
        )
    return [Step(submit=Submit(new_name(model, i), tokens)) for i, tokens in enumerate(sizes)]


def _submit_alike(choices: Choices, model: Model) -> list[Step]:
    """A prompt that begins as another did: up to a page, inside one, or all of it."""
    seen, P = model.seen, model.P
    computed = [name for name, request in seen.items() if request.valid]
    like = choices.of(computed[-2:] if computed and choices.below(2) else list(seen))
    known = len(seen[like].ids)
    if choices.below(2):
        edges = [n for edge in range(P, known + 1, P) for n in (edge - 1, edge, edge + 1) if 0 < n <= known]
        shared = choices.of([known, *edges])
    else:
        shared = choices.between(1, known)
    tokens = shared + (choices.of([0, 1, P]) if choices.below(2) else choices.below(2 * P + 1))
    return [Step(submit=Submit(new_name(model), tokens, like, shared))]


def _forward(choices: Choices, model: Model) -> list[Step]:
    return [Step(forward=choices.some(_prefilling(model)))]


def _decode(choices: Choices, model: Model) -> list[Step]:
    return [Step(decode=choices.some(_ready(model)))]


def _finish(choices: Choices, model: Model) -> list[Step]:
    return [Step(finish=choices.of(_ready(model)))]


def _abort(choices: Choices, model: Model) -> list[Step]:
    return [Step(abort=choices.of(_settled(model)))]


def _abort_all(choices: Choices, model: Model) -> list[Step]:
    """Clients that hang up together: what a batch computed for them is loose, of one age, and evicted."""
    names = _settled(model)
    steps = [Step(abort=name) for name in (names if choices.below(2) else names[::-1])]
    cached = model.tree.by_lane(model.tree.contents)
    if cached and not choices.once_in(4):
        lane = choices.of(sorted(cached))
        own = [page for name in names for page in model.own_pages(model.running[name])]
        freed = model.tree.by_lane(own)
        steps.append(Step(evict=Evict(lane, model.free_pages()[lane] + freed[lane] + 1)))
    return steps


def _evict(choices: Choices, model: Model) -> list[Step]:
    """A page more than are free in a lane, all that the tree has of it, or all of them."""
    cached = model.tree.by_lane(model.tree.contents)
    lane = choices.of(sorted(cached))
    free = model.free_pages()[lane]
    return [
        Step(evict=Evict(lane, choices.of([free + 1, free + cached[lane], model.setting.pages_per_lane])))
    ]


def _nonsense(choices: Choices, model: Model) -> list[Step]:
    return [choices.of(nonsense(model, new_name(model)))]


REQUEST_OPERATIONS: dict[str, Operation] = {
    "forward": Operation(8, 2, _prefilling, _forward),
    "submit fresh": Operation(2, 1, _has_room, _submit_fresh),
    "submit alike": Operation(9, 3, lambda model: _has_room(model) and model.seen, _submit_alike),
    "decode": Operation(3, 1, _ready, _decode),
    "finish": Operation(4, 7, _ready, _finish),
    "abort": Operation(1, 3, _settled, _abort),
    "abort all": Operation(2, 2, lambda model: len(_settled(model)) > 1, _abort_all),
    "evict": Operation(2, 2, lambda model: model.tree.contents, _evict),
    "nonsense": Operation(1, 1, lambda model: True, _nonsense),
}
