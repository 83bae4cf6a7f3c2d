"""A case: one input of one operation, said in a few numbers, so that it prints, shrinks and replays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.values import TYPES
from refmodel.ops.op import Op


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """A subclass an operation. Its fields are plain numbers; tensors are a function of them.

    ``repr()`` of a case is code that makes it again, and its JSON is what ``--case`` takes.
    """

    op: ClassVar[Op]

    seed: int = 0  # of the values in tensors

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """The operation's arguments, by name and in order, on the CPU; the same at every call.

        Whatever a right kernel does not read is poison: NaN, −1, bytes of another. Indices are int64 here.
        """

    @classmethod
    @abstractmethod
    def corners(cls) -> Iterator[Self]:
        """What to try first, small before large: no rows, one row, an empty rank, shapes of production."""

    @classmethod
    @abstractmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        """Any case; small ones first, as Hypothesis shrinks towards them."""

    @classmethod
    def huge(cls) -> Self | None:
        """A case whose byte offsets exceed 2³¹ (F2), for a GPU; None if the operation computes none."""
        return None

    @classmethod
    def large(cls) -> Self | None:
        """What to time on a GPU: enough to fill it, of production's shape; None: the largest corner."""
        return None

    # -- what a declared capability is about ------------------------------------------------------------

    @property
    def page_size(self) -> int | None:
        """P of the case; None if the operation knows no pages."""
        return getattr(self, "page", None)

    @property
    def row_width(self) -> int | None:
        """Elements of a row of the case, as ``op.row_width`` says; None if the operation knows no rows."""
        name = self._width_field()
        return None if name is None else int(getattr(self, name))

    def with_width(self, width: int) -> Self | None:
        """The like case with rows of this width; None if there is none."""
        name = self._width_field()
        return None if name is None else replace(self, **{name: width})

    def _width_field(self) -> str | None:
        names = ("width", "dim", "hidden") if self.op.row_width is not None else ()
        return next((name for name in names if hasattr(self, name)), None)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Element types of its values: of a case that has one type, the one that its ``dtype`` names."""
        name = getattr(self, "dtype", None)
        return () if name is None else (TYPES[name],)


@dataclass(frozen=True, kw_only=True)
class FieldsCase(Case):
    """Of an operation on rows of one field or several."""

    fields: tuple[int, ...]  # bytes of each

    @property
    def row_width(self) -> int:
        return sum(self.fields)

    def with_width(self, width: int) -> Self | None:
        behind = sum(self.fields[1:])
        return None if behind >= width else replace(self, fields=(width - behind, *self.fields[1:]))
