"""From positions in a request to what the attention kernel reads: slots or rows (law A3).

Top-k counts from each row's own ks. PAGED looks its positions up in the page table of the row's request, and
needs to know only where in the half the rows of each request begin. RAGGED adds the first row of the request
in the flattened K, one number a row; with one request that is zero for all rows.

Rows 0 and 1 belong to request 0, row 2 to request 1, row 3 is padding:

>>> chosen = torch.tensor([[0, -1], [0, 5], [2, 0], [-1, -1]])
>>> tables = torch.tensor([7, 9]), torch.tensor([4])
>>> addressing = Addressing((0, 2, 3), num_rows=4, key_starts=(0, 6), tables=tables, page_size=4)
>>> addressing.transform(chosen, Transform.PAGED).tolist()
[[28, -1], [28, 37], [18, 16], [-1, -1]]
>>> "row_starts" in vars(addressing)
False
>>> addressing.transform(chosen, Transform.RAGGED).tolist()
[[0, -1], [0, 5], [8, 6], [-1, -1]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import torch

from refmodel.attention.topk import NO_KEY
from refmodel.errors import InvalidInput
from refmodel.layout.ownership import NO_SLOT, PageTable
from refmodel.layout.plan import Half, Plan


class Transform(Enum):
    """What positions become."""

    PAGED = "paged"  # logical slots
    RAGGED = "ragged"  # rows of the batch's flattened K


def to_slots(
    positions: torch.Tensor, tables: Sequence[torch.Tensor], page_size: int, cu_seqlens_q: Sequence[int]
) -> torch.Tensor:
    """positions [rows, k] → logical slots [rows, k]; −1 stays (A3).

    ``tables``: the logical pages of each request. Row r belongs to request i where
    ``cu_seqlens_q[i]`` ≤ r < ``cu_seqlens_q[i + 1]``; the rows behind the last are padding and get −1.
    """
    return _by_request(lambda found, pages: _slots(found, pages, page_size), positions, tables, cu_seqlens_q)


def positions_of_slots(
    slots: torch.Tensor, tables: Sequence[torch.Tensor], page_size: int, cu_seqlens_q: Sequence[int]
) -> torch.Tensor:
    """Undoes :func:`to_slots`. −1 also for the slots of pages that the row's request does not have."""
    return _by_request(lambda found, pages: _positions(found, pages, page_size), slots, tables, cu_seqlens_q)


def to_rows(positions: torch.Tensor, row_starts: torch.Tensor) -> torch.Tensor:
    """positions [rows, k] → rows [rows, k] of the flattened K; −1 stays (A3).

    ``row_starts`` [rows] int64: where the request of each row begins in the flattened K.
    """
    return torch.where(positions == NO_KEY, NO_KEY, positions + row_starts[:, None])


def positions_of_rows(rows: torch.Tensor, row_starts: torch.Tensor) -> torch.Tensor:
    """Undoes :func:`to_rows`."""
    return torch.where(rows == NO_KEY, NO_KEY, rows - row_starts[:, None])


def _by_request(
    look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    indices: torch.Tensor,
    tables: Sequence[torch.Tensor],
    cu_seqlens_q: Sequence[int],
) -> torch.Tensor:
    found = torch.full_like(indices, NO_SLOT)
    for pages, (start, stop) in zip(tables, pairwise(cu_seqlens_q), strict=True):
        if len(pages):  # by length: nothing can be looked up in an empty table
            found[start:stop] = look_up(indices[start:stop], pages)
    return found


def _slots(positions: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    slots = pages[positions.clamp(min=0) // page_size] * page_size + positions % page_size
    return torch.where(positions == NO_KEY, NO_SLOT, slots)


def _positions(slots: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    by_page = torch.argsort(pages)
    found = torch.searchsorted(pages[by_page], slots // page_size).clamp(max=len(pages) - 1)
    page_position = by_page[found]
    is_known = pages[page_position] == slots // page_size
    return torch.where(is_known, page_position * page_size + slots % page_size, NO_KEY)


@dataclass(frozen=True, eq=False)
class Addressing:
    """How the rows of one half address keys: metadata of a forward, for all its layers."""

    cu_seqlens_q: tuple[int, ...]  # [requests + 1] first row of each request in the half
    num_rows: int  # of the half; those behind the last of cu_seqlens_q are padding
    key_starts: tuple[int, ...]  # [requests] first row of each request in the flattened K
    tables: tuple[torch.Tensor, ...]  # [requests] logical pages [pages], on the device of the positions
    page_size: int

    def __post_init__(self) -> None:
        spans = (0, *self.cu_seqlens_q, self.num_rows)
        requests = len(self.tables)
        if (len(self.cu_seqlens_q), len(self.key_starts)) != (requests + 1, requests):
            raise InvalidInput(
                "addressing",
                expected=f"{requests + 1} of cu_seqlens_q and {requests} key starts, for {requests} tables",
                received=f"{len(self.cu_seqlens_q)} and {len(self.key_starts)}",
            )
        if self.cu_seqlens_q[0] != 0 or any(a > b for a, b in pairwise(spans)):
            raise InvalidInput(
                "cu_seqlens_q",
                expected=f"0 first, ascending, at most {self.num_rows}",
                received=self.cu_seqlens_q,
            )

    @cached_property
    def row_starts(self) -> torch.Tensor:
        """[num_rows] int64: first row of each row's request in the flattened K, 0 for padding.

        Only RAGGED may ask for it: PAGED has no use for it, and it costs memory and time (A3).
        """
        counts = [b - a for a, b in pairwise((*self.cu_seqlens_q, self.num_rows))]
        # Filled where it is needed: a copy to the device would be waited for.
        device = self.tables[0].device
        starts = zip((*self.key_starts, 0), counts, strict=True)
        return torch.cat([torch.full((n,), start, device=device) for start, n in starts])

    def transform(self, positions: torch.Tensor, into: Transform) -> torch.Tensor:
        """Chosen positions [num_rows, k] → slots or rows [num_rows, k] (A3)."""
        if into is Transform.PAGED:
            return to_slots(positions, self.tables, self.page_size, self.cu_seqlens_q)
        return to_rows(positions, self.row_starts)

    def undo(self, indices: torch.Tensor, made: Transform) -> torch.Tensor:
        """The inverse of :meth:`transform`: both choose the same tokens (A3)."""
        if made is Transform.PAGED:
            return positions_of_slots(indices, self.tables, self.page_size, self.cu_seqlens_q)
        return positions_of_rows(indices, self.row_starts)


def addressing(
    plan: Plan, half: Half, tables: Sequence[PageTable], *, device: torch.device | None = None
) -> Addressing:
    """The addressing of one half of a rank's rows; page tables go to ``device``, default the CPU."""
    # Rows of a half are in batch order with any split, so those of a request are contiguous.
    cu_seqlens_q = torch.searchsorted(half.rows[: half.valid_rows], torch.tensor(plan.row_starts))
    return Addressing(
        cu_seqlens_q=tuple(cu_seqlens_q.tolist()),
        num_rows=len(half.rows),
        key_starts=plan.key_starts[:-1],
        tables=tuple(table.pages.to(device or "cpu") for table in tables),
        page_size=plan.grid.page_size,
    )
