"""A failing history made smaller: fewer steps, plainer settings, fewer tokens; greedy, until nothing helps.

It works on steps as data, not on the choices that drew them: a step can go although later ones were drawn
from what it left behind. A step that has become nonsense is refused, and goes next.

>>> from sim.histories.history import Evict
>>> steps = [Step(submit=Submit("a", 9)), Step(evict=Evict(0, 2)), Step(forward=["a"])]
>>> history = History("Nine", "An example.", ["L1"], 4, 4, 6, steps, rotate=True)
>>> small = shrunk(history, lambda tried: any(step.forward for step in tried.history))
>>> [step.name for step in small.history], small.world_size, small.rotate
(['forward'], 1, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from msgspec.structs import replace

from sim.histories.history import History, Step, Submit

MOST_TRIES = 2000

_NAMES = "abcdefghijklmnopqrstuvwxyz"

Fails = Callable[[History], bool]


def shrunk(history: History, fails: Fails, *, most_tries: int = MOST_TRIES) -> History:
    """The smallest history found that still fails. ``fails`` must hold of ``history``, and is pure."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(history):
            tries += 1
            if tries > most_tries:
                return history
            if fails(candidate):
                history, smaller = candidate, True
                break
    return history


def renamed(history: History) -> History:
    """Requests called a, b, … in order of submission; others keep their names."""
    submitted = dict.fromkeys(step.submit.request for step in history.history if step.submit is not None)
    names = dict(zip(submitted, _NAMES, strict=False))
    return replace(history, history=[_renamed(step, names) for step in history.history])


def _renamed(step: Step, names: dict[str, str]) -> Step:
    submit = step.submit
    if submit is not None:
        like = names.get(submit.like, submit.like) if submit.like is not None else None
        submit = replace(submit, request=names.get(submit.request, submit.request), like=like)
    return replace(
        step,
        submit=submit,
        forward=[names.get(name, name) for name in step.forward] if step.forward is not None else None,
        decode=[names.get(name, name) for name in step.decode] if step.decode is not None else None,
        finish=names.get(step.finish, step.finish) if step.finish is not None else None,
        abort=names.get(step.abort, step.abort) if step.abort is not None else None,
    )


def _smaller(history: History) -> Iterator[History]:
    """One change each, those that remove most first."""
    yield from _without_steps(history)
    yield from _plainer(history)
    yield from _with_smaller_steps(history)
    yield from _without_pairs(history)


def _without_steps(history: History) -> Iterator[History]:
    steps = history.history
    length = len(steps) // 2
    while length:
        for first in range(len(steps) - length, -1, -length):
            if length < len(steps):
                yield replace(history, history=steps[:first] + steps[first + length :])
        length //= 2
    for step in steps:  # a request with all it does: without its submit, the rest makes no sense
        if step.submit is not None:
            others = [each for each in steps if step.submit.request not in _names(each)]
            if others:
                yield replace(history, history=others)


def _without_pairs(history: History) -> Iterator[History]:
    """Two steps that need each other, and nobody else does."""
    steps = history.history
    for i, j in combinations(range(len(steps)), 2):
        if len(steps) > 2:
            yield replace(history, history=[step for k, step in enumerate(steps) if k not in (i, j)])


def _names(step: Step) -> tuple[str, ...]:
    """Requests that a step is about and no other."""
    if step.submit is not None:
        return (step.submit.request,)
    if (only := step.finish or step.abort) is not None:
        return (only,)
    named = step.forward or step.decode or []
    return tuple(named) if len(named) == 1 else ()


_PLAIN: tuple[tuple[str, object], ...] = (
    ("rotate", False),
    ("prefetch", False),
    ("view", "full"),
    ("split", "page_aligned"),
    ("hit", "token"),
    ("chunk", None),
    ("max_requests", None),
    ("max_tokens", None),
    ("layers", 1),
)


def _plainer(history: History) -> Iterator[History]:
    for name, plain in _PLAIN:
        value = getattr(history, name)
        if value != plain and getattr(value, "value", value) != plain:
            yield replace(history, **{name: type(value)(plain) if hasattr(value, "value") else plain})
    for name in ("world_size", "page_size", "pages_per_lane"):
        size = getattr(history, name)
        for less in dict.fromkeys((1, 2, size - 1)):
            if 0 < less < size:
                smaller = replace(history, **{name: less})
                yield _scaled(smaller, less, size)
                yield smaller


def _scaled(history: History, part: int, whole: int) -> History:
    """Prompts shortened as the setting was, and evictions in lanes that are left."""
    return replace(
        history, history=[_scaled_step(step, history.world_size, part, whole) for step in history.history]
    )


def _scaled_step(step: Step, lanes: int, part: int, whole: int) -> Step:
    if step.evict is not None:
        return replace(step, evict=replace(step.evict, lane=min(step.evict.lane, lanes - 1)))
    if step.submit is None:
        return step
    tokens = max(1, step.submit.tokens * part // whole)
    shared = min(tokens, step.submit.shared * part // whole)
    return replace(step, submit=replace(step.submit, tokens=tokens, shared=shared))


def _with_smaller_steps(history: History) -> Iterator[History]:
    for i, step in enumerate(history.history):
        for less in _smaller_steps(step):
            yield replace(history, history=[*history.history[:i], less, *history.history[i + 1 :]])


def _smaller_steps(step: Step) -> Iterator[Step]:
    for key in ("forward", "decode"):
        names = getattr(step, key) or []
        if len(names) > 1:
            yield from (replace(step, **{key: names[:i] + names[i + 1 :]}) for i in range(len(names)))
    if step.submit is not None:
        yield from (replace(step, submit=less) for less in _smaller_prompts(step.submit))
    if step.evict is not None and step.evict.free > 1:
        yield replace(step, evict=replace(step.evict, free=step.evict.free - 1))


def _smaller_prompts(prompt: Submit) -> Iterator[Submit]:
    if prompt.like is not None:
        yield replace(prompt, like=None, shared=0)
    for cut in dict.fromkeys((prompt.tokens - 1, prompt.tokens // 2, 1)):
        less = prompt.tokens - cut
        if 0 < less < prompt.tokens:
            yield replace(prompt, tokens=less, shared=min(prompt.shared, less))
    for less in dict.fromkeys((prompt.shared // 2, prompt.shared - 1)):
        if prompt.like is not None and 0 < less < prompt.shared:
            yield replace(prompt, shared=less)
            yield replace(prompt, shared=less, tokens=max(1, prompt.tokens - prompt.shared + less))
