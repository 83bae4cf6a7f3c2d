"""How tensors are handed to a kernel: what the contract leaves free, and a case does not say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st

from refmodel.ops.op import Argument, Kind, Op
from sim.kernels.candidate import Candidate

INDEX_DTYPES = {"int64": torch.int64, "int32": torch.int32}


class Views(Enum):
    """How tensors lie in memory."""

    PLAIN = "plain"  # contiguous
    OFFSET = "offset"  # contiguous, but they begin one row into their storage
    STRIDED = "strided"  # neither rows nor elements of a row follow each other


@dataclass(frozen=True, slots=True)
class Handling:
    """One way. The default is the plainest; a right kernel gives the same results in all of them."""

    index: str = "int64"  # dtype of indices
    views: Views = Views.PLAIN
    out: bool = False  # results go to tensors that the caller gives
    finite: bool = False  # large numbers, not NaN, where nothing is to be read

    def __str__(self) -> str:
        """``int32 indices, strided views, into out``; empty for the plainest."""
        words = (
            f"{self.index} indices" if self.index != "int64" else "",
            f"{self.views.value} views" if self.views is not Views.PLAIN else "",
            "into out" if self.out else "",
            "finite poison" if self.finite else "",
        )
        return ", ".join(filter(None, words))

    @property
    def code(self) -> str:
        """An expression that makes it again."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        said = (
            f"{name}={value if isinstance(value, Views) else repr(value)}"
            for name, value in given
            if value != getattr(Handling(), name)
        )
        return f"Handling({', '.join(said)})"

    @property
    def oddness(self) -> int:
        """In how much it differs from the plainest."""
        return sum(getattr(self, f.name) != getattr(Handling(), f.name) for f in fields(self))

    def values(self, op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with this dtype of indices, and this poison. Tensors are new, contiguous."""
        handled = dict(arguments)
        for argument in op.arguments:
            value = arguments.get(argument.name)  # a group is the world's to give
            if isinstance(value, torch.Tensor):
                handled[argument.name] = self._value(argument, value)
        return handled

    def _value(self, argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
        if argument.kind is Kind.INDEX:
            return tensor.to(INDEX_DTYPES[self.index], copy=True)
        if self.finite and tensor.is_floating_point():
            return torch.where(tensor.isnan(), _large(tensor), tensor)
        return tensor.clone(memory_format=torch.contiguous_format)


PLAIN = Handling()


def _large(tensor: torch.Tensor) -> torch.Tensor:
    """Finite numbers of both signs that nobody overlooks, as many as the tensor has."""
    generator = torch.Generator().manual_seed(tensor.numel())
    sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return (sign * 2.0**14).to(tensor.dtype)


def all_handlings(candidate: Candidate) -> Iterator[Handling]:
    """Every way that the candidate's declarations allow, the plainest first."""
    axes = _axes(candidate)
    ways = (Handling(*values) for values in product(*axes))
    return iter(sorted(ways, key=lambda way: way.oddness))


def few_handlings(candidate: Candidate) -> list[Handling]:
    """Enough that each pair of values of two axes occurs together, the plainest first."""
    ways = list(all_handlings(candidate))
    wanted = set().union(*(_pairs(way) for way in ways)) if ways else set()
    chosen = ways[:1]
    wanted -= set().union(*(_pairs(way) for way in chosen))
    while wanted:
        best = max(ways, key=lambda way: len(_pairs(way) & wanted))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def _pairs(way: Handling) -> set[tuple[tuple[str, object], ...]]:
    values = [(f.name, getattr(way, f.name)) for f in fields(way)]
    return {(one, other) for one in values for other in values if one[0] < other[0]}


def _axes(candidate: Candidate) -> tuple[list[Any], ...]:
    """Values of each field of a handling, in order."""
    capabilities = candidate.capabilities
    kinds = {argument.kind for argument in candidate.op.arguments}
    tensors = bool(kinds & {Kind.INDEX, Kind.VALUES})
    index = [name for name in INDEX_DTYPES if name in capabilities.index_dtypes]
    return (
        index if Kind.INDEX in kinds else ["int64"],
        [way for way in Views if way is not Views.STRIDED or not capabilities.contiguous]
        if tensors
        else [Views.PLAIN],
        [True] if candidate.needs_out else [False, True] if candidate.takes_out else [False],
        ([False, True] if capabilities.tail_nan else [True]) if Kind.VALUES in kinds else [False],
    )


def handlings(candidate: Candidate) -> st.SearchStrategy[Handling]:
    """Any way; the plainest is the simplest."""
    return st.builds(Handling, *map(st.sampled_from, _axes(candidate)))
