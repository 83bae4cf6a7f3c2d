"""A target's kernels in the place of the reference, on one rank (``cpkv gate --kernels``).

:func:`in_place` is a block of a rank program. Within it, and for this rank alone, a kernel stands wherever
the reference does what its operation says. What the kernel itself calls is the reference's, and so is what a
rank compares with. It is the same in every world: on lockstep ranks are threads, so the functions that are
exchanged ask which rank calls them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from refmodel.errors import Finding
from sim.kernels.called import Called
from sim.kernels.loading import Named
from sim.kernels.seams.catalogue import SEAMS
from sim.kernels.seams.seam import Seam, Unsuited
from sim.kernels.uses import Uses
from sim.serving.checks import check_bytes, check_shard, check_view

T = TypeVar("T")


@dataclass(slots=True)
class _Standing:
    """The kernels of one rank."""

    kernels: Mapping[str, Called]
    calls: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    aside: bool = False  # a kernel or a judge is at work: what they call is the reference's

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        outer, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = outer


# Not state of the module: a context variable, empty unless this thread is within a block below.
_standing: ContextVar[_Standing | None] = ContextVar("cpkv_kernels", default=None)


@contextmanager
def in_place(named: Named) -> Iterator[Callable[[], Uses]]:
    """Within the block a target's kernels stand in their seams, for this thread. Gives their uses."""
    kernels = {op: Called(candidate) for op, candidate in named.target.candidates.items() if op in SEAMS}
    standing = _Standing(kernels)
    with _exchanged():
        outer = _standing.set(standing)
        try:
            yield lambda: Uses(dict(standing.calls), dict(standing.left))
        finally:
            _standing.reset(outer)


def with_kernels(
    group: dist.ProcessGroup, named: Named, program: Callable[..., T], *args: Any
) -> tuple[T, Uses]:
    """``program(group, *args)`` with a target's kernels in place: what it returns, and their uses."""
    with in_place(named) as uses:
        return program(group, *args), uses()


# -- functions exchanged, as long as any rank needs it -----------------------------------------------------

_JUDGES = (check_view, check_bytes, check_shard)  # that ranks call

_lock = threading.Lock()
_exchange = ExitStack()
_ranks = 0  # within the block


@contextmanager
def _exchanged() -> Iterator[None]:
    global _ranks
    with _lock:
        if not _ranks:
            for target in dict.fromkeys(seam.target for seams in SEAMS.values() for seam in seams):
                _exchange_by_seams(target)
            for judge in _JUDGES:
                for holder, name in list(_holders(judge)):
                    _put(holder, name, judge, _undisturbed(judge))
        _ranks += 1
    try:
        yield
    finally:
        with _lock:
            _ranks -= 1
            if not _ranks:
                _exchange.close()


def _exchange_by_seams(target: Callable[..., Any]) -> None:
    """Let whoever knows the target by a name ask its seams first."""
    seams = [seam for seams in SEAMS.values() for seam in seams if seam.target is target]
    for holder, name in list(_holders(target)):
        function = target
        for seam in seams:
            if seam.within in (None, holder):
                function = _asking(seam, function)
        if function is not target:
            _put(holder, name, target, function)


def _put(holder: Any, name: str, before: Callable[..., Any], function: Callable[..., Any]) -> None:
    setattr(holder, name, function)
    _exchange.callback(setattr, holder, name, before)


def _holders(target: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """The class if it is a method; else every module of the reference and the engine that knows it."""
    owner, _, name = target.__qualname__.rpartition(".")
    if owner:
        yield getattr(sys.modules[target.__module__], owner), name
        return
    for module in _modules():
        for known_as, value in vars(module).items():
            if value is target:
                yield module, known_as


def _modules() -> Iterator[ModuleType]:
    """Those in which ranks work. References of operations stay as they are: a target may be made of them."""
    others = ("refmodel.ops", "sim.gate", "sim.kernels")
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("refmodel", "sim") and not name.startswith(others):
            yield module


def _asking(seam: Seam, right: Callable[..., Any]) -> Callable[..., Any]:
    """The right function, unless the rank that calls it has a kernel for it."""

    @wraps(right)
    def function(*args: Any, **options: Any) -> Any:
        standing = _standing.get()
        if standing is None or standing.aside or seam.op not in standing.kernels:
            return right(*args, **options)
        kernel = _AtWork(standing, standing.kernels[seam.op])
        try:
            return seam.adapter(kernel, right, *args, **options)
        except Unsuited:
            standing.left[seam.op] += 1
            return right(*args, **options)

    return function


def _undisturbed(judge: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
    """A judge to whom no kernel has a say."""

    @wraps(judge)
    def function(*args: Any, **options: Any) -> Iterator[Finding]:
        standing = _standing.get()
        if standing is None:
            return judge(*args, **options)
        with standing.set_aside():
            return iter([*judge(*args, **options)])

    return function


@dataclass(frozen=True, slots=True)
class _AtWork:
    """A kernel within a seam."""

    standing: _Standing
    called: Called

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        given = self.called.given(arguments)
        self.standing.calls[self.called.op.name] += 1
        with self.standing.set_aside():
            return self.called.results(given)

    def one(self, *arguments: Any) -> Any:
        (result,) = self(*arguments)
        return result
