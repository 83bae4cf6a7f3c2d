"""What a mutant is, and how it takes the place of what it mutates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from types import ModuleType
from typing import Any
from unittest.mock import patch

from refmodel.laws import law

Right = Callable[..., Any]  # the right version, as a wrong one receives it


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version of one function."""

    id: str  # of the incident, e.g. "split-02", or a name of our own
    laws: tuple[str, ...]  # that it breaks
    source: str  # where the fault was reported, or "derived"
    fault: str  # what is wrong, in a sentence
    target: Any  # the right version: a function, property or cached property
    wrong: Callable[..., Any]

    @property
    def place(self) -> str:
        """Where the right version lives, e.g. ``refmodel.layout.split.balanced``."""
        function = _function(self.target)
        return f"{function.__module__}.{function.__qualname__}"

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the wrong version stands wherever the right one was known by name."""
        with ExitStack() as stack:
            for holder, name in _holders(self.target):
                stack.enter_context(patch.object(holder, name, _like(self.target, self.wrong, name)))
            yield


def mutant(
    target: Any, name: str, *laws: str, source: str = "derived"
) -> Callable[[Callable[..., Any]], Mutant]:
    """Make the decorated function a mutant of ``target``. Its docstring says what is wrong.

    If its first parameter is called ``right``, it gets the right version there.
    """
    for law_id in laws:
        law(law_id)

    def make(wrong: Callable[..., Any]) -> Mutant:
        fault = (wrong.__doc__ or "").strip()
        return Mutant(name, laws, source, fault, target, _with_right(target, wrong))

    return make


def _with_right(target: Any, wrong: Callable[..., Any]) -> Callable[..., Any]:
    if next(iter(signature(wrong).parameters), None) != "right":
        return wrong
    right = _function(target)
    return lambda *args, **options: wrong(right, *args, **options)  # a function, so that it can be a method


def _function(target: Any) -> Any:
    if isinstance(target, cached_property):
        return target.func
    return target.fget if isinstance(target, property) else target


def _holders(target: Any) -> Iterator[tuple[object, str]]:
    """Every module, and the class if it is a method, that knows the target by a name."""
    function = _function(target)
    owner, _, name = function.__qualname__.rpartition(".")
    if owner:
        yield getattr(sys.modules[function.__module__], owner), name
        return
    for module in _own_modules():
        for known_as, value in list(vars(module).items()):
            if value is target:
                yield module, known_as


def _own_modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        ours = name.split(".")[0] in {"refmodel", "sim", "properties"}
        if ours:
            yield module


def _like(target: Any, wrong: Callable[..., Any], name: str) -> Any:
    """The wrong version in the same guise: a plain function, a property or a cached property."""
    if isinstance(target, cached_property):
        cached = cached_property(wrong)
        cached.__set_name__(object, name)
        return cached
    return property(wrong) if isinstance(target, property) else wrong
