"""Cases of the operations on rows in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.values import SEEDS, TYPES, drawn, poisoned, seeded
from properties.strategies import grids, prefixes, token_counts
from refmodel.layout.geometry import Grid
from refmodel.layout.rows import buffer_rows, pad_rows
from refmodel.ops.layout import LOCAL_EMBEDDING, RERANGE, ZIGZAG_SPLIT
from refmodel.ops.op import Op

Ints = tuple[int, ...]

FLOATS = st.sampled_from(["bf16", "f32"])
WIDTHS = st.sampled_from([4, 1, 3, 64])


def _batches(grid: Grid) -> st.SearchStrategy[dict[str, Ints]]:
    """``prefixes`` and ``tokens`` of a few requests."""
    extents = st.lists(st.tuples(prefixes(grid), token_counts(grid)), min_size=1, max_size=3)
    return extents.map(
        lambda batch: {"prefixes": tuple(p for p, _ in batch), "tokens": tuple(t for _, t in batch)}
    )


# Small before large. No rows on a rank; a prefix that ends inside a page; two requests; the tables of the
# contract; more pages than segments; a chunk of production behind a prefix.
_BATCHES: tuple[dict[str, Any], ...] = (
    {"world": 2, "page": 2, "prefixes": (0,), "tokens": (1,)},
    {"world": 2, "page": 2, "prefixes": (3,), "tokens": (5,)},
    {"world": 2, "page": 1, "prefixes": (0, 0), "tokens": (5, 3)},
    {"world": 2, "page": 64, "prefixes": (70,), "tokens": (300,)},
    {"world": 4, "page": 64, "prefixes": (0,), "tokens": (300,)},
    {"world": 4, "page": 64, "prefixes": (0, 130, 64), "tokens": (1000, 1, 641)},
    {"world": 8, "page": 64, "prefixes": (4096 + 70,), "tokens": (2048 + 13,), "width": 576},
)

_LARGE: dict[str, Any] = {"world": 8, "page": 64, "prefixes": (0,), "tokens": (131_072,), "width": 576}
_HUGE: dict[str, Any] = {"world": 2, "page": 64, "prefixes": (0,), "width": 576}


@dataclass(frozen=True, kw_only=True)
class _Batch(Case):
    """The rows of a batch, no two alike."""

    world: int
    page: int
    prefixes: Ints
    tokens: Ints
    width: int = 4
    dtype: str = "bf16"

    @property
    def rows(self) -> torch.Tensor:
        """[sum(tokens), width]"""
        return drawn((sum(self.tokens), self.width), TYPES[self.dtype], seeded(self.seed))

    @classmethod
    def on(cls, grid: Grid, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Self]:
        return st.builds(
            lambda batch, **fields: cls(world=grid.world_size, page=grid.page_size, **batch, **fields),
            _batches(grid),
            width=WIDTHS,
            dtype=FLOATS,
            seed=SEEDS,
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class ZigzagSplit(_Batch):
    """Rows of a batch, no two alike."""

    op: ClassVar[Op] = ZIGZAG_SPLIT

    rank: int

    def arguments(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "prefixes": self.prefixes,
            "tokens": self.tokens,
            "rank": self.rank,
            "world_size": self.world,
            "page_size": self.page,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        for batch in _BATCHES:
            for rank in (0, batch["world"] - 1):
                yield cls(rank=rank, **batch)

    @classmethod
    def large(cls) -> Self:
        return cls(rank=0, **_LARGE)

    @classmethod
    def huge(cls) -> Self:
        """Rank 0 takes the first rows and the last: its own exceed 2³¹ bytes, too."""
        return cls(rank=0, **_HUGE, tokens=(3_800_000,))

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return grids().flatmap(lambda grid: cls.on(grid, rank=st.integers(0, grid.world_size - 1)))


@dataclass(frozen=True, kw_only=True)
class Rerange(_Batch):
    """The rows of all ranks, padded with poison to the longest."""

    op: ClassVar[Op] = RERANGE

    def arguments(self) -> dict[str, Any]:
        batch = (self.rows, self.prefixes, self.tokens)
        locals_ = [
            ZIGZAG_SPLIT.reference(*batch, rank, self.world, self.page)[0] for rank in range(self.world)
        ]
        most = buffer_rows([len(local) for local in locals_])
        return {
            "buffers": torch.cat([pad_rows(local, most) for local in locals_]),
            "prefixes": self.prefixes,
            "tokens": self.tokens,
            "world_size": self.world,
            "page_size": self.page,
        }

    @classmethod
    def corners(cls) -> Iterator[Self]:
        for batch in _BATCHES:
            yield cls(**batch)

    @classmethod
    def large(cls) -> Self:
        return cls(**_LARGE)

    @classmethod
    def huge(cls) -> Self:
        return cls(**_HUGE, tokens=(1_900_000,))

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return grids().flatmap(cls.on)


@dataclass(frozen=True, kw_only=True)
class LocalEmbedding(Case):
    """Ids, the first and the last of the table among them; rows of the table that none names are poison."""

    op: ClassVar[Op] = LOCAL_EMBEDDING

    ids: int
    vocab: int
    hidden: int
    padding: int = 0  # rows by which the longest rank has more
    dtype: str = "bf16"

    def arguments(self) -> dict[str, Any]:
        generator = seeded(self.seed)
        ids = torch.randint(0, self.vocab, (self.ids,), generator=generator)
        ids[1:2], ids[2:3] = 0, self.vocab - 1
        named = ids.unique()
        table = poisoned((self.vocab, self.hidden), TYPES[self.dtype])
        table[named] = drawn((len(named), self.hidden), TYPES[self.dtype], generator)
        return {"ids": ids, "table": table, "max_rank_rows": self.ids + self.padding}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(ids=0, vocab=5, hidden=4)
        yield cls(ids=0, vocab=5, hidden=4, padding=3)
        yield cls(ids=1, vocab=1, hidden=1)
        yield cls(ids=5, vocab=9, hidden=4, padding=2)
        yield cls(ids=5, vocab=9, hidden=4, padding=2, dtype="f32")
        yield cls(ids=232, vocab=1000, hidden=512, padding=24)

    @classmethod
    def huge(cls) -> Self:
        """A table and embeddings of more than 2³¹ bytes each."""
        return cls(ids=150_000, vocab=150_000, hidden=7168, padding=8)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            cls,
            ids=st.integers(0, 40),
            vocab=st.integers(1, 50),
            hidden=WIDTHS,
            padding=st.integers(0, 9),
            dtype=FLOATS,
            seed=SEEDS,
        )
