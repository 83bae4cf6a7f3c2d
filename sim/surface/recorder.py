"""What one rank called, on all its groups: its ledger (V6), and when each call began and ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from refmodel.collectives import Call, current_site
from refmodel.errors import InvalidInput, Where
from sim.surface.lines import line_of
from sim.surface.operations import Operation

# What a rank does instead of an operation: nothing, the same, another, several. It may also raise.
Disturb = Callable[[Operation], Iterable[Operation]]

# Hears of a call.
Listener = Callable[[Call], None]

# When a call was issued, and when what it receives was there, by the rank's clock: steps of the schedule, or
# nanoseconds.
Times = tuple[int, int]


class Span(NamedTuple):
    """How long a call took."""

    call: Call
    begin: int
    end: int


def spans_of(calls: Sequence[Call], times: Sequence[Times]) -> tuple[Span, ...]:
    """Of one rank; ``times`` [calls]."""
    return tuple(Span(call, begin, end) for call, (begin, end) in zip(calls, times, strict=True))


@dataclass(slots=True)
class Recorder:
    """Grows by a call, and its beginning, when it is issued; its end is noted when it is known.

    ``clock`` tells the time, ``disturb`` what the rank suffers; ``listener`` hears of each call before it is
    carried.
    """

    clock: Callable[[], int]
    disturb: Disturb | None = None
    listener: Listener | None = None
    calls: list[Call] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # of each call
    ends: list[int | None] = field(default_factory=list)  # of each call

    def renew(self, listener: Listener) -> None:
        """Begin another ledger; this one stays as it is with whoever holds it."""
        self.listener = listener
        self.calls, self.begins, self.ends = [], [], []

    def times(self, until: int | None = None) -> tuple[Times, ...]:
        """Of each call. What nobody has waited for ends as it began; or at ``until``, if the run failed."""
        return tuple(
            (begin, (begin if until is None else until) if end is None else end)
            for begin, end in zip(self.begins, self.ends, strict=True)
        )


# Without the constructor's own frame.
_new: Callable[[type[Call], tuple[Any, ...]], Call] = tuple.__new__


def entry(operation: Operation, sequence: int, group: str, size: int, rank: int) -> Call:
    """The ledger's entry for the operation of a group's method. Raises InvalidInput for mixed devices.

    Every call of every rank passes here: written plainly, for it is much of what a call costs.
    """
    name = current_site()
    sent, received = operation.sent, operation.received
    tensors = sent or received
    shape: tuple[int, ...] = ()
    dtype, num_bytes = "", 0
    if tensors:
        first = tensors[0]
        shape, dtype, num_bytes = first.shape, _NAMES[first.dtype], first.nbytes
        if len(tensors) > 1:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
        if received is not sent or len(sent) > 1:
            device = first.device
            for tensor in received if len(sent) == 1 else (*sent, *received):
                if tensor.device != device:
                    raise _mixed(operation, rank)
    return _new(
        Call,
        (
            sequence,
            # Above this function are at least those that led here: _issue, issue and the group's method.
            line_of(sys._getframe(4)) if name is None else name,
            operation.kind,
            shape,
            dtype,
            group,
            size,
            num_bytes,
            operation.detail,
            len(tensors),
            name is not None,
            operation.is_even,
            operation.is_message,
        ),
    )


class _Names(dict[torch.dtype, str]):
    """ "float32" for ``torch.float32``."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _Names()


def _mixed(operation: Operation, rank: int) -> InvalidInput:
    devices = {str(tensor.device) for tensor in (*operation.sent, *operation.received)}
    return InvalidInput(
        f"tensors of {operation.kind}",
        expected="all on one device",
        received=" and ".join(sorted(devices)),
        where=Where(rank=rank),
    )
