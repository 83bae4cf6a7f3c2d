"""Cases of the operations in :mod:`refmodel.ops.storage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case, FieldsCase
from properties.kernels.cases.values import (
    PAGE_SIZES,
    POISON,
    SEEDS,
    TYPES,
    drawn,
    poisoned,
    scrambled_pages,
    seeded,
)
from properties.strategies import grids
from refmodel.layout.geometry import Grid, num_pages
from refmodel.ops.op import Op
from refmodel.ops.storage import INDEX_READ, INDEX_WRITE, MATERIALIZE, MLA_READ, MLA_WRITE

Ints = tuple[int, ...]

# Beyond these, byte offsets need more than 32 bits, in a quarter of what there is.
_HUGE_SLOTS = 2**31 // 1152 * 5 // 4
_HUGE_PAGES = 2**31 // 8448 * 5 // 4


@dataclass(frozen=True, kw_only=True)
class Materialize(FieldsCase):
    """Pages in no order; poison on pages of nobody, in tails, in dummy pages."""

    op: ClassVar[Op] = MATERIALIZE

    world: int
    page: int
    valid: Ints
    lanes: int = 0  # ranks that have pages, the last so many; 0: all
    behind: int = 0  # columns of the page table beyond the longest request's
    local_pages: int = 0  # of every rank; 0: a few more than needed

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        counts = [num_pages(tokens, self.page) for tokens in self.valid]
        lanes = range(self.world - (self.lanes or self.world), self.world)
        local_pages = self.local_pages or 2 + -(-sum(counts) // len(lanes))
        pages = scrambled_pages(sum(counts), lanes, self.world, local_pages, generator)
        table = torch.full((len(counts), max(counts) + self.behind), -1)
        for row, mine in zip(table, pages.split(counts), strict=True):
            row[: len(mine)] = mine
        width = self.page * sum(self.fields)
        shards = torch.full((self.world, local_pages, width), POISON, dtype=torch.uint8)
        shards[pages % self.world, pages // self.world] = self._contents(counts, generator)
        return {
            "shards": shards,
            "page_table": table,
            "valid": self.valid,
            "page_size": self.page,
            "fields": self.fields,
        }

    def _contents(self, counts: list[int], generator: torch.Generator) -> torch.Tensor:
        """[pages, page bytes]"""
        rows = drawn((sum(counts), self.page, sum(self.fields)), torch.uint8, generator)
        first = 0
        for count, tokens in zip(counts, self.valid, strict=True):
            rows[first : first + count].flatten(0, 1)[tokens:] = POISON
            first += count
        return torch.cat([field.flatten(1) for field in rows.split(self.fields, 2)], 1)

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=2, page=2, valid=(0,), fields=(4,))
        yield cls(world=2, page=2, valid=(1,), fields=(4,))
        yield cls(world=2, page=2, valid=(4,), fields=(2, 4))
        yield cls(world=3, page=4, valid=(5, 1, 9), fields=(2, 4), behind=1)
        yield cls(world=4, page=64, valid=(250, 70), fields=(1152,), lanes=2)  # two ranks have none
        yield cls(world=4, page=64, valid=(250, 70), fields=(656,), behind=3)
        yield cls(world=8, page=64, valid=(8205, 63), fields=(128, 4))

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        def on(grid: Grid) -> st.SearchStrategy[Self]:
            tokens = st.integers(0, 5 * grid.page_size)
            return st.builds(
                cls,
                world=st.just(grid.world_size),
                page=st.just(grid.page_size),
                valid=st.lists(tokens, min_size=1, max_size=4).map(tuple),
                fields=st.sampled_from([(8,), (2, 4), (5, 4), (128, 4), (656,), (1152,)]),
                lanes=st.integers(0, grid.world_size),
                behind=st.integers(0, 2),
                seed=SEEDS,
            )

        return grids().flatmap(on)

    @classmethod
    def large(cls) -> Self:
        return cls(world=8, page=64, valid=(131_072 - 5,), fields=(1152,))

    @classmethod
    def huge(cls) -> Self:
        return cls(world=2, page=64, valid=(6400, 1000), fields=(128, 4), local_pages=_HUGE_PAGES // 2)


_MLA_SHAPES = st.sampled_from(
    [(4, "bf16"), (8, "uint8"), (3, "bf16"), (5, "uint8"), (576, "bf16"), (656, "uint8")]
)


def _others(kind: type[Case]) -> dict[str, st.SearchStrategy[int]]:
    """Of what writes: how often a row is another rank's."""
    return {"none": st.integers(0, 5)} if hasattr(kind, "none") else {}


@dataclass(frozen=True, kw_only=True)
class _Mla(Case):
    """Slots of a cache, some of them in use."""

    num_slots: int
    rows: int  # at most as many as slots
    width: int
    dtype: str = "bf16"

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            lambda shape, **others: cls(width=shape[0], dtype=shape[1], **others),
            _MLA_SHAPES,
            num_slots=st.integers(1, 200),
            rows=st.integers(0, 40),
            seed=SEEDS,
            **_others(cls),
        )

    @classmethod
    def large(cls) -> Self:
        return cls(num_slots=1 << 18, rows=1 << 17, width=576)


