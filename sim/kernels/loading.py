"""Targets where ranks are: each process loads by name what it is told, once.

Functions of a user's file cannot travel between processes, their name can. On lockstep all ranks are threads
of this process, and get the same target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sim.kernels.candidate import Candidate
from sim.kernels.target import Target, load_target


@dataclass(frozen=True, slots=True)
class Named:
    """A target by its name, good in every process of this machine. Make it with :func:`named`."""

    text: str  # as of :func:`load_target`; a file by its whole path
    op: str | None = None  # that ``file.py:function`` is said to be

    @property
    def target(self) -> Target:
        """The target, loaded when it is first asked for in a process."""
        return _loaded(self)

    def candidate(self, op: str) -> Candidate:
        """Its candidate for an operation."""
        return self.target.candidates[op]


def named(text: str, op: str | None = None) -> Named:
    """The name of a target. :class:`InvalidInput`, here and now, if it cannot be loaded."""
    place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
    if place.endswith(".py") or "/" in place:  # processes may have another working directory
        text = f"{Path(place).resolve()}{colon}{function}"
    name = Named(text, op)
    _loaded(name)
    return name


@cache
def _loaded(name: Named) -> Target:
    return load_target(name.text, name.op)
