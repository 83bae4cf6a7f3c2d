"""A failing history made smaller: fewer steps, plainer settings, fewer tokens; greedy, until nothing helps.

It works on steps as data, not on the choices that drew them: a step can go although later ones were drawn
from what it left behind. A step that has become nonsense is refused, and goes next.

>>> steps = [Step(submit=Submit("a", 9)), Step(evict=Evict(0, 2)), Step(forward=["a"])]
>>> history = History("Nine", "An example.", ["L1"], 4, 4, 6, steps, rotate=True)
>>> small = shrunk(history, lambda tried: any(step.forward for step in tried.history))
>>> [step.name for step in small.history], small.world_size, small.rotate
(['forward'], 1, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.msgpack import encode
from msgspec.structs import replace

from refmodel.layout.geometry import ceil_div
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import CopyEngine, HostLayout
from refmodel.serving.write_policy import WritePolicy
from refmodel.storage.reuse import ViewPath
from sim.histories.history import (
    Backup,
    DropHost,
    Evict,
    History,
    Prefetch,
    Resend,
    Send,
    Spoil,
    Step,
    Submit,
)

T = TypeVar("T")

MOST_TRIES = 2000

_FATES = ("lose", "late", "repeat")
_NAMES = "abcdefghijklmnopqrstuvwxyz"

Fails = Callable[[History], bool]


def shrunk(history: History, fails: Fails, *, most_tries: int = MOST_TRIES) -> History:
    """The smallest history found that still fails. ``fails`` must hold of ``history``, and is pure.

    One way of making it smaller at a time, as long as that helps; none is tried twice on the same history.
    """
    tried = set[bytes]()
    before = None
    while history is not before:
        before = history
        for way in (_without_steps, _plainer, _with_smaller_steps, _without_pairs):
            smaller: History | None = history
            while smaller is not None:
                history, smaller = smaller, None
                for candidate in way(history):
                    key = encode(candidate)
                    if key in tried:
                        continue
                    if len(tried) == most_tries:
                        return history
                    tried.add(key)
                    if fails(candidate):
                        smaller = candidate
                        break
    return history


def renamed(history: History) -> History:
    """Requests called a, b, … in order of submission; others keep their names."""
    submitted = dict.fromkeys(step.submit.request for step in history.history if step.submit is not None)
    names = dict(zip(submitted, _NAMES, strict=False))
    return replace(history, history=[_renamed(step, names) for step in history.history])


def _renamed(step: Step, names: dict[str, str]) -> Step:
    return replace(step, **{step.name: _with_names(getattr(step, step.name), names)})


def _with_names(operation: object, names: dict[str, str]) -> object:
    """An operation about others: it is a name, a list of names, or has some in ``request`` and ``like``."""
    if isinstance(operation, str):
        return names.get(operation, operation)
    if isinstance(operation, list):
        return [names.get(name, name) for name in operation]
    assert isinstance(operation, Struct)
    about = {key: getattr(operation, key, None) for key in ("request", "like")}
    return replace(operation, **{key: names.get(name, name) for key, name in about.items() if name})


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
                less = replace(history, history=[_without_like(each, step.submit) for each in others])
                yield less
                if history.rotate:  # those who came later begin at the lane before
                    yield _turned_back(less)


def _turned_back(history: History) -> History:
    """Pressure on the lane before."""

    steps = []
    for step in history.history:
        operation = getattr(step, step.name)
        if isinstance(operation, (Evict, DropHost)):
            turned = replace(operation, lane=(operation.lane - 1) % history.world_size)
            step = replace(step, **{step.name: turned})
        steps.append(step)
    return replace(history, history=steps)


def _without_like(step: Step, gone: Submit) -> Step:
    """A prompt that began as one that is gone did begins as whatever that one began as."""
    prompt = step.submit
    if prompt is None or prompt.like != gone.request:
        return step
    shared = min(prompt.shared, gone.shared) if gone.like is not None else 0
    return replace(step, submit=replace(prompt, like=gone.like, shared=shared))


def _without_pairs(history: History) -> Iterator[History]:
    """Two steps that need each other, and nobody else does."""
    steps = history.history
    for i, j in combinations(range(len(steps)), 2):
        if len(steps) > 2:
            yield replace(history, history=[step for k, step in enumerate(steps) if k not in (i, j)])


def _names(step: Step) -> tuple[str, ...]:
    """Requests that a step is about and no other."""
    operation = getattr(step, step.name)
    named = operation if isinstance(operation, list) else [getattr(operation, "request", operation)]
    return (named[0],) if len(named) == 1 and isinstance(named[0], str) else ()


# Settings that go together, plain ones.
_PLAIN: tuple[dict[str, object], ...] = (
    {"model": False, "view": ViewPath.FULL},
    {"host_pages_per_lane": 0, "storage": False},
    {"storage": False},
    {"bigram": False},
    {"draft_layers": 0, "bigram": False},
    {"host_layout": HostLayout.LAYER_FIRST, "copy_engine": CopyEngine.KERNEL},
    {"write_policy": WritePolicy.WRITE_THROUGH},
    {"load_anywhere": False},
    {"decode_pages": None},
    {"rotate": False},
    {"prefetch": False},
    {"view": ViewPath.FULL},
    {"split": Split.PAGE_ALIGNED},
    {"hit": "token"},
    {"batch": True},
    {"chunk": None},
    {"max_requests": None},
    {"max_tokens": None},
    {"layers": 1},
)
_SIZES = ("world_size", "page_size", "pages_per_lane", "host_pages_per_lane", "decode_pages", "chunk")


def _plainer(history: History) -> Iterator[History]:
    for plain in _PLAIN:
        if any(getattr(history, name) != value for name, value in plain.items()):
            yield replace(history, **plain)
    for name in _SIZES:
        size = getattr(history, name) or 0
        for less in dict.fromkeys((1, 2, size - 1)):
            if (history.page_size if name == "chunk" else 1) <= less < size:
                smaller = replace(history, **{name: less})
                if name in ("world_size", "page_size"):
                    yield _scaled(smaller, less, size)
                if name == "world_size":
                    yield _merged(history, less)
                yield smaller


def _merged(history: History, world_size: int) -> History:
    """As many pages in fewer lanes, and evictions of all that can go."""
    lanes = {
        name: ceil_div(getattr(history, name) * history.world_size, world_size)
        for name in ("pages_per_lane", "host_pages_per_lane")
    }
    steps = [
        replace(step, evict=Evict(min(step.evict.lane, world_size - 1), lanes["pages_per_lane"]))
        if step.evict is not None
        else _scaled_step(step, world_size, 1, 1)
        for step in history.history
    ]
    return replace(history, world_size=world_size, history=steps, **lanes)


def _scaled(history: History, part: int, whole: int) -> History:
    """Prompts shortened as the setting was, and lanes and ranks that are left."""
    return replace(
        history, history=[_scaled_step(step, history.world_size, part, whole) for step in history.history]
    )


def _scaled_step(step: Step, world_size: int, part: int, whole: int) -> Step:
    operation = getattr(step, step.name)
    match operation:
        case Evict() | DropHost():
            operation = replace(operation, lane=min(operation.lane, world_size - 1))
        case Send():
            left = {key: tuple(r for r in getattr(operation, key) if r < world_size) for key in _FATES}
            tokens = operation.tokens and max(1, operation.tokens * part // whole)
            operation = replace(operation, tokens=tokens, **left)
        case Resend():
            operation = replace(
                operation, ranks=sorted({min(rank, world_size - 1) for rank in operation.ranks})
            )
        case Backup():
            first, stop = (n * part // whole for n in (operation.first, operation.stop))
            operation = replace(operation, first=first, stop=max(1, stop))
        case Submit():
            tokens = max(1, operation.tokens * part // whole)
            shared = min(tokens, operation.shared * part // whole)
            operation = replace(operation, tokens=tokens, shared=shared)
    return replace(step, **{step.name: operation})


def _with_smaller_steps(history: History) -> Iterator[History]:
    for i, step in enumerate(history.history):
        for less in _smaller_steps(step):
            yield replace(history, history=[*history.history[:i], less, *history.history[i + 1 :]])


def _smaller_steps(step: Step) -> Iterator[Step]:
    for less in _less(getattr(step, step.name)):
        yield replace(step, **{step.name: less})


def _less(operation: Any) -> Iterator[object]:
    """An operation with one thing less."""
    if isinstance(operation, list):
        yield from _without_one(operation)
    elif isinstance(operation, Struct):
        yield from _LESS[type(operation)](operation)


def _smaller_evictions(evict: Evict) -> Iterator[Evict]:
    if evict.free > 1:
        yield replace(evict, free=evict.free - 1)


def _smaller_drops(drop: DropHost) -> Iterator[DropHost]:
    if drop.count > 1:
        yield replace(drop, count=drop.count - 1)


def _smaller_resends(resend: Resend) -> Iterator[Resend]:
    yield from (replace(resend, ranks=ranks) for ranks in _without_one(resend.ranks))


def _smaller_prefetches(prefetch: Prefetch) -> Iterator[Prefetch]:
    if prefetch.arrived:
        yield replace(prefetch, arrived={})
    if prefetch.pages > 1:
        yield replace(prefetch, pages=prefetch.pages - 1)


def _plainer_spoils(spoil: Spoil) -> Iterator[Spoil]:
    if spoil.how != "lose":
        yield replace(spoil, how="lose")
    if spoil.page:
        yield replace(spoil, page=spoil.page - 1)


def _without_one(values: Sequence[T]) -> Iterator[list[T]]:
    if len(values) > 1:
        yield from ([*values[:i], *values[i + 1 :]] for i in range(len(values)))


def _smaller_sends(send: Send) -> Iterator[Send]:
    if send.tokens is not None:
        yield replace(send, tokens=None)
    for key in _FATES:
        ranks = getattr(send, key)
        yield from (replace(send, **{key: ranks[:i] + ranks[i + 1 :]}) for i in range(len(ranks)))
    if send.tokens is not None and send.tokens > 1:
        yield replace(send, tokens=send.tokens - 1)


def _smaller_backups(backup: Backup) -> Iterator[Backup]:
    tokens = backup.stop - backup.first
    for first, stop in ((0, tokens), (backup.first, backup.stop - 1), (backup.first - 1, backup.stop - 1)):
        if 0 <= first < stop and (first, stop) != (backup.first, backup.stop):
            yield replace(backup, first=first, stop=stop)


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


_LESS: dict[type, Callable[[Any], Iterator[object]]] = {
    Submit: _smaller_prompts,
    Evict: _smaller_evictions,
    DropHost: _smaller_drops,
    Send: _smaller_sends,
    Resend: _smaller_resends,
    Backup: _smaller_backups,
    Prefetch: _smaller_prefetches,
    Spoil: _plainer_spoils,
}
