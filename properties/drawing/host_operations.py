"""Backups, pressure on the host cache, storage and files that go bad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def _backup(choices: Choices, model: Model) -> Iterator[Step]:
    """Whole pages of a request, from the first on or not; half of the time tokens that must be refused.

    At times some first, then more: the first have copies then. And somebody asks for them.
    """
    name = choices.of(_whole(model))
    valid, P = model.running[name].valid, model.P
    if valid >= 2 * P and not _copied(model, name) and not choices.once_in(3):
        first = choices.between(1, valid // P - 1)
        yield Step(backup=Backup(name, 0, first * P))
        yield Step(backup=Backup(name, 0, choices.between(first + 1, valid // P) * P))
        yield from _left_and_wanted_again(choices, model, name)
        return
    first = choices.of([0, choices.below(valid // P)])
    start, stop = first * P, choices.of([valid // P, choices.between(first + 1, valid // P)]) * P
    if choices.below(2):
        by = choices.between(1, P)
        shifted = choices.between(1, max(1, valid - P))
        start, stop = choices.of([(shifted, shifted + P), (start, stop - by), (start + by, stop)])
    yield Step(backup=Backup(name, start, max(1, stop)))


def _again(choices: Choices, model: Model) -> Iterator[Step]:
    """A prompt comes that wants pages which have host copies."""
    yield from _left_and_wanted_again(choices, model, choices.of(_on_the_host(model)))


def _left_and_wanted_again(choices: Choices, model: Model, name: str) -> Iterator[Step]:
    """A request leaves, if it is still there; what the host has of it leaves the device, and is wanted."""
    if name in model.running:
        if model.settled(name) is None:
            return
        yield Step(abort=name)
    copies = _copied(model, name)
    if copies and len(model.running) < MOST_RUNNING:
        yield from _wanted_again(choices, model, name, [_host(model).lanes[key] for key in copies])


def _wanted_again(choices: Choices, model: Model, name: str, lanes: Sequence[int]) -> Iterator[Step]:
    """The first pages of a request, in these lanes, leave the device, and a prompt comes that wants them."""
    free, loose = model.free_pages(), model.tree.by_lane(model.tree.loose(model.tree.nodes()))
    for lane in [lane for lane in sorted(set(lanes)) if loose[lane]][:2]:
        yield Step(evict=Evict(lane, free[lane] + loose[lane]))
    if model.setting.load_anywhere and not choices.once_in(4):
        room = MOST_RUNNING - 1 - len(model.running)
        yield from _taken(model, min(room, free[0] + loose[0]))
    shared = len(lanes) * model.P
    tokens = shared + choices.of([0, 1, model.P])
    known, new = len(model.seen[name].ids), new_name(model)
    yield Step(submit=Submit(new, tokens, name, min(known, tokens, shared + 1)))
    if new in model.running and not choices.once_in(3):
        yield Step(forward=[new])


def _taken(model: Model, pages: int) -> Iterator[Step]:
    """Prompts of a page each take so many of the first lane, where most loads would land."""
    names = [new_name(model, i) for i in range(pages)]
    for name in names:
        yield Step(submit=Submit(name, model.P))
    if names:
        yield Step(forward=names)


def _on_the_host(model: Model) -> list[str]:
    """Requests that have left, or may, and whose first page has a host copy."""
    gone = [name for name in model.seen if name not in model.running or model.settled(name)]
    return [name for name in gone if _copied(model, name)]


def _copied(model: Model, name: str) -> list[int]:
    """The keys of a request's first pages that have host copies."""
    host = _host(model)
    return list(takewhile(host.lanes.__contains__, host.keys(model.seen[name])))


def _drop(choices: Choices, model: Model) -> list[Step]:
    lanes = sorted(set(_host(model).lanes.values()))
    return [
        Step(drop_host=DropHost(choices.of(lanes), choices.between(1, model.setting.host_pages_per_lane)))
    ]


def _prefetch(choices: Choices, model: Model) -> Iterator[Step]:
    """The first pages that were stored, or a few less; at times not all caches arrive (H3), or are sound.

    Before that the host loses copies, else there may be nothing to do: those of two lanes, or the last.
    """
    name, most = choices.of(_stored(model))
    host, pages = _host(model), choices.of([most, choices.between(1, most)])
    if choices.once_in(4):
        yield _spoiled(choices, model, name, pages)
    copies = _copied(model, name)
    if copies and choices.below(2):
        yield Step(drop_host=DropHost(host.lanes[copies[-1]], 1))
    elif not choices.once_in(3):
        for lane in sorted(set(host.lanes.values()))[:2]:
            yield Step(drop_host=DropHost(lane, model.setting.host_pages_per_lane))
    arrived = {}
    if choices.once_in(2):
        arrived = {choices.of(sorted(host.files.caches)): choices.below(pages + 1)}
    yield Step(prefetch=Prefetch(name, pages, arrived))  # type: ignore[arg-type]
    yield from _left_and_wanted_again(choices, model, name)


def _spoil(choices: Choices, model: Model) -> list[Step]:
    return [_spoiled(choices, model, *choices.of(_stored(model)))]


def _spoiled(choices: Choices, model: Model, name: str, pages: int) -> Step:
    cache = choices.of(sorted(_host(model).files.caches, reverse=True))
    how = choices.of(["lose", "truncate", "corrupt"])
    return Step(spoil=Spoil(name, choices.below(pages), cache, how))  # type: ignore[arg-type]


HOST_OPERATIONS: dict[str, Operation] = {
    "evict": replace(REQUEST_OPERATIONS["evict"], weight=4),  # what is on the device is not loaded back
    "backup": Operation(4, 1, _whole, _backup),
    "again": Operation(12, 4, _on_the_host, _again),
    "drop host": Operation(2, 1, lambda model: _host(model).lanes, _drop),
}
STORAGE_OPERATIONS: dict[str, Operation] = {
    "prefetch": Operation(12, 3, _stored, _prefetch),
    "spoil": Operation(2, 1, _stored, _spoil),
}
