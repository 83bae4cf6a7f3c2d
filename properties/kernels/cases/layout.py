"""Cases of the operations in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from refmodel.ops.layout import LOGICAL_TO_PHYSICAL
from refmodel.ops.op import Op


@dataclass(frozen=True, kw_only=True)
class LogicalToPhysical(Case):
    """Slots of some pages of all ranks, some of them −1."""

    op: ClassVar[Op] = LOGICAL_TO_PHYSICAL

    world: int
    page: int
    rank: int
    slots: int  # how many
    none: int = 0  # every so many is −1; 0: none is

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        slots = torch.randint(0, 8 * self.world * self.page, (self.slots,), generator=generator)
        if self.none:
            slots[:: self.none] = -1
        return {"slots": slots, "rank": self.rank, "world_size": self.world, "page_size": self.page}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=4, page=64, rank=3, slots=0)
        yield cls(world=4, page=64, rank=3, slots=1)
        yield cls(world=4, page=64, rank=3, slots=4, none=1)
        yield cls(world=8, page=64, rank=0, slots=5000, none=3)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.integers(1, 8).flatmap(
            lambda world: st.builds(
                cls,
                world=st.just(world),
                page=st.sampled_from([64, 1, 2, 3, 16]),
                rank=st.integers(0, world - 1),
                slots=st.integers(0, 300),
                none=st.integers(0, 5),
                seed=st.integers(0, 2**16),
            )
        )
