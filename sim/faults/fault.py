"""What a run may suffer: one fault of one rank, at one of its calls, in any world and with any program.

A fault is written ``skip rank=1 at=kv.view``: what, who, and at which call. ``at=kv.view`` is the rank's
first call there, ``at=kv.view[2]`` its third, ``at=ring.py:88`` one that has no name, ``at=#5`` the rank's
call 5, as ledgers count. A rank's :class:`Disturber` stands where its calls leave the program, so neither
the program nor what carries the calls knows of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from refmodel.collectives import at_site, current_site
from refmodel.errors import InvalidInput, Where
from sim.faults import alterations
from sim.surface.lines import line_of
from sim.surface.operations import Operation

T = TypeVar("T")

# What happens, in the words of `cpkv gate --help`.
KINDS = {
    "die": "the process of the rank is killed; on lockstep it raises",
    "raise": "the rank raises",
    "return": "the rank returns None, as if its program had ended there",
    "hang": "the rank never comes to the call",
    "skip": "the rank leaves the call out",
    "twice": "the rank issues the call twice",
    "swap": "the rank issues the next call first; without one it leaves this one out",
    "kind": "the rank issues another kind of collective",
    "shape": "the rank sends twice the rows",
    "dtype": "the rank sends another type",
    "values": "the rank sends other bytes: the lowest bit of every element is turned",
    "delay": "a message leaves so late that everybody else waits",
    "lose": "a message never arrives",
    "repeat": "a message is sent twice",
}
OF_MESSAGES = ("delay", "lose", "repeat")

_FORM = re.compile(r"(?P<kind>\w+) +rank=(?P<rank>\d+) +at=(?P<at>\S+)")
_PLACE = re.compile(r"#(?P<sequence>\d+)|(?P<site>[^#\[\]]+)(\[(?P<nth>\d+)\])?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at one call of one rank.

    >>> Fault.parse("skip rank=1 at=kv.view[2]")
    Fault(kind='skip', rank=1, at='kv.view[2]')
    >>> print(Fault("die", 0, "#5"))
    die rank=0 at=#5
    """

    kind: str  # one of KINDS
    rank: int  # of the world
    at: str  # "kv.view", "kv.view[2]" or "#5"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refused("kind of a fault", ", ".join(KINDS), self.kind)
        if type(self.rank) is not int or self.rank < 0:
            raise _refused("rank of a fault", "an integer >= 0", self.rank)
        if not _PLACE.fullmatch(self.at):
            raise _refused(
                "place of a fault", 'a call site, "kv.view" or "kv.view[2]", or a call, "#5"', self.at
            )

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault of a line such as "skip rank=1 at=kv.view"; InvalidInput for any other text."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise InvalidInput(
                "fault",
                expected='what, who and where, such as "skip rank=1 at=kv.view"',
                received=repr(text),
                fix=f"What: {', '.join(KINDS)}.",
            )
        return cls(found["kind"], int(found["rank"]), found["at"])

    def __str__(self) -> str:
        return f"{self.kind} rank={self.rank} at={self.at}"

    def is_at(self, operation: Operation, site: str, sequence: int, nth: int) -> bool:
        """Whether this is the call: the rank's ``sequence``-th, its ``nth`` at ``site``; both from 0."""
        if not self._can_befall(operation):
            return False
        place = _PLACE.fullmatch(self.at)
        assert place is not None
        if place["sequence"] is not None:
            return int(place["sequence"]) == sequence
        return (place["site"], int(place["nth"] or 0)) == (site, nth)

    def _can_befall(self, operation: Operation) -> bool:
        if self.kind in OF_MESSAGES:
            return operation.kind == "send"
        if self.kind == "kind":
            return not operation.is_message
        if self.kind == "shape" and not operation.is_even:
            return False
        if self.kind in ("shape", "dtype", "values"):
            tensors = operation.sent if self.kind == "values" else operation.tensors
            return any(tensor.numel() for tensor in tensors)
        return True


class InjectedError(RuntimeError):
    """What a rank raises that suffers ``raise``, or ``die`` where it has no process of its own."""


class ReturnsEarly(BaseException):  # not an Exception: a program's own handlers must not catch it
    """Ends the program of a rank that suffers ``return``."""


