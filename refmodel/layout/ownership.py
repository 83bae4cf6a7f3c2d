"""Who owns a page, and where a logical slot lies on its owner (laws O1, O2).

Logical page g is on rank g mod W, there as local page g div W: so for every cache and every layer, hence one
remap serves a whole forward. Logical pages 0 … W−1, local page 0 of each rank, are the dummy pages.

>>> owner(453 // 64, 4), local_page(453 // 64, 4), to_physical(torch.tensor([453, 512, -1]), 3, Grid(4, 64))
(3, 1, tensor([69, -1, -1]))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.plan import PADDING, Plan

NO_SLOT = -1
Pages = TypeVar("Pages", int, torch.Tensor)


def owner(pages: Pages, world_size: int) -> Pages:
    """Rank that stores a logical page (O1)."""
    return pages % world_size


def local_page(pages: Pages, world_size: int) -> Pages:
    """Index of a logical page in its owner's storage."""
    return pages // world_size


def logical_page(local: Pages, rank: Pages, world_size: int) -> Pages:
    """The inverse of :func:`owner` and :func:`local_page`."""
    return local * world_size + rank


def owned(slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    """Logical slots [n] → bool [n]: those whose owner is ``rank`` (O1). −1 is nobody's."""
    return (slots != NO_SLOT) & (owner(slots // grid.page_size, grid.world_size) == rank)


def to_physical(slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    """Logical slots [n] → physical slots [n] on ``rank``: −1 where another rank owns the slot (O2)."""
    pages = slots // grid.page_size
    physical = local_page(pages, grid.world_size) * grid.page_size + slots % grid.page_size
    return torch.where(owned(slots, rank, grid), physical, NO_SLOT)


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The logical pages of one request, by page position. Refuses dummy and duplicate pages."""

    pages: torch.Tensor  # [pages] int64
    grid: Grid
    request: str = ""  # for messages

    def __post_init__(self) -> None:
        pages, where = self.pages, Where(request=self.request or None)
        dummies = pages < self.grid.world_size
        if bool(dummies.any()):
            raise InvalidInput(
                "page table",
                expected=f"logical pages >= W = {self.grid.world_size}; lower ones are dummies",
                received=f"page {int(pages[dummies][0])} at position {int(dummies.nonzero()[0])}",
                where=where,
            )
        values, counts = pages.unique(return_counts=True)
        if len(values) != len(pages):
            raise InvalidInput(
                "page table",
                expected="each logical page once",
                received=f"page {int(values[counts > 1][0])} {int(counts.max())} times",
                where=where,
            )

    def require(self, valid: int) -> None:
        """:class:`InvalidInput` unless the table covers ``valid`` tokens."""
        needed = num_pages(valid, self.grid.page_size)
        if len(self.pages) < needed:
            raise InvalidInput(
                "page table",
                expected=f"at least {needed} pages for {valid} tokens",
                received=f"{len(self.pages)} pages",
                where=Where(request=self.request or None),
            )

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Logical slots [n] of positions [n] of the request."""
        P = self.grid.page_size
        if len(positions):
            lowest, highest = int(positions.min()), int(positions.max())
            if lowest < 0 or highest >= len(self.pages) * P:
                raise InvalidInput(
                    "position in a page table",
                    expected=f"0 … {len(self.pages) * P - 1}",
                    received=lowest if lowest < 0 else highest,
                    where=Where(request=self.request or None),
                )
        return self.pages[positions // P] * P + positions % P


def current_slots(plan: Plan, tables: Iterable[PageTable]) -> torch.Tensor:
    """Logical slot of every batch row [num_rows]: where the forward writes it.

    A padding row goes to the dummy page of the rank that computes it (S9).
    """
    real = [
        table.slots(torch.arange(extent.prefix, extent.end))
        for extent, table in zip(plan.extents, tables, strict=True)
    ]
    if not plan.padding:
        return torch.cat(real)
    padding_rows = (plan.request_of_row == PADDING).nonzero().flatten()
    dummy_page = plan.rank_of_row[padding_rows]
    return torch.cat([*real, dummy_page * plan.grid.page_size + padding_rows % plan.grid.page_size])


def check_slots(slots: torch.Tensor, num_slots: int, where: Where) -> None:
    """:class:`InvalidInput` if a physical slot is out of a shard's range. −1 is allowed."""
    outside = (slots < NO_SLOT) | (slots >= num_slots)
    if bool(outside.any()):
        raise InvalidInput(
            "physical slot",
            expected=f"−1 or 0 … {num_slots - 1}",
            received=int(slots[outside][0]),
            where=where,
            fix="A group-wide slot needs `to_physical` before it indexes one rank's storage.",
        )
