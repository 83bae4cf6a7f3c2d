"""The replicated baseline: one rank, all pages, addressed by logical slot. What V1 compares with.

It shares no code with the sharded path: no owner, no remap, no pages of bytes, no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from refmodel.storage.formats import Format


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A cache that holds every logical page."""

    page_size: int
    rows: torch.Tensor  # uint8 [logical pages × P, bytes a token]

    def write(self, pages: torch.Tensor, first_position: int, packed: torch.Tensor) -> None:
        """Write packed rows of one request at positions first_position, first_position + 1, …"""
        positions = torch.arange(first_position, first_position + len(packed))
        self.rows[self._slots(pages, positions)] = packed

    def view(self, requests: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """[sum(valid), bytes a token] rows of requests (pages, valid tokens), in position order."""
        slots = [self._slots(pages, torch.arange(valid)) for pages, valid in requests]
        return self.rows[torch.cat(slots)]

    def _slots(self, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        page = pages[torch.div(positions, self.page_size, rounding_mode="floor")]
        return page * self.page_size + torch.remainder(positions, self.page_size)


def empty_replica(page_size: int, row_format: Format, logical_pages: int) -> Replica:
    """A replica of ``logical_pages`` pages in which every byte is poison."""
    rows, width = logical_pages * page_size, row_format.bytes_per_token
    return Replica(page_size, row_format.poison_bytes(rows * width).view(rows, width))
