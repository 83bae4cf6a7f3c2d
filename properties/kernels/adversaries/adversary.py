"""What an adversary is: a kernel that is wrong on purpose, and what it must be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from types import ModuleType
from typing import Any, TypeVar

from refmodel.errors import InvalidInput
from refmodel.laws import law as law_of

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Adversary:
    """One wrong kernel of one operation."""

    op: str  # name of the operation
    function: Callable[..., Any]  # with the operation's parameters, as any candidate
    fault: str  # what is wrong, in a sentence
    law: str  # that a judge must say it breaks; empty if it fails before any judge is asked
    kind: str  # of failure then: a word of the kit, such as "shape" or "crash"; else empty
    huge: bool  # right in all but the huge case

    @property
    def name(self) -> str:
        return self.function.__name__


def adversary(op: str, *, law: str = "", kind: str = "", huge: bool = False) -> Callable[[F], F]:
    """Make the decorated function an adversary of an operation. Its docstring says what is wrong.

    It stays a plain function, so that it can be named as a target like any other kernel.
    :class:`InvalidInput` unless exactly one of ``law`` and ``kind`` says how it must fail.
    """
    if bool(law) == bool(kind):
        raise InvalidInput("adversary", expected="either a law or a kind", received=f"{law!r}, {kind!r}")
    if law:
        law_of(law)

    def note(function: F) -> F:
        fault = cleandoc(function.__doc__ or "")
        vars(function)["adversary"] = Adversary(op, function, fault, law, kind, huge)
        return function

    return note


def adversaries_of(module: ModuleType) -> Iterator[Adversary]:
    """Those that a module defines, in the order of its lines."""
    for value in vars(module).values():
        if callable(value) and getattr(value, "__module__", "") == module.__name__:
            found = getattr(value, "adversary", None)
            if isinstance(found, Adversary):
                yield found
