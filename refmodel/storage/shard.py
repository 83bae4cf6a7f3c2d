"""One rank's storage of one cache (law O3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid, check_in_range
from refmodel.layout.ownership import check_slots
from refmodel.storage.formats import Format
from refmodel.storage.pages import rows_of_pages, words, write_rows


@dataclass(frozen=True, slots=True, eq=False)
class Destinations:
    """Which of the rows given go where in a shard. Index tensors on the shard's device."""

    rows: torch.Tensor  # [m] of the rows given
    slots: torch.Tensor  # [m] physical slots


def destinations(
    physical: torch.Tensor, num_slots: int, rank: int, *, device: torch.device | None = None
) -> Destinations:
    """Physical slots [n] of n rows on a rank; −1 means that another rank owns the slot (O3).

    ``physical`` comes from ``to_physical``, on the CPU, once a forward. :class:`InvalidInput` when a slot is
    out of the shard's range: then nothing is ever written.
    """
    check_slots(physical, num_slots, Where(rank=rank))
    mine = (physical >= 0).nonzero().flatten()
    where = device or torch.device("cpu")
    return Destinations(mine.to(where), physical[mine].to(where))


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The pages one rank owns, of one cache in one layer. Local page 0 is the rank's dummy page.

    The value is fixed, the bytes in ``pages`` are not: this is the cache itself.
    """

    grid: Grid
    rank: int
    format: Format
    pages: torch.Tensor  # uint8 [local pages, page bytes]

    def __post_init__(self) -> None:
        check_in_range(self.rank, self.grid.world_size, "rank of a shard", Where(rank=self.rank))

    @property
    def num_slots(self) -> int:
        return self.pages.shape[0] * self.grid.page_size

    @property
    def rows(self) -> torch.Tensor:
        """[local pages × P, bytes a token]: the packed row of every slot."""
        return rows_of_pages(self.pages, self.format)

    def write(self, to: Destinations, packed: torch.Tensor) -> None:
        """Write packed rows [n, bytes a token] of which some are this rank's (O3)."""
        if packed.shape[1] != self.format.bytes_per_token:
            raise InvalidInput(
                f"rows for a cache in format {self.format.name}",
                expected=f"{self.format.bytes_per_token} bytes a token",
                received=packed.shape[1],
                where=Where(rank=self.rank),
            )
        mine = words(packed)[to.rows].view(torch.uint8)
        write_rows(self.pages, to.slots, mine, self.format)

    def take(self, local_pages: torch.Tensor) -> torch.Tensor:
        """Whole pages [n, page bytes], slots past the valid length included."""
        return words(self.pages)[local_pages].view(torch.uint8)


def empty_shard(
    grid: Grid,
    rank: int,
    row_format: Format,
    local_pages: int,
    *,
    poison: int | None = None,
    device: torch.device | None = None,
) -> Shard:
    """A shard of ``local_pages`` pages, dummy included; every byte is poison. Default device: the CPU."""
    where = device or torch.device("cpu")
    row_format.require(where)
    page_bytes = row_format.page_bytes(grid.page_size)
    fresh = row_format.poison_bytes(1, poison).to(where)
    return Shard(grid, rank, row_format, fresh.expand(local_pages, page_bytes).clone())
