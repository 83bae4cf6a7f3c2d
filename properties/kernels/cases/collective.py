"""Cases of the operations in :mod:`refmodel.ops.collective`: what each rank brings to one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case, FieldsCase
from properties.kernels.cases.values import POISON, filled, poisoned
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid, at_least, coverage, num_pages
from refmodel.layout.ownership import local_page, logical_page, owner
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.ops.collective import GATHER_MATERIALIZE, GATHER_RERANGE
from refmodel.ops.op import Op

_WORLDS = (2, 3, 4, 1, 5, 8)
_PAGES = (1, 2, 3, 4, 16, 64)


@dataclass(frozen=True, kw_only=True)
class AcrossCase(Case):
    """A case of a collective operation: arguments by rank, without the group, which a world gives."""

    world: int  # ranks

    @abstractmethod
    def arguments_of(self, rank: int) -> dict[str, Any]:
        """What this rank calls with, by name and in order, on the CPU; the same at every call.

        All but its own tensor is shared metadata, equal on all ranks.
        """

    def arguments(self) -> dict[str, Any]:
        """Those of rank 0, and no group."""
        return self.arguments_of(0)

    def on(self, world_size: int) -> Self:
        """The like case of as many ranks."""
        return replace(self, world=world_size)


@dataclass(frozen=True, kw_only=True)
class GatherRerange(AcrossCase):
    """The rows of a batch, split page-aligned. Short batches leave ranks without rows."""

    op: ClassVar[Op] = GATHER_RERANGE

    page: int
    prefixes: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int = 3
    dtype: str = "f32"

    def __post_init__(self) -> None:
        if len(self.prefixes) != len(self.tokens):
            raise InvalidInput(
                "prefixes", expected=f"{len(self.tokens)}, one a request", received=self.prefixes
            )
        self.plan()  # refuses what is no batch

    def plan(self) -> Plan:
        """The split that the rows are in."""
        extents = [Extent(prefix, count) for prefix, count in zip(self.prefixes, self.tokens, strict=True)]
        return plan_batch(extents, Grid(self.world, self.page), Split.PAGE_ALIGNED)

    def arguments_of(self, rank: int) -> dict[str, Any]:
        return {
            "local": self.plan().take(_batch(self), rank),
            "prefixes": self.prefixes,
            "tokens": self.tokens,
            "page_size": self.page,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=2, page=4, prefixes=(0,), tokens=(1,))  # rank 1 has nothing
        yield cls(world=2, page=4, prefixes=(0,), tokens=(16,))  # even
        yield cls(world=4, page=64, prefixes=(0,), tokens=(100,))
        yield cls(world=4, page=64, prefixes=(0,), tokens=(300,))
        yield cls(world=4, page=64, prefixes=(0,), tokens=(1000,))
        yield cls(world=2, page=64, prefixes=(70,), tokens=(300,))
        yield cls(world=2, page=2, prefixes=(0, 3), tokens=(9, 4))
        yield cls(world=1, page=64, prefixes=(5,), tokens=(130,))
        yield cls(world=8, page=64, prefixes=(130, 0, 64), tokens=(741, 1, 65), width=132, dtype="uint8")
        yield cls(world=4, page=64, prefixes=(0, 63), tokens=(300, 2), width=576, dtype="bf16")

    @classmethod
    def huge(cls) -> Self:
        return cls(world=2, page=64, prefixes=(0,), tokens=(1_900_000,), width=576, dtype="bf16")

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        def of(page: int, world: int, requests: int) -> st.SearchStrategy[Self]:
            def lengths(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
                return st.tuples(*[st.integers(least, most)] * requests)

            return st.builds(
                cls,
                world=st.just(world),
                page=st.just(page),
                prefixes=lengths(0, 3 * page),
                tokens=lengths(1, 3 * world * page),
                width=st.integers(1, 5),
                dtype=st.sampled_from(["f32", "bf16", "uint8"]),
                seed=st.integers(0, 2**16),
            )

        sizes = st.tuples(st.sampled_from(_PAGES), st.sampled_from(_WORLDS), st.integers(1, 3))
        return sizes.flatmap(lambda drawn: of(*drawn))


@lru_cache(maxsize=4)  # for all ranks
def _batch(case: GatherRerange) -> torch.Tensor:
    """All rows in batch order."""
    generator = torch.Generator().manual_seed(case.seed)
    return filled(
        (sum(case.tokens), case.width),
        lambda count: torch.randint(0, 128, (count,), generator=generator).to(case.dtypes[0]),
    )


Lanes = Literal["any", "one"]


@dataclass(frozen=True, kw_only=True)
class GatherMaterialize(AcrossCase, FieldsCase):
    """Pages of some requests, on any ranks or all on one. Slots behind the valid ones are poison."""

    op: ClassVar[Op] = GATHER_MATERIALIZE

    page: int
    valid: tuple[int, ...]
    fields: tuple[int, ...] = (8,)  # bytes of each
    lanes: Lanes = "any"
    spare: int = 1  # table entries behind the pages of the longest request: −1

    def __post_init__(self) -> None:
        for what, sizes, least in (("valid", self.valid, 0), ("fields", self.fields, 1)):
            for size in sizes:
                at_least(least, size, what)
        if not sum(self.valid) or not self.fields:
            raise InvalidInput("view", expected="a token and a field at least", received=self)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @property
    def page_counts(self) -> list[int]:
        """Pages of each request."""
        return [num_pages(tokens, self.page) for tokens in self.valid]

    def pages(self) -> torch.Tensor:
        """Logical pages of all requests, in batch and position order."""
        total = sum(self.page_counts)
        generator = torch.Generator().manual_seed(self.seed)
        # Local pages are distinct whatever the lane, so that pages are.
        local = torch.randperm(total + 2, generator=generator)[:total] + 1
        lane = torch.randint(0, self.world, (total,), generator=generator)
        if self.lanes == "one":
            lane = torch.full_like(lane, self.world - 1)
        return logical_page(local, lane, self.world)

    def arguments_of(self, rank: int) -> dict[str, Any]:
        counts = self.page_counts
        table = torch.full((len(counts), max(counts) + self.spare), -1)
        for row, pages in zip(table, self.pages().split(counts), strict=True):
            row[: len(pages)] = pages
        return {
            "shard": self._shard(rank),
            "page_table": table,
            "valid": self.valid,
            "page_size": self.page,
            "fields": self.fields,
        }

    def _shard(self, rank: int) -> torch.Tensor:
        """Every byte of a valid slot is telling; other pages and masked slots are poison."""
        shard = poisoned((sum(self.page_counts) + 3, self.page * sum(self.fields)), torch.uint8)
        pages = self.pages()
        mine = owner(pages, self.world) == rank
        shard[local_page(pages[mine], self.world)] = _contents(self)[mine]
        return shard

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(world=2, page=4, valid=(1,))
        yield cls(world=2, page=4, valid=(16,))
        yield cls(world=4, page=64, valid=(100,), lanes="one")
        yield cls(world=4, page=4, valid=(5, 0, 9), fields=(6, 4))
        yield cls(world=1, page=64, valid=(130,))
        yield cls(world=3, page=16, valid=(33, 47), spare=3)
        yield cls(world=8, page=64, valid=(1000, 64, 65), fields=(128, 4))
        yield cls(world=8, page=64, valid=(300, 70), fields=(656,))
        yield cls(world=4, page=64, valid=(300, 1), fields=(1152,))

    @classmethod
    def huge(cls) -> Self:
        return cls(world=2, page=64, valid=(1_900_000,), fields=(1152,))

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        def of(page: int, world: int) -> st.SearchStrategy[Self]:
            lengths = st.lists(st.integers(0, 5 * page), min_size=1, max_size=3)
            return st.builds(
                cls,
                world=st.just(world),
                page=st.just(page),
                valid=lengths.map(tuple).filter(sum),
                fields=st.sampled_from([(8,), (1,), (5, 4), (6,)]),
                lanes=st.sampled_from(["any", "one"]),
                spare=st.integers(0, 2),
                seed=st.integers(0, 2**16),
            )

        sizes = st.tuples(st.sampled_from(_PAGES), st.sampled_from(_WORLDS))
        return sizes.flatmap(lambda drawn: of(*drawn))


@lru_cache(maxsize=4)  # for all ranks
def _contents(case: GatherMaterialize) -> torch.Tensor:
    """uint8 [pages, page bytes] of all requests, in batch and position order."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    slots = sum(case.page_counts) * case.page
    masked = torch.cat([torch.arange(coverage(tokens, case.page)) >= tokens for tokens in case.valid])
    whole = []
    for size in case.fields:
        field = filled((slots, size), lambda count: _other_than_poison(count, generator))
        field[masked] = POISON
        whole.append(field.view(-1, case.page * size))
    return torch.cat(whole, 1)


def _other_than_poison(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, POISON, (count,), dtype=torch.uint8, generator=generator)
