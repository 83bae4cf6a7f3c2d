"""One rank's storage of one cache (law O3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid, check_in_range
from refmodel.layout.ownership import check_slots
from refmodel.storage.formats import RowFormat


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The pages one rank owns, of one cache in one layer. Local page 0 is the rank's dummy page.

    The value is fixed, the bytes in ``rows`` are not: this is the cache itself.
    """

    grid: Grid
    rank: int
    format: RowFormat
    rows: torch.Tensor  # [local pages × P, width]

    def __post_init__(self) -> None:
        check_in_range(self.rank, self.grid.world_size, "rank of a shard", Where(rank=self.rank))

    @property
    def num_slots(self) -> int:
        return self.rows.shape[0]

    def write(self, physical: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [n, width] at physical slots [n]; −1 means that another rank owns the slot (O3).

        ``physical`` comes from ``to_physical``, once a forward. :class:`InvalidInput`, and nothing written,
        when a slot is out of range or the numbers differ.
        """
        where = Where(rank=self.rank)
        if len(physical) != len(rows):
            raise InvalidInput(
                "rows to write", expected=f"{len(physical)}, one a slot", received=len(rows), where=where
            )
        check_slots(physical, self.num_slots, where)
        mine = physical >= 0
        self.rows[physical[mine]] = rows[mine]

    def pages(self, local_pages: torch.Tensor) -> torch.Tensor:
        """Whole pages [n, P, width], slots past the valid length included."""
        num_pages = self.num_slots // self.grid.page_size
        outside = (local_pages < 0) | (local_pages >= num_pages)
        if bool(outside.any()):
            raise InvalidInput(
                "local page",
                expected=f"0 … {num_pages - 1}",
                received=int(local_pages[outside][0]),
                where=Where(rank=self.rank),
            )
        paged = self.rows.view(num_pages, self.grid.page_size, -1)
        return paged[local_pages]


def empty_shard(
    grid: Grid,
    rank: int,
    row_format: RowFormat,
    local_pages: int,
    *,
    poison: float | int | None = None,
    device: torch.device | None = None,
) -> Shard:
    """A shard of ``local_pages`` pages, dummy included; every slot is poison. Default device: the CPU."""
    rows = row_format.poison_rows(local_pages * grid.page_size, poison)
    return Shard(grid, rank, row_format, rows.to(device or "cpu"))
