"""What must be refused: unknown requests, wrong phases, more than all pages, what is on its way to decode."""

from __future__ import annotations

from collections.abc import Iterator

from properties.rehearsal.model import Model
from sim.engine.request import Phase
from sim.histories.history import Backup, DropHost, Evict, Prefetch, Resend, Send, Spoil, Step, Submit


def nonsense(model: Model, new_name: str) -> list[Step]:
    """Steps that make no sense here."""
    return [*_of_anybody(model, new_name), *_of_requests(model), *_of_transfers(model), *_of_the_host(model)]


def _of_anybody(model: Model, new_name: str) -> Iterator[Step]:
    most = model.W * model.setting.pages_per_lane
    yield Step(finish="nobody")
    yield Step(forward=[])
    yield Step(submit=Submit(new_name, most * model.P + 1))
    yield Step(submit=Submit(new_name, 1, "nobody", 1))
    yield Step(evict=Evict(model.W, 1))
    yield Step(evict=Evict(0, model.setting.pages_per_lane + 1))


def _of_requests(model: Model) -> Iterator[Step]:
    for name in model.seen:
        yield Step(submit=Submit(name, 1))
        if name not in model.running:
            yield from (Step(forward=[name]), Step(decode=[name]), Step(abort=name))
    for name in model.names(Phase.PREFILL):
        yield from (Step(decode=[name]), Step(finish=name), Step(forward=[name, name]))
    yield from (Step(forward=[name]) for name in model.names(Phase.READY))


def _of_transfers(model: Model) -> Iterator[Step]:
    """Second sends, and whatever would change pages that are on their way."""
    for name, request in model.running.items():
        if name not in model.transfers.sent:
            yield from (Step(cancel=name), Step(resend=Resend(name, [0])))
            yield Step(send=Send(name, request.valid + 1))
            continue
        sent = model.transfers.sent[name]
        if sent.is_over or sent.is_cancelled:
            yield from (Step(send=Send(name)), Step(send=Send(name, max(1, request.valid))))
        if sent.is_under_way:
            yield from (Step(finish=name), Step(abort=name), Step(decode=[name]))
            yield Step(send=Send(name, lose=(0,), late=(0,)))
        else:
            lost = sorted({rank for _, rank in sent.lost})
            yield from (Step(cancel=name), Step(resend=Resend(name, lost or [model.W - 1])))


def _of_the_host(model: Model) -> Iterator[Step]:
    yield from (Step(backup=Backup("nobody", 0, model.P)), Step(drop_host=DropHost(model.W, 1)))
    for name, request in model.running.items():
        yield Step(backup=Backup(name, 0, request.valid + 1))
    for name, request in model.seen.items():
        yield Step(prefetch=Prefetch(name, len(request.ids) // model.P + 1))
        if not model.setting.draft_layers:
            yield Step(spoil=Spoil(name, 0, "draft_kv", "lose"))
