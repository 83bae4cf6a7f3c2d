"""How bytes in a cache are judged: each where its format puts it, the rest unchanged (laws F1, F2, O3).

Where bytes beyond 2³¹ are missing, F2 breaks: what else a kernel does wrong shows in small caches, which come
first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from refmodel.errors import Finding
from refmodel.ops.judges import equal_bytes
from refmodel.ops.op import Arguments, Judge, Results
from refmodel.storage.codecs import as_bytes

_REACH = 2**31  # bytes that offsets of 32 bits with a sign can name


def written(name: str, *, law: str, survival: str) -> Judge:
    """Of an operation that only writes into its argument ``name``.

    ``law`` breaks where what it should write is not there, ``survival`` where anything else is not as it was.
    """

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        before, got, right = (_bytes(tensor) for tensor in (arguments[name], *received, *expected))
        if torch.equal(got, right):
            return None
        # Of a cache of gigabytes only what differs is looked at closely.
        rows = (got != right).any(1).nonzero()[:, 0]
        before, got, right = before[rows], got[rows], right[rows]
        wrong = got != right
        missing = wrong & (right != before)
        far = missing & ((rows + 1) * right.shape[1] > _REACH)[:, None]
        broken, where = next(
            (law_id, mask)
            for law_id, mask in (("F2", far), (law, missing), (survival, wrong))
            if bool(mask.any())
        )
        row, byte = where.nonzero()[0].tolist()
        return Finding(
            broken,
            f"{name}, {int(where.any(1).sum())} rows, first byte {byte} of row {int(rows[row])}",
            str(int(right[row, byte])),
            str(int(got[row, byte])),
        )

    return judge


def read(end_byte: Callable[[Arguments], torch.Tensor], *, law: str) -> Judge:
    """Of an operation whose results are rows read from a cache: ``end_byte`` [n] is where each ends in it."""
    here, far = equal_bytes(law), equal_bytes("F2")

    def judge(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
        near = end_byte(arguments) <= _REACH
        of_far = tuple(_where(near, right, got) for got, right in zip(received, expected, strict=True))
        return far(arguments, of_far, expected) or here(arguments, received, expected)

    return judge


def _where(rows: torch.Tensor, these: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Rows [n, …] of one or the other."""
    return torch.where(rows.view(-1, *[1] * (these.dim() - 1)), these, others)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes]"""
    return as_bytes(tensor).flatten(1)
