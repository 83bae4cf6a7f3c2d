"""Requests to transfer from the ranks of a prefill group to decode, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from properties.strategies import grids, near
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import logical_page
from refmodel.serving.receiver import Receiver, Registration
from refmodel.serving.transfer import Message, Sender


@dataclass(frozen=True, slots=True)
class Job:
    """One request to transfer: its pages on both sides, and the ends of its chunks in tokens."""

    grid: Grid
    pages: tuple[int, ...]  # logical pages by position
    decode_pages: tuple[int, ...]
    ends: tuple[int, ...]  # rising; the last is the request's

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def receiver(self) -> Receiver:
        P = self.grid.page_size
        return Receiver(Registration(7, self.tokens, self.decode_pages, P), self.grid)

    def senders(self) -> list[Sender]:
        return [Sender(7, rank, self.grid) for rank in range(self.grid.world_size)]

    def messages(self) -> list[Message]:
        """Those of all ranks, chunk by chunk."""
        senders = self.senders()
        return [
            sender.send(self.pages, end, is_last=end == self.tokens, written=end)
            for end in self.ends
            for sender in senders
        ]


@st.composite
def jobs(draw: st.DrawFn, *, max_pages: int = 9) -> Job:
    """Scattered pages on both sides; chunk ends around page multiples, often several inside one page."""
    grid = draw(grids(max_page=4))
    W, P = grid.world_size, grid.page_size
    tokens = draw(near([1, P, 2 * P, W * P], at_least=1) | st.integers(1, max_pages * P))
    cuts = draw(st.sets(st.integers(1, tokens), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    count = num_pages(tokens, P)
    lanes = torch.randint(W, (count,), generator=generator)
    local = 1 + torch.randperm(2 * count, generator=generator)[:count]
    decode = 1 + torch.randperm(2 * count, generator=generator)[:count]
    pages = logical_page(local, lanes, W)
    return Job(grid, tuple(pages.tolist()), tuple(decode.tolist()), (*sorted(cuts - {tokens}), tokens))


def refusal(call: Callable[..., object], *args: Any, **options: Any) -> InvalidInput | None:
    """The error that a call is refused with, or None."""
    try:
        call(*args, **options)
    except InvalidInput as error:
        return error
    return None
