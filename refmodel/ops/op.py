"""What a kernel-sized operation is: its signature, its reference, and what must hold of a result.

Everything is at tensor level, as kernels take it: flat tensors, ints, tuples of ints. A kernel is any
callable with an operation's arguments, by their names and in their order. It returns the results; or it has
one more parameter, ``out``, and writes them there. An argument marked *written* is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from refmodel.errors import Finding
from refmodel.laws import law

Arguments = Mapping[str, Any]  # by name
Results = tuple[torch.Tensor, ...]

# (arguments as they were; what was received; what the reference made of the same) → the first fault.
# Both outcomes are as :meth:`Op.outcome` gives them: the arguments written, then the results.
Judge = Callable[[Arguments, Results, Results], Finding | None]


class Kind(Enum):
    """What an argument is."""

    VALUES = "values"  # a tensor of numbers or bytes
    INDEX = "index"  # a tensor of int32 or int64, as one pleases
    INT = "int"
    INTS = "ints"  # a tuple of ints: metadata of the host, equal on all ranks
    FLOAT = "float"
    WORD = "word"  # a string of a few allowed ones
    GROUP = "group"  # a process group of torch.distributed


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of an operation."""

    name: str
    kind: Kind
    meaning: str
    shape: str = ""  # of a tensor: "[rows, heads, latent + rope]"
    dtypes: tuple[torch.dtype, ...] = ()  # of values; empty: any
    written: bool = False  # in place; what the operation does not name in it must survive


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that comes back."""

    name: str
    shape: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Space:
    """Shape and dtype of one result, from the arguments alone: to allocate it before anything runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation must move and compute at least, for given arguments."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """The contract of one operation."""

    name: str
    meaning: str  # a sentence
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]  # none if it only writes into its arguments
    reference: Callable[..., Results]
    spaces: Callable[..., tuple[Space, ...]]  # of the results, by the same arguments
    judge: Judge
    compared: str  # how, in a few words: "byte for byte"
    laws: tuple[str, ...]
    cost: Callable[..., Cost]
    collective: bool = False
    row_width: Callable[..., int] | None = None  # elements of a row; None: there are no rows

    def __post_init__(self) -> None:
        for law_id in self.laws:
            law(law_id)

    @property
    def signature(self) -> str:
        """``rerange(buffers, prefixes, tokens, world_size, page_size)``"""
        return f"{self.name}({', '.join(argument.name for argument in self.arguments)})"

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that are changed in place."""
        return tuple(argument.name for argument in self.arguments if argument.written)

    def outcome(self, arguments: Arguments, results: Results) -> Results:
        """All that a run brought about: the arguments written, then the results."""
        return (*(arguments[name] for name in self.written), *results)
