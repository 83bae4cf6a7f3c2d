"""What a seam is: a place where the reference does what an operation says, and how a kernel stands there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from refmodel.ops.op import Results


class Unsuited(Exception):
    """This call is none that the kernel is for: the reference does it."""


class Kernel(Protocol):
    """Somebody's kernel within a seam."""

    def __call__(self, *arguments: Any) -> Results:
        """Results of the operation, for its arguments in order. Raises :class:`Unsuited`."""

    def one(self, *arguments: Any) -> torch.Tensor:
        """The result of an operation that has one."""


# (kernel, the right function, its arguments as they are given) → what the right function would return.
Adapter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Seam:
    """A function or method of the reference that a kernel can stand in for."""

    op: str
    target: Callable[..., Any]
    adapter: Adapter
    within: ModuleType | None = None  # where the function is called; None: wherever it is known by name

    @property
    def place(self) -> str:
        """``refmodel.layout.ownership.to_physical``, of some callers ``… in refmodel.model.attend``"""
        place = f"{self.target.__module__}.{self.target.__qualname__}"
        return place if self.within is None else f"{place} in {self.within.__name__}"


def seam(
    op: str, target: Callable[..., Any], *, within: ModuleType | None = None
) -> Callable[[Adapter], Seam]:
    """Make the decorated adapter a seam of ``target``.

    It gets the kernel, the right function, and whatever the target is called with. It raises
    :class:`Unsuited`, before it changes anything, for calls that the operation's arguments cannot say.
    """
    return lambda adapter: Seam(op, target, adapter, within)