class Means(Protocol):
    """What only the world that a rank lives in can do to it."""

    def die(self, fault: Fault) -> NoReturn: ...

    def hang(self, fault: Fault) -> NoReturn: ...

    def linger(self) -> None:
        """Return once everybody else has had the time to come to a call."""


@dataclass(slots=True)
class Disturber:
    """What one rank suffers; call it with each operation for what the rank does instead."""

    faults: tuple[Fault, ...]  # of this rank
    means: Means
    _sequence: int = 0
    _calls_at: dict[str, int] = field(default_factory=dict)
    _happened: set[Fault] = field(default_factory=set)
    _held: tuple[Operation, str | None] | None = None  # by a swap, with its site

    def __call__(self, operation: Operation) -> Iterator[Operation]:
        """What is issued in its place. Each is issued before the next is asked for."""
        site = current_site() or line_of(sys._getframe(1))
        sequence, nth = self._sequence, self._calls_at.get(site, 0)
        self._sequence, self._calls_at[site] = sequence + 1, nth + 1
        held, self._held = self._held, None
        mine = (fault for fault in self.faults if fault.is_at(operation, site, sequence, nth))
        fault = next(mine, None)
        if fault is None:
            yield operation
        else:
            yield from self._instead(fault, operation)
        if held is not None:
            with at_site(held[1]):
                yield held[0]

    def _instead(self, fault: Fault, operation: Operation) -> Iterator[Operation]:
        self._happened.add(fault)
        match fault.kind:
            case "die":
                self.means.die(fault)
            case "raise":
                raise InjectedError(str(fault))
            case "return":
                raise ReturnsEarly
            case "hang":
                self.means.hang(fault)
            case "skip":
                return
            case "swap":
                self._held = operation, current_site()
            case "twice" | "repeat":
                yield operation
                yield operation
            case "delay":
                self.means.linger()
                yield operation
            case "lose":
                yield operation._replace(is_lost=True)
            case _:
                yield alterations.ALTER[fault.kind](operation)

    def missed(self) -> Missed | None:
        """Now that the program has returned: the first fault that was to happen where it never came."""
        fault = next((fault for fault in self.faults if fault not in self._happened), None)
        return None if fault is None else Missed(fault, self._sequence, tuple(self._calls_at))


@dataclass(frozen=True, slots=True)
class Missed:
    """What a rank returns whose fault did not happen: it travels like any result, on all worlds."""

    fault: Fault
    num_calls: int
    sites: tuple[str, ...]

    def error(self) -> InvalidInput:
        """Where the fault could have been."""
        return InvalidInput(
            f"place of the fault {self.fault}",
            expected=f"one of the {self.num_calls} calls of rank {self.fault.rank}, "
            f"at {', '.join(self.sites) or 'no site'}",
            received=self.fault.at,
            where=Where(rank=self.fault.rank),
            fix="delay, lose and repeat need a message that is sent; values needs something in it.",
        )


def check_faults(faults: Sequence[Fault], size: int) -> None:
    """InvalidInput if a fault is of a rank that a world of ``size`` ranks does not have."""
    for fault in faults:
        if fault.rank >= size:
            raise _refused("rank of a fault", f"0 … {size - 1}", fault.rank)


def disturber(faults: Sequence[Fault], rank: int, means: Means) -> Disturber | None:
    """Of one rank; None if it suffers nothing."""
    mine = tuple(fault for fault in faults if fault.rank == rank)
    return Disturber(mine, means) if mine else None


def check_happened(results: Iterable[object]) -> None:
    """InvalidInput if a fault was to happen where its rank never came; ``results`` are those of all ranks."""
    for result in results:
        if isinstance(result, Missed):
            raise result.error()


def suffered(disturber: Disturber | None, program: Callable[..., T], *args: Any) -> T | Missed | None:
    """What the program returns on a rank with this disturber; None if a fault ended it in silence."""
    if disturber is None:
        return program(*args)
    try:
        result = program(*args)
    except ReturnsEarly:
        return None
    return disturber.missed() or result


def _refused(what: str, expected: str, received: object) -> InvalidInput:
    return InvalidInput(what, expected=expected, received=repr(received))