@dataclass(frozen=True, kw_only=True)
class MlaWrite(_Mla):
    """Rows for some slots; every other slot must survive."""

    op: ClassVar[Op] = MLA_WRITE

    none: int = 0  # every so many rows is another rank's; 0: none is

    def arguments(self) -> dict[str, Any]:
        generator, dtype = seeded(self.seed), TYPES[self.dtype]
        slots = torch.randperm(self.num_slots, generator=generator)[: self.rows]
        if self.none:
            slots[:: self.none] = -1
        return {
            "cache": drawn((self.num_slots, self.width), dtype, generator),
            "slots": slots,
            "rows": drawn((len(slots), self.width), dtype, generator),
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(num_slots=3, rows=0, width=4)
        yield cls(num_slots=3, rows=1, width=4)
        yield cls(num_slots=3, rows=2, width=4, none=1)
        yield cls(num_slots=128, rows=30, width=576, none=4)
        yield cls(num_slots=128, rows=30, width=656, dtype="uint8", none=4)
        yield cls(num_slots=128, rows=128, width=576)
        yield cls(num_slots=2048, rows=1000, width=656, dtype="uint8", none=2)

    @classmethod
    def huge(cls) -> Self:
        return cls(num_slots=_HUGE_SLOTS, rows=4096, width=576, none=3)


@dataclass(frozen=True, kw_only=True)
class MlaRead(_Mla):
    """Some slots, in no order, a few more than once; poison in all others."""

    op: ClassVar[Op] = MLA_READ

    def arguments(self) -> dict[str, Any]:
        generator, dtype = seeded(self.seed), TYPES[self.dtype]
        slots = torch.randint(0, self.num_slots, (self.rows,), generator=generator)
        cache = poisoned((self.num_slots, self.width), dtype)
        cache[slots] = drawn((self.rows, self.width), dtype, generator)
        return {"cache": cache, "slots": slots}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(num_slots=3, rows=0, width=4)
        yield cls(num_slots=3, rows=1, width=4)
        yield cls(num_slots=9, rows=20, width=4)
        yield cls(num_slots=128, rows=70, width=576)
        yield cls(num_slots=128, rows=70, width=656, dtype="uint8")
        yield cls(num_slots=2048, rows=1000, width=576)

    @classmethod
    def huge(cls) -> Self:
        return cls(num_slots=_HUGE_SLOTS, rows=4096, width=576)


@dataclass(frozen=True, kw_only=True)
class _Index(Case):
    """Pages of index keys."""

    page: int
    local_pages: int
    rows: int
    dim: int

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            cls,
            page=PAGE_SIZES,
            local_pages=st.integers(1, 5),
            rows=st.integers(0, 40),
            dim=st.sampled_from([4, 8, 128]),
            seed=SEEDS,
            **_others(cls),
        )

    @classmethod
    def large(cls) -> Self:
        return cls(page=64, local_pages=1 << 14, rows=1 << 19, dim=128)


@dataclass(frozen=True, kw_only=True)
class IndexWrite(_Index):
    """Keys and scales for some slots; every other byte must survive."""

    op: ClassVar[Op] = INDEX_WRITE

    none: int = 0  # every so many rows is another rank's; 0: none is

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        slots = torch.randperm(self.local_pages * self.page, generator=generator)[: self.rows]
        if self.none:
            slots[:: self.none] = -1
        return {
            "pages": drawn((self.local_pages, self.page * (self.dim + 4)), torch.uint8, generator),
            "slots": slots,
            "keys": drawn((len(slots), self.dim), torch.uint8, generator),
            "scales": drawn((len(slots),), torch.float32, generator).abs(),
            "page_size": self.page,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(page=2, local_pages=1, rows=0, dim=4)
        yield cls(page=2, local_pages=1, rows=1, dim=4)
        yield cls(page=2, local_pages=2, rows=3, dim=4, none=1)
        yield cls(page=3, local_pages=3, rows=5, dim=4, none=4)
        yield cls(page=1, local_pages=9, rows=5, dim=8, none=4)
        yield cls(page=64, local_pages=3, rows=100, dim=128, none=3)
        yield cls(page=64, local_pages=40, rows=1000, dim=128)

    @classmethod
    def huge(cls) -> Self:
        return cls(page=64, local_pages=_HUGE_PAGES, rows=4096, dim=128, none=3)


@dataclass(frozen=True, kw_only=True)
class IndexRead(_Index):
    """Some slots, in no order, a few more than once; poison in all others."""

    op: ClassVar[Op] = INDEX_READ

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        slots = torch.randint(0, self.local_pages * self.page, (self.rows,), generator=generator)
        pages = torch.full((self.local_pages, self.page * (self.dim + 4)), POISON, dtype=torch.uint8)
        page, offset = slots // self.page, slots % self.page
        keys, scales = pages.split((self.page * self.dim, self.page * 4), 1)
        keys.unflatten(1, (self.page, self.dim))[page, offset] = drawn(
            (self.rows, self.dim), torch.uint8, generator
        )
        numbers = drawn((self.rows, 1), torch.float32, generator).abs()
        scales.unflatten(1, (self.page, 4))[page, offset] = numbers.view(torch.uint8)
        return {"pages": pages, "slots": slots, "page_size": self.page}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(page=2, local_pages=1, rows=0, dim=4)
        yield cls(page=2, local_pages=1, rows=1, dim=4)
        yield cls(page=3, local_pages=3, rows=20, dim=4)
        yield cls(page=1, local_pages=9, rows=5, dim=8)
        yield cls(page=64, local_pages=3, rows=100, dim=128)
        yield cls(page=64, local_pages=40, rows=2048, dim=128)

    @classmethod
    def huge(cls) -> Self:
        return cls(page=64, local_pages=_HUGE_PAGES, rows=4096, dim=128)
