"""How bytes in a cache are judged: each where its format puts it, the rest unchanged (laws F1, F2, O3)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from refmodel.errors import Finding
from refmodel.ops.judges import equal_bytes
from refmodel.ops.op import Arguments, Judge, Results

_HALF = 2**31  # the first byte offset that 32 bits with a sign cannot hold


def written(name: str, *, law: str, survival: str) -> Judge:
    """Of an operation that only writes into its argument ``name``.

    ``law`` breaks where what it should write is not there, ``survival`` where anything else is not as it
    was; from byte 2³¹ of the argument on, F2 does instead of ``law``.
    """
    here, far, survives = equal_bytes(law), equal_bytes("F2"), equal_bytes(survival)

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        before, got, right = (_bytes(tensor) for tensor in (arguments[name], *received, *expected))
        if torch.equal(got, right):
            return None
        of_named = torch.where(right != before, got, right)
        rows = _HALF // max(1, right[:1].nbytes)
        return (
            here(arguments, (of_named[:rows],), (right[:rows],))
            or far(arguments, (of_named,), (right,))
            or survives(arguments, (got,), (right,))
        )

    return judge


def read(first_byte: Callable[[Arguments], torch.Tensor], *, law: str) -> Judge:
    """Of an operation whose results are rows read from a cache.

    ``first_byte`` gives the offset [n] at which each row begins in it; from 2³¹ on F2 breaks, not ``law``.
    """
    here, far = equal_bytes(law), equal_bytes("F2")

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        near = first_byte(arguments) < _HALF
        of_near = tuple(_where(near, got, right) for got, right in zip(received, expected, strict=True))
        return here(arguments, of_near, expected) or far(arguments, received, expected)

    return judge


def _where(rows: torch.Tensor, got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.view(-1, *[1] * (got.dim() - 1)), got, right)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, …, bytes]"""
    return tensor.contiguous().view(torch.uint8)
