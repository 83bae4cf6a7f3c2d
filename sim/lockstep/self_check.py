"""Whether the schedule of a run controls all of it: run, replay, compare what every rank called and sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from refmodel.collectives import Call
from refmodel.errors import InvalidInput, Where
from sim.failures import Nondeterministic, RunFailed
from sim.lockstep.run import LockstepRun, Outcome
from sim.lockstep.schedule import Schedule, replay
from sim.surface.operations import Operation

Make = Callable[[Schedule], LockstepRun]


def self_check(make: Make, schedule: Schedule, args: Sequence[Any]) -> Outcome:
    """The outcome of the run that ``make(schedule)`` makes, if its replay is no different.

    ``args`` must not be changed by the program. Raises Nondeterministic, or what the first run raises.
    """
    first = _Witness(make(schedule))
    outcome = first.run.execute(args, None)
    again = _Witness(make(replay(outcome.schedule)))
    try:
        second = again.run.execute(args, None)
    except (InvalidInput, RunFailed) as failure:
        raise _differs(first, again, f"a failure: {failure.what}") from failure
    if again.seen != first.seen:
        raise _differs(first, again, "other calls")
    for rank, (one, other) in enumerate(zip(outcome.results, second.results, strict=True)):
        if _digest(one) != _digest(other):
            raise _nondeterministic(first, "the results of both runs", "others", Where(rank=rank))
    return outcome


class _Witness:
    """Sees what a run sends, before it is sent."""

    def __init__(self, run: LockstepRun) -> None:
        self.run = run
        self.seen: list[list[str]] = [[] for _ in range(run.size)]
        for rank, recorder in enumerate(run.recorders):
            recorder.disturb = self._witness(rank)

    def _witness(self, rank: int) -> Callable[[Operation], Iterable[Operation]]:
        def see(operation: Operation) -> Iterable[Operation]:
            self.seen[rank].append(_digest([operation.kind, operation.detail, operation.sent]))
            return (operation,)

        return see

    def call(self, rank: int, place: int) -> Call | None:
        calls = self.run.recorders[rank].calls
        return calls[place] if place < len(calls) else None


def _differs(first: _Witness, again: _Witness, otherwise: str) -> Nondeterministic:
    """Of all ranks the first place, in the order of the ranks' own calls, where what they did differs."""
    places = [
        (place, rank)
        for rank, (one, other) in enumerate(zip(first.seen, again.seen, strict=True))
        for place in range(max(len(one), len(other)))
        if one[place : place + 1] != other[place : place + 1]
    ]
    if not places:
        return _nondeterministic(first, "the same run again", otherwise, Where())
    place, rank = min(places)
    one, other = first.call(rank, place), again.call(rank, place)
    if one == other:
        return _nondeterministic(first, str(one), "other contents", Where(rank=rank, site=_site(one)))
    return _nondeterministic(
        first,
        str(one) if one is not None else "no more calls",
        str(other) if other is not None else "no more calls",
        Where(rank=rank, site=_site(one) or _site(other)),
    )


def _site(call: Call | None) -> str | None:
    return None if call is None else call.site


def _nondeterministic(witness: _Witness, expected: str, received: str, where: Where) -> Nondeterministic:
    return Nondeterministic(
        f"{witness.run.name} is not the same twice",
        expected=expected,
        received=f"{received} when replayed",
        where=where,
        fix="Time, the order of a set, random or numpy without a seed, or state that the first run left?",
    )


def _digest(value: Any) -> str:
    return hashlib.sha256("\0".join(_parts(value)).encode()).hexdigest()


def _parts(value: Any) -> Iterable[str]:
    """A value in words; of what has no words of its own, only its type."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield hashlib.sha256(plain.numpy().tobytes()).hexdigest()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _parts(key)
            yield from _parts(entry)
    elif isinstance(value, Sequence):
        yield f"{len(value)}"
        for entry in value:
            yield from _parts(entry)
    else:
        yield type(value).__qualname__
        yield from _parts(getattr(value, "__dict__", None))
