"""Chunks that go to decode, and what happens to their messages on the way."""

from __future__ import annotations

from collections.abc import Iterator

from properties.drawing.choices import Choices
from properties.drawing.operation import Operation
from properties.drawing.request_operations import MOST_RUNNING, new_name
from properties.rehearsal.model import Model
from sim.engine.request import Phase
from sim.histories.history import Resend, Send, Step, Submit


def _sendable(model: Model) -> list[str]:
    """Requests of which something is computed and the last chunk is not sent."""
    sent = model.transfers.sent
    over = {name for name, each in sent.items() if each.is_over or each.is_cancelled}
    return [name for name, request in model.running.items() if request.valid and name not in over]


def _lost(model: Model) -> list[str]:
    return [name for name, sent in model.transfers.sent.items() if sent.lost and not sent.is_cancelled]


def _under_way(model: Model) -> list[str]:
    return [name for name, sent in model.transfers.sent.items() if sent.is_under_way]


def _send(choices: Choices, model: Model) -> list[Step]:
    """All that is computed or some of it; half of the time a message is lost, late, or comes twice."""
    name = choices.of(_sendable(model))
    request = model.running[name]
    tokens = choices.between(1, request.valid) if choices.once_in(3) else None
    fates: dict[str, tuple[int, ...]] = {"lose": (), "repeat": (), "late": ()}
    if choices.below(2):
        is_last = (tokens or request.valid) == len(request.ids)
        ranks = {choices.below(model.W) for _ in range(choices.between(1, 2))}
        if choices.once_in(5):  # decode hears nothing of it, and so cannot refuse a second one
            unheard = Step(send=Send(name, tokens, tuple(range(model.W))))
            return [unheard, Step(send=Send(name))] if is_last else [unheard]
        for rank in sorted(ranks):
            fate = choices.of(["lose", "repeat"] if is_last else ["late", "lose", "repeat"])
            fates[fate] += (rank,)
    return [Step(send=Send(name, tokens, fates["lose"], fates["repeat"], fates["late"]))]


def _touch(choices: Choices, model: Model) -> list[Step]:
    """Nothing may change pages that are on their way (T5)."""
    name = choices.of(_under_way(model))
    return [choices.of([Step(finish=name), Step(abort=name), Step(decode=[name])])]


def _twins(choices: Choices, model: Model) -> Iterator[Step]:
    """Two prompts alike, chunk by chunk side by side: the second is bound to the pages of the first.

    With pairs as keys that is a chunk later, when some of its pages may be on their way.
    """
    names = [new_name(model, i) for i in range(2)]
    tokens = choices.between(model.P + 1, 3 * model.P)
    yield Step(submit=Submit(names[0], tokens))
    yield Step(submit=Submit(names[1], tokens, names[0], tokens))
    for _ in range(2):
        if not all(name in model.names(Phase.PREFILL) for name in names):
            return
        yield Step(forward=names)
        if names[1] in _sendable(model):
            yield Step(send=Send(names[1], lose=(choices.below(model.W),)))


def _side_by_side(model: Model) -> bool:
    return model.setting.chunk is not None and len(model.running) + 2 <= MOST_RUNNING


def _over(model: Model) -> list[str]:
    return [name for name, sent in model.transfers.sent.items() if sent.is_over or sent.is_cancelled]


def _send_again(choices: Choices, model: Model) -> list[Step]:
    """A request is sent once, and what was cancelled is over: this must be refused (T3)."""
    name = choices.of(_over(model))
    sent = model.transfers.sent[name]
    if sent.is_cancelled and sent.lost:
        return [Step(resend=Resend(name, sorted({rank for _, rank in sent.lost})))]
    return [Step(send=Send(name))]


def _resend(choices: Choices, model: Model) -> list[Step]:
    name = choices.of(_lost(model))
    ranks = sorted({rank for _, rank in model.transfers.sent[name].lost})
    return [Step(resend=Resend(name, choices.some(ranks)))]


def _cancel(choices: Choices, model: Model) -> list[Step]:
    """The end; and now and then what was lost comes all the same, which must be refused."""
    name = choices.of(_under_way(model))
    lost = sorted({rank for _, rank in model.transfers.sent[name].lost})
    late = [Step(resend=Resend(name, lost))] if lost and choices.below(2) else []
    return [Step(cancel=name), *late]


TRANSFER_OPERATIONS: dict[str, Operation] = {
    "send": Operation(7, 2, _sendable, _send),
    "resend": Operation(5, 3, _lost, _resend),
    "send again": Operation(2, 1, _over, _send_again),
    "cancel": Operation(2, 3, _under_way, _cancel),
    "twins": Operation(3, 1, _side_by_side, _twins),
    "touch": Operation(2, 1, _under_way, _touch),
}
