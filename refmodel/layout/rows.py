"""Uneven rows in even buffers: what lets ranks with few rows, or none, take part in one collective (S4).

>>> padded = [pad_rows(torch.tensor(rows), buffer_rows([1, 3])) for rows in ([7], [4, 5, 6])]
>>> padded[0].tolist(), trim_rows(torch.cat(padded), [1, 3]).tolist()
([7, -1, -1], [7, 4, 5, 6])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def buffer_rows(counts: Sequence[int]) -> int:
    """Rows of every rank's buffer: the longest rank's. The average, ceil(n / W), is too small (S4)."""
    return max(counts)


def pad_rows(rows: torch.Tensor, length: int) -> torch.Tensor:
    """[rows, …] → [length, …]. Padding is all-ones bytes: NaN in floats, −1 in integers, so a leak shows."""
    if rows.shape[0] == length:
        return rows.contiguous()
    padded = rows.new_empty((length, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    padded[rows.shape[0] :].view(torch.uint8).fill_(255)
    return padded


def buffer_places(counts: Sequence[int]) -> torch.Tensor:
    """[sum(counts)] where the rows of rank 0, then of rank 1, … lie in the buffers of all ranks.

    >>> buffer_places([1, 0, 3]).tolist()
    [0, 6, 7, 8]
    """
    length = buffer_rows(counts)
    return torch.cat([torch.arange(count) + rank * length for rank, count in enumerate(counts)])


def trim_rows(gathered: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Buffers of all ranks [W × length, …] → the real rows [sum(counts), …] of rank 0, then rank 1, …"""
    buffers = gathered.unflatten(0, (len(counts), gathered.shape[0] // len(counts)))
    return torch.cat([buffer[:count] for buffer, count in zip(buffers, counts, strict=True)])
