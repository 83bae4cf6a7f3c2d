"""What a rank says about itself, to whoever watches the run."""

from __future__ import annotations

from dataclasses import dataclass

from refmodel.collectives import Call


@dataclass(frozen=True, slots=True)
class Ready:
    """It is in its group and waits for a program."""


@dataclass(frozen=True, slots=True)
class Begins:
    """It has got the program; what happens from here on is the program's doing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """It has imported the program, and runs it."""


@dataclass(frozen=True, slots=True)
class Issues:
    """It is about to issue a call."""

    call: Call


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing has happened, and it is here."""

    line: str  # of the program, "ring.py:88"
    waits: bool | None = None  # in its last call; None: not known


@dataclass(frozen=True, slots=True)
class Returned:
    """The program returned."""

    result: bytes  # packed
    times: tuple[tuple[int, int], ...]  # of each call: issued, and finished, by the rank's clock in ns
    serves_on: bool = True  # its group is as it was, so that it can run another program


@dataclass(frozen=True, slots=True)
class Failed:
    """The program raised, or what it needs or gave cannot travel."""

    problem: str  # what cannot be done: "start", "program and arguments", "result"; empty: it raised
    received: str
    traceback: str
    when: float  # seconds, of a clock that the ranks share
    lost_connection: bool = False  # raised in a collective, because another rank is gone


Message = Ready | Begins | Loaded | Issues | Alive | Returned | Failed
