"""Backups, pressure on the host cache, storage and files that go bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from properties.drawing.choices import Choices
from properties.drawing.operation import Operation
from properties.drawing.request_operations import MOST_RUNNING, REQUEST_OPERATIONS, new_name
from properties.rehearsal.host_model import HostModel
from properties.rehearsal.model import Model
from sim.histories.history import Backup, DropHost, Evict, Prefetch, Spoil, Step, Submit


def _host(model: Model) -> HostModel:
    assert model.host is not None
    return model.host


def _whole(model: Model) -> list[str]:
    """Requests with a whole page in cache."""
    return [name for name, request in model.running.items() if request.valid >= model.P]


def _stored(model: Model) -> list[tuple[str, int]]:
    """Requests, left or not, and how many of their first pages were stored."""
    host = _host(model)
    known = [(name, host.stored_keys(each, len(each.ids) // model.P)) for name, each in model.seen.items()]
    return [(name, len(keys)) for name, keys in known if keys]


def _backup(choices: Choices, model: Model) -> list[Step]:
    """Whole pages of a request, from the first on or not; half of the time tokens that must be refused."""
    name = choices.of(_whole(model))
    valid, P = model.running[name].valid, model.P
    first = choices.of([0, choices.below(valid // P)])
    start, stop = first * P, choices.of([valid // P, choices.between(first + 1, valid // P)]) * P
    if choices.below(2):
        by = choices.between(1, P)
        shifted = choices.between(1, max(1, valid - P))
        start, stop = choices.of([(shifted, shifted + P), (start, stop - by), (start + by, stop)])
    return [Step(backup=Backup(name, start, max(1, stop)))]


def _again(choices: Choices, model: Model) -> list[Step]:
    """A prompt comes that wants pages which have host copies."""
    name, keys = choices.of(_on_the_host(model))
    return _wanted_again(choices, model, name, [_host(model).lanes[key] for key in keys])


def _wanted_again(choices: Choices, model: Model, name: str, lanes: Sequence[int]) -> list[Step]:
    """The first pages of a request, in these lanes, leave the device, and a prompt comes that wants them."""
    free, loose = model.free_pages(), model.tree.by_lane(model.tree.loose(model.tree.nodes()))
    full = [lane for lane in sorted(set(lanes)) if loose[lane]]
    steps = [Step(evict=Evict(lane, free[lane] + loose[lane])) for lane in full[:2]]
    if model.setting.load_anywhere and not choices.once_in(4):
        room = MOST_RUNNING - 1 - len(model.running)
        steps += _taken(model, min(room, free[0] + loose[0]))
    shared = len(lanes) * model.P
    tokens = shared + choices.of([0, 1, model.P])
    known = len(model.seen[name].ids)
    new = new_name(model, sum(step.submit is not None for step in steps))
    steps.append(Step(submit=Submit(new, tokens, name, min(known, tokens, shared + 1))))
    return steps if choices.once_in(3) else [*steps, Step(forward=[new])]


def _taken(model: Model, pages: int) -> list[Step]:
    """Prompts of a page each take so many of the first lane, where most loads would land."""
    names = [new_name(model, i) for i in range(pages)]
    submits = [Step(submit=Submit(name, model.P)) for name in names]
    return [*submits, Step(forward=names)] if names else []


def _on_the_host(model: Model) -> list[tuple[str, list[int]]]:
    """Requests that have left, and the keys of their first pages that have host copies."""
    lanes = _host(model).lanes
    known = [
        (name, list(takewhile(lanes.__contains__, _host(model).keys(request))))
        for name, request in model.seen.items()
    ]
    return [each for each in known if each[1] and each[0] not in model.running]


def _drop(choices: Choices, model: Model) -> list[Step]:
    lanes = sorted(set(_host(model).lanes.values()))
    return [
        Step(drop_host=DropHost(choices.of(lanes), choices.between(1, model.setting.host_pages_per_lane)))
    ]


def _prefetch(choices: Choices, model: Model) -> list[Step]:
    """The first pages that were stored, or a few less; at times not all caches arrive (H3), or are sound."""
    name, most = choices.of(_stored(model))
    pages = choices.of([most, choices.between(1, most)])
    steps = _spoil(choices, model) if choices.once_in(4) else []
    if not choices.once_in(3):  # else it may have nothing to do
        lanes, count = sorted(set(_host(model).lanes.values())), model.setting.host_pages_per_lane
        steps += [Step(drop_host=DropHost(lane, choices.of([count, 1]))) for lane in lanes[:2]]
    arrived = {}
    if choices.once_in(2):
        arrived = {choices.of(sorted(_host(model).files.caches)): choices.below(pages + 1)}
    steps.append(Step(prefetch=Prefetch(name, pages, arrived)))  # type: ignore[arg-type]
    if name in model.running or len(model.running) == MOST_RUNNING:
        return steps
    stored = _host(model).keys(model.seen[name])[:pages]
    lanes = [_host(model).stored[key] for key in stored]
    return [*steps, *_wanted_again(choices, model, name, lanes)]


def _spoil(choices: Choices, model: Model) -> list[Step]:
    name, most = choices.of(_stored(model))
    cache = choices.of(sorted(_host(model).files.caches, reverse=True))
    how = choices.of(["lose", "truncate", "corrupt"])
    return [Step(spoil=Spoil(name, choices.below(most), cache, how))]  # type: ignore[arg-type]


HOST_OPERATIONS: dict[str, Operation] = {
    "evict": replace(REQUEST_OPERATIONS["evict"], weight=4),  # what is on the device is not loaded back
    "backup": Operation(4, 1, _whole, _backup),
    "again": Operation(
        12, 4, lambda model: len(model.running) < MOST_RUNNING and _on_the_host(model), _again
    ),
    "drop host": Operation(2, 1, lambda model: _host(model).lanes, _drop),
}
STORAGE_OPERATIONS: dict[str, Operation] = {
    "prefetch": Operation(6, 3, _stored, _prefetch),
    "spoil": Operation(2, 1, _stored, _spoil),
}
