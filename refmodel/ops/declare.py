"""What a kernel says of itself. It is declared, never guessed: what is declared is tried, and nothing beyond.

A kernel that says nothing has the strict default of the contract: every element type, page size and device,
indices of 32 and 64 bits, views with any strides, NaN in slots that it must not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from refmodel.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])

_INDEX_DTYPES = ("int32", "int64")
_DEVICES = ("cpu", "cuda")
_ATTRIBUTE = "__cpkv__"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel can do. An empty tuple: whatever there is."""

    dtypes: tuple[torch.dtype, ...] = ()  # of values; their names do, too: "bfloat16"
    page_sizes: tuple[int, ...] = ()  # each is tried
    widths: tuple[int, ...] = ()  # elements of a row, such as 576 of MLA; each is tried
    devices: tuple[str, ...] = ()  # "cpu", "cuda"
    index_dtypes: tuple[str, ...] = _INDEX_DTYPES
    contiguous: bool = False  # True: tensors are contiguous; False: any strides are fine
    tail_nan: bool = True  # False: in slots that are not read there are finite numbers, never NaN
    deterministic: bool = False  # True: the same input gives the same bits

    def __post_init__(self) -> None:
        for name in ("dtypes", "page_sizes", "widths", "devices", "index_dtypes"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise InvalidInput(name, expected="a tuple", received=repr(value))
            object.__setattr__(self, name, tuple(value))
        for name in ("contiguous", "tail_nan", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, expected="True or False", received=repr(getattr(self, name)))
        object.__setattr__(self, "dtypes", tuple(map(_dtype, self.dtypes)))
        for name in ("page_sizes", "widths"):
            for size in getattr(self, name):
                if not isinstance(size, int) or size < 1:
                    raise InvalidInput(name, expected="integers >= 1", received=repr(size))
        _only("devices", self.devices, _DEVICES)
        _only("index_dtypes", self.index_dtypes, _INDEX_DTYPES)
        if not self.index_dtypes:
            raise InvalidInput("index_dtypes", expected="one at least", received="()")

    @property
    def declared(self) -> dict[str, str]:
        """What differs from the default, in words.

        >>> Capabilities(page_sizes=(64,), dtypes=("bfloat16",)).declared
        {'dtypes': 'bfloat16', 'page_sizes': '64'}
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: _words(value) for name, value in given.items() if value != getattr(Capabilities(), name)
        }


@dataclass(frozen=True, slots=True)
class Declaration:
    """Which operation a function is, and what it can do."""

    op: str
    capabilities: Capabilities


def kernel(op: str, **capabilities: Any) -> Callable[[F], F]:
    """Say that the decorated function is an operation of the catalogue, under whatever name of its own.

    >>> @kernel("rerange", page_sizes=(64,), contiguous=True)
    ... def my_rerange(buffers, prefixes, tokens, world_size, page_size): ...
    >>> declaration_of(my_rerange).op
    'rerange'
    """
    said = Declaration(op, capabilities_of(capabilities, what=f"kernel({op!r})"))

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, said)
        return function

    return mark


def declaration_of(function: object) -> Declaration | None:
    """What :func:`kernel` said of a function, if anything."""
    said = getattr(function, _ATTRIBUTE, None)
    return said if isinstance(said, Declaration) else None


def capabilities_of(
    given: Mapping[str, Any], *, what: str, beside: Capabilities | None = None
) -> Capabilities:
    """Capabilities from names and values, those of ``beside`` where a name is not given.

    :class:`InvalidInput` that names ``what`` if a name is unknown or a value makes no sense.
    """
    known = [field.name for field in fields(Capabilities)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"Did you mean {near[0]}?" if near else ""
            raise InvalidInput(what, expected=f"capabilities {', '.join(known)}", received=name, fix=fix)
    try:
        return replace(beside or Capabilities(), **given)
    except InvalidInput as error:
        raise InvalidInput(
            f"{what}, {error.what}", expected=error.expected, received=error.received
        ) from error


def _dtype(value: object) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise InvalidInput("dtypes", expected='dtypes of torch, or their names ("bfloat16")', received=value)
    return found


def _only(name: str, given: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in given:
        if value not in allowed:
            raise InvalidInput(name, expected=f"of {', '.join(allowed)}", received=repr(value))


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(part).removeprefix("torch.") for part in value)
    return str(value)
