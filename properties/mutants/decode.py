"""Wrong decode servers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.model import decoding
from refmodel.model.model import Model
from refmodel.storage.traffic import Shards
from sim.engine.decode_server import DecodeServer


@mutant(decoding.decode, "decode-forgets-what-came", "T5", "A5")
def only_its_own_rows(
    right: Right, model: Model, ids: torch.Tensor, slots: torch.Tensor, shards: Sequence[Shards]
) -> torch.Tensor:
    """Decode begins at position 0 with its own tokens: nobody reads the rows that were sent."""
    return right(model, ids, slots[-len(ids) :], shards)


@mutant(decoding.decode, "decode-writes-nothing", "T5", "A5")
def new_rows_go_to_the_dummy_page(
    right: Right, model: Model, ids: torch.Tensor, slots: torch.Tensor, shards: Sequence[Shards]
) -> torch.Tensor:
    """Rows of sampled tokens go to the dummy page: the first is right, and the next does not see it."""
    P = next(iter(shards[0].values())).grid.page_size
    new = torch.arange(len(ids), device=slots.device) % P
    return right(model, ids, torch.cat([slots[: -len(ids)], new]), shards)


@mutant(DecodeServer.leave, "opened-pages-leak", "L1")
def only_registered_pages_are_freed(
    right: Right, self: DecodeServer, name: str, pages: Collection[int]
) -> None:
    """A request that leaves decode gives back the pages that were made ready for it, not those it opened."""
    self._decodings.pop(name, None)
    right(self, name, pages)
