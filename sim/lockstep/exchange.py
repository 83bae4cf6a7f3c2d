"""What each collective does to the tensors of all ranks, in rank order. No ranks, no threads, no groups.

Every function takes the operations of all ranks and gives what each of them receives: tensors to be copied
into ``received``, possibly shared by several ranks, shaped alike up to a ``view``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sim.surface.arguments import Tensors
from sim.surface.operations import Operation

Operations = Sequence[Operation]
Received = list[Sequence[torch.Tensor]]

_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,  # and divided afterwards
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def unequal(operations: Operations) -> tuple[int, int, str, str] | None:
    """The first (sender, receiver, what is sent, what is expected) of an all_to_all that do not fit.

    Only there may ranks send differently, so only there can it be seen but together.
    """
    if operations[0].kind != "all_to_all":
        return None
    for sender, giving in enumerate(operations):
        for receiver, taking in enumerate(operations):
            if giving.is_whole:
                sent, expected = f"{giving.splits[0][receiver]} rows", f"{taking.splits[1][sender]} rows"
            else:
                sent, expected = (
                    str(list(tensor.shape)) for tensor in (giving.sent[receiver], taking.received[sender])
                )
            if sent != expected:
                return sender, receiver, sent, expected
    return None


def perform(operations: Operations, *, in_place: bool) -> Received:
    """What each rank receives from a collective that all have come for.

    ``in_place``: what is received may be the first rank's own output already.
    """
    if in_place and operations[0].kind == "all_gather" and operations[0].is_whole:
        # The others copy from there: a buffer between would cost a third more.
        outputs = operations[0].received
        return [list(map(_gathered_into, outputs, _columns(operations)))] * len(operations)
    return _PERFORM[operations[0].kind](operations)


def _all_gather(operations: Operations) -> Received:
    if operations[0].is_whole:
        return [[_one_after_the_other(column) for column in _columns(operations)]] * len(operations)
    parts = [part for operation in operations for part in operation.sent]
    return [parts] * len(operations)


def _all_reduce(operations: Operations) -> Received:
    totals = [_fold(column, operations[0].fold) for column in _columns(operations)]
    return [totals] * len(operations)


def _broadcast(operations: Operations) -> Received:
    sent = operations[operations[0].root].sent
    return [sent if operation.received else () for operation in operations]


def _reduce(operations: Operations) -> Received:
    totals = [_fold([operation.sent[0] for operation in operations], operations[0].fold)]
    return [totals if operation.received else () for operation in operations]


def _gather(operations: Operations) -> Received:
    parts = [operation.sent[0] for operation in operations]
    return [parts if operation.received else () for operation in operations]


def _scatter(operations: Operations) -> Received:
    return [[part] for part in operations[operations[0].root].sent]


def _reduce_scatter(operations: Operations) -> Received:
    size, fold = len(operations), operations[0].fold
    if not operations[0].is_whole:
        return [[_fold([operation.sent[rank] for operation in operations], fold)] for rank in range(size)]
    totals = [
        _fold(column, fold).reshape(size, -1 if column[0].numel() else 0) for column in _columns(operations)
    ]
    return [[total[rank] for total in totals] for rank in range(size)]


def _all_to_all(operations: Operations) -> Received:
    if not operations[0].is_whole:
        return [[operation.sent[rank] for operation in operations] for rank in range(len(operations))]
    rows = [operation.sent[0].split(operation.splits[0]) for operation in operations]
    return [[_one_after_the_other(tuple(sent[rank] for sent in rows))] for rank in range(len(operations))]


def _barrier(operations: Operations) -> Received:
    return [()] * len(operations)


_PERFORM: dict[str, Callable[[Operations], Received]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def _columns(operations: Operations) -> Iterator[Tensors]:
    """Of each tensor that is sent: that of every rank."""
    return zip(*[operation.sent for operation in operations], strict=True)


def _gathered_into(output: torch.Tensor, parts: Tensors) -> torch.Tensor:
    """``output``, filled if it can be; else a tensor of its own, as where a part lies within ``output``."""
    if not parts[0].numel() or not output.is_contiguous():  # the others may have to view it
        return _one_after_the_other(parts)
    row = parts[0].shape[1:]
    try:
        # A view of it costs more than to see that none is needed.
        torch.cat(parts, out=output if output.shape[1:] == row else output.view(-1, *row))
    except RuntimeError:  # the parts overlap with it, or are no more than numbers
        return _one_after_the_other(parts)
    return output


def _one_after_the_other(parts: Tensors) -> torch.Tensor:
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


def _fold(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """``((t0 op t1) op t2) op …``: in rank order, so that the bits do not depend on who came when."""
    fold = _FOLDS[name]
    if len(tensors) == 1:
        total = tensors[0].clone()
    else:
        total = fold(tensors[0], tensors[1])
        for tensor in tensors[2:]:
            fold(total, tensor, out=total)
    return total / len(tensors) if name == "AVG" else total


_FRESH = ("all_reduce", "reduce", "reduce_scatter")


def kept(operations: Operations, received: Received) -> Received:
    """``received`` as it is now, for those who take it later: senders may by then have new contents."""
    first = operations[0]
    if first.kind in _FRESH or (first.is_whole and first.kind in ("all_gather", "all_to_all")):
        return received
    copies = {id(value): value for values in received for value in values}
    copies = {name: value.clone() for name, value in copies.items()}
    return [[copies[id(value)] for value in values] for values in received]
