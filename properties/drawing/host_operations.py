"""Backups, pressure on the host cache, storage and files that go bad."""

from __future__ import annotations

from dataclasses import replace

from properties.drawing.choices import Choices
from properties.drawing.operation import Operation
from properties.drawing.request_operations import REQUEST_OPERATIONS
from properties.rehearsal.host_model import HostModel
from properties.rehearsal.model import Model
from sim.histories.history import Backup, DropHost, Prefetch, Spoil, Step


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
    """Whole pages of a request; now and then tokens that are not, which must be refused."""
    name = choices.of(_whole(model))
    valid, P = model.running[name].valid, model.P
    if choices.once_in(3):
        first = choices.below(valid)
        return [Step(backup=Backup(name, first, choices.between(first, valid) or 1))]
    first = choices.below(valid // P)
    return [Step(backup=Backup(name, first * P, choices.between(first + 1, valid // P) * P))]


def _drop(choices: Choices, model: Model) -> list[Step]:
    lanes = sorted(set(_host(model).lanes.values()))
    return [Step(drop_host=DropHost(choices.of(lanes), choices.between(1, model.setting.host_pages_per_lane)))]


def _prefetch(choices: Choices, model: Model) -> list[Step]:
    """The first pages that were stored, or a few less; now and then not all caches arrive (H3)."""
    name, most = choices.of(_stored(model))
    pages = choices.of([most, choices.between(1, most)])
    arrived = {}
    if choices.once_in(3):
        arrived = {choices.of(sorted(_host(model).files.caches)): choices.below(pages + 1)}
    return [Step(prefetch=Prefetch(name, pages, arrived))]  # type: ignore[arg-type]


def _spoil(choices: Choices, model: Model) -> list[Step]:
    name, most = choices.of(_stored(model))
    cache = choices.of(sorted(_host(model).files.caches, reverse=True))
    how = choices.of(["lose", "truncate", "corrupt"])
    return [Step(spoil=Spoil(name, choices.below(most), cache, how))]  # type: ignore[arg-type]


HOST_OPERATIONS: dict[str, Operation] = {
    "evict": replace(REQUEST_OPERATIONS["evict"], weight=5),  # what is on the device is not loaded back
    "backup": Operation(1, 1, _whole, _backup),
    "drop host": Operation(1, 1, lambda model: _host(model).lanes, _drop),
}
STORAGE_OPERATIONS: dict[str, Operation] = {
    "prefetch": Operation(4, 1, _stored, _prefetch),
    "spoil": Operation(1, 1, _stored, _spoil),
}
