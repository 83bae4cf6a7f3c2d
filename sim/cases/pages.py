"""Logical pages for a run, drawn lane by lane in a scrambled order (V7)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import logical_page


class PagePool:
    """Free pages of every lane. Local page 0, the dummy, is never handed out."""

    def __init__(self, grid: Grid, local_pages: int, seed: int) -> None:
        self._grid = grid
        random = np.random.default_rng(seed)
        self._free = [list(1 + random.permutation(local_pages - 1)) for _ in range(grid.world_size)]

    def take(self, lanes: Iterable[int]) -> torch.Tensor:
        """One page from each lane named, in that order: logical pages, int64."""
        return torch.tensor([self._take(int(lane)) for lane in lanes], dtype=torch.int64)

    def _take(self, lane: int) -> int:
        if not self._free[lane]:
            raise InvalidInput(
                "page of a lane", expected="a free page", received="none left", where=Where(rank=lane)
            )
        return int(logical_page(self._free[lane].pop(), lane, self._grid.world_size))
