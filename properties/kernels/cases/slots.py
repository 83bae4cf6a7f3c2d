"""Cases of the operations on slots and pages in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.values import PAGE_SIZES, SEEDS, scrambled_pages, seeded
from properties.strategies import WORLD_SIZES
from refmodel.layout.geometry import coverage
from refmodel.ops.layout import (
    CURRENT_REUSE_REMAP,
    LOGICAL_TO_PHYSICAL,
    OWNER_MASK,
    TAIL_MASK,
    TRANSFER_PAIRS,
    VALIDATE_PAGE_GROUPS,
)
from refmodel.ops.op import Op

Ints = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Slots(Case):
    """Slots of some pages of all ranks, some of them −1."""

    world: int
    page: int
    rank: int
    slots: int  # how many
    none: int = 0  # every so many is −1; 0: none is

    def arguments(self) -> dict[str, Any]:
        slots = torch.randint(0, 8 * self.world * self.page, (self.slots,), generator=seeded(self.seed))
        if self.none:
            slots[:: self.none] = -1
        return {"slots": slots, "rank": self.rank, "world_size": self.world, "page_size": self.page}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=4, page=64, rank=3, slots=0)
        yield cls(world=4, page=64, rank=3, slots=1)
        yield cls(world=4, page=64, rank=3, slots=4, none=1)
        yield cls(world=3, page=2, rank=0, slots=20, none=5)
        yield cls(world=1, page=1, rank=0, slots=20, none=5)
        yield cls(world=8, page=64, rank=0, slots=5000, none=3)

    @classmethod
    def large(cls) -> Self:
        return cls(world=8, page=64, rank=0, slots=1 << 26, none=3)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.sampled_from(WORLD_SIZES).flatmap(
            lambda world: st.builds(
                cls,
                world=st.just(world),
                page=PAGE_SIZES,
                rank=st.integers(0, world - 1),
                slots=st.integers(0, 300),
                none=st.integers(0, 5),
                seed=SEEDS,
            )
        )


@dataclass(frozen=True, kw_only=True)
class LogicalToPhysical(_Slots):
    """Slots of some pages of all ranks, some of them −1."""

    op: ClassVar[Op] = LOGICAL_TO_PHYSICAL


@dataclass(frozen=True, kw_only=True)
class OwnerMask(_Slots):
    """Slots of some pages of all ranks, some of them −1."""

    op: ClassVar[Op] = OWNER_MASK


@dataclass(frozen=True, kw_only=True)
class TailMask(Case):
    """Requests of these lengths."""

    op: ClassVar[Op] = TAIL_MASK

    page: int
    valid: Ints

    def arguments(self) -> dict[str, Any]:
        num_slots = sum(coverage(tokens, self.page) for tokens in self.valid)
        return {"valid": torch.tensor(self.valid), "page_size": self.page, "num_slots": num_slots}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(page=64, valid=(0,))
        yield cls(page=64, valid=(1,))
        yield cls(page=64, valid=(64,))
        yield cls(page=64, valid=(63, 65))
        yield cls(page=2, valid=(1, 0, 3, 4))
        yield cls(page=1, valid=(1, 0, 3, 4))
        yield cls(page=64, valid=(16_383, 1, 128, 50_000))

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return PAGE_SIZES.flatmap(
            lambda page: st.builds(
                cls,
                page=st.just(page),
                valid=st.lists(st.integers(0, 3 * page + 1), min_size=1, max_size=4).map(tuple),
            )
        )


@dataclass(frozen=True, kw_only=True)
class CurrentReuseRemap(Case):
    """Slots of one request's pages, of as many pages of others, and some −1. Page ids are in no order."""

    op: ClassVar[Op] = CURRENT_REUSE_REMAP

    page: int
    pages: int  # of the request
    first: int
    stop: int
    first_row: int = 0
    slots: int = 0  # beside the slots at both ends of the span
    none: int = 0  # every so many is −1; 0: none is

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        ids = 1 + torch.randperm(2 * self.pages + 2, generator=generator)
        ends = (self.first - 1, self.first, self.stop - 1, self.stop)
        inside = [position for position in ends if 0 <= position < self.pages * self.page]
        others = torch.randint(0, self.page * len(ids), (self.slots,), generator=generator)
        at = torch.cat([torch.tensor(inside, dtype=torch.int64), others])
        slots = ids[at // self.page] * self.page + at % self.page
        if self.none:
            slots[:: self.none] = -1
        return {
            "slots": slots,
            "pages": ids[: self.pages],
            "first": self.first,
            "stop": self.stop,
            "first_row": self.first_row,
            "page_size": self.page,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(page=2, pages=0, first=0, stop=0, slots=3)
        yield cls(page=2, pages=1, first=0, stop=1)
        yield cls(page=2, pages=3, first=3, stop=5, slots=12, none=5)
        yield cls(page=1, pages=3, first=0, stop=3, first_row=2, slots=9, none=4)
        yield cls(page=64, pages=6, first=70, stop=370, first_row=1, slots=200, none=9)  # current rows
        yield cls(page=64, pages=6, first=0, stop=70, slots=200, none=7)  # history
        yield cls(page=64, pages=129, first=0, stop=8205, first_row=40_000, slots=2048, none=5)  # all

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        def spans(page: int, pages: int) -> st.SearchStrategy[Self]:
            ends = st.tuples(*[st.integers(0, page * pages)] * 2).map(sorted)
            return st.builds(
                lambda ends, **others: cls(page=page, pages=pages, first=ends[0], stop=ends[1], **others),
                ends,
                first_row=st.integers(0, 9),
                slots=st.integers(0, 40),
                none=st.integers(0, 5),
                seed=SEEDS,
            )

        return st.tuples(PAGE_SIZES, st.integers(0, 6)).flatmap(lambda sizes: spans(*sizes))


@dataclass(frozen=True, kw_only=True)
class TransferPairs(Case):
    """Pages of a request, from any lanes and in no order."""

    op: ClassVar[Op] = TRANSFER_PAIRS

    world: int
    rank: int
    pages: int
    first_position: int = 0

    def arguments(self) -> dict[str, Any]:
        local_pages = 3 + self.pages // self.world
        lanes = range(self.world)
        pages = scrambled_pages(self.pages, lanes, self.world, local_pages, seeded(self.seed))
        return {
            "pages": pages,
            "first_position": self.first_position,
            "rank": self.rank,
            "world_size": self.world,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=4, rank=0, pages=0)
        yield cls(world=1, rank=0, pages=2)
        for rank in range(4):  # one page: three of four ranks have none
            yield cls(world=4, rank=rank, pages=1, first_position=7)
        for rank in range(2):
            yield cls(world=2, rank=rank, pages=5)
        yield cls(world=8, rank=5, pages=2048, first_position=300)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.sampled_from(WORLD_SIZES).flatmap(
            lambda world: st.builds(
                cls,
                world=st.just(world),
                rank=st.integers(0, world - 1),
                pages=st.integers(0, 30),
                first_position=st.integers(0, 100),
                seed=SEEDS,
            )
        )


FAULTS = (
    *("shifted", "torn", "reversed", "inside", "interleaved", "negative", "repeated"),  # of one group
    *("short", "long", "fewer"),  # of a side
)
SIDES = ("host", "device")


@dataclass(frozen=True, kw_only=True)
class ValidatePageGroups(Case):
    """Pages of both sides in no order, and one fault on one side, or none."""

    op: ClassVar[Op] = VALIDATE_PAGE_GROUPS

    page: int
    groups: int
    fault: str = ""  # one of FAULTS, or none
    side: str = "host"  # which has it
    at: int = 0  # group that has it

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        sides = {}
        for side in SIDES:
            ids = torch.randperm(2 * self.groups + 1, generator=generator)[: self.groups]
            slots = ids[:, None] * self.page + torch.arange(self.page)
            faulty = self.fault and side == self.side and self.groups
            sides[side] = _with_fault(slots, self.fault, self.at % self.groups) if faulty else slots.flatten()
        return {**sides, "page_size": self.page}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(page=64, groups=0)
        yield cls(page=64, groups=1)
        for fault, side in product(FAULTS, SIDES):
            yield cls(page=64, groups=2, fault=fault, side=side, at=1)
        yield cls(page=1, groups=3)
        yield cls(page=1, groups=3, fault="repeated", at=2)
        yield cls(page=64, groups=256)
        yield cls(page=64, groups=256, fault="torn", side="device", at=255)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            cls,
            page=PAGE_SIZES,
            groups=st.integers(0, 5),
            fault=st.sampled_from(["", *FAULTS]),
            side=st.sampled_from(SIDES),
            at=st.integers(0, 4),
            seed=SEEDS,
        )


def _with_fault(pages: torch.Tensor, fault: str, at: int) -> torch.Tensor:
    """Slots of pages [groups, P] → [n] with a fault, in group ``at`` if it is one of a group."""
    other = at - 1  # of one group: itself
    groups = pages.clone()
    if fault == "shifted":
        groups[at] += 1
    elif fault == "torn":
        groups[at, -1] += 1
    elif fault == "reversed":
        groups[at] = pages[at].flip(0)
    elif fault == "inside":
        groups[at, 1:-1] = pages[at, 1:-1].flip(0)
    elif fault == "interleaved":
        groups[at, 1::2], groups[other, 1::2] = pages[other, 1::2], pages[at, 1::2]
    elif fault == "negative":
        groups[at] -= pages[at, 0] + pages.shape[1]
    elif fault == "repeated":
        groups[at] = pages[other]
    slots = groups.flatten()
    if fault == "short":
        return slots[:-1]
    if fault == "long":
        return torch.cat([slots, slots[-1:] + 1])
    return slots[: -pages.shape[1]] if fault == "fewer" else slots
