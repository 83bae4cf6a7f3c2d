"""Rank programs that several tests run. Workers import them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from refmodel.collectives import all_gather_rows


def who(group: dist.ProcessGroup) -> tuple[int, int, int, int]:
    return group.rank(), group.size(), dist.get_rank(), dist.get_world_size()


def rows_of_all(group: dist.ProcessGroup, counts: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of rank r hold the numbers r·16, r·16 + 1, …"""
    rank = group.rank()
    rows = (torch.arange(counts[rank] * 3) + 16 * rank).reshape(counts[rank], 3).to(dtype)
    return all_gather_rows(rows, counts, group=group, site="rows")


def gather_sites(
    group: dist.ProcessGroup,
    sites: Sequence[Sequence[str]],
    shape: Any = (2, 4),
    dtype: Any = torch.float32,
) -> int:
    """One all_gather for each of this rank's ``sites[rank]``; ``shape`` and ``dtype`` may be by rank."""
    rank = group.rank()
    shape = shape[rank] if isinstance(shape, list) else shape
    dtype = dtype[rank] if isinstance(dtype, list) else dtype
    for site in sites[rank]:
        counts = [shape[0]] * group.size()
        all_gather_rows(torch.zeros(shape, dtype=dtype), counts, group=group, site=site)
    return rank


def noted_order(group: dist.ProcessGroup, order: list[tuple[int, int]], steps: int) -> int:
    for step in range(steps):
        order.append((step, group.rank()))
        all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site=f"step {step}")
    return group.rank()


def one_raises(group: dist.ProcessGroup, culprit: int) -> None:
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="before")
    if group.rank() == culprit:
        raise ZeroDivisionError("of my own making")
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="after")


def one_stays_away(group: dist.ProcessGroup, culprit: int) -> None:
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="with all")
    if group.rank() != culprit:
        all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="without it")
