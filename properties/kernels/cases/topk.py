"""Cases of the operations in :mod:`refmodel.ops.topk`: near misses and ties, as sets are judged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.query_rows import QueryRows, query_rows
from properties.kernels.cases.values import drawn, filled, repeated
from refmodel.layout.geometry import num_pages
from refmodel.ops.op import Op
from refmodel.ops.topk import TOPK_MERGE, TOPK_TRANSFORM_PAGED, TOPK_TRANSFORM_RAGGED

PRODUCTION_K = 2048
_DISTINCT_ROWS = 251  # of keys: to permute so many a row takes long; a prime


def close_logits(shape: tuple[int, ...], levels: int, generator: torch.Generator) -> torch.Tensor:
    """float32: neighbours from ±1 on, as many as levels, so that most tie; 0 levels: any numbers."""
    if not levels:
        return drawn(shape, torch.float32, generator)

    def draw(count: int) -> torch.Tensor:
        step = torch.randint(levels, (count,), generator=generator)
        sign = 1 - 2 * torch.randint(2, (count,), generator=generator)
        return sign * (1 + step * torch.finfo(torch.float32).eps)

    return filled(shape, draw)


@dataclass(frozen=True, kw_only=True)
class _Choice(QueryRows):
    """Logits outside of what a row sees are NaN."""

    k: int
    levels: int = 0  # different logits of either sign; 0: any number of them

    def scored(self, generator: torch.Generator) -> dict[str, Any]:
        """Arguments that both transforms have."""
        ranges = self.ranges()
        logits = close_logits((self.rows, ranges.num_keys), self.levels, generator)
        logits.masked_fill_(~ranges.visible(), torch.nan)
        return {"logits": logits, "ks": ranges.ks, "ke": ranges.ke, "k": self.k}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(prefixes=(5,), tokens=(0,), k=2)
        yield cls(prefixes=(0,), tokens=(0,), padding=1, k=2)
        yield cls(prefixes=(0,), tokens=(1,), k=1)
        yield cls(prefixes=(0,), tokens=(1,), k=3)  # fewer keys than k
        yield cls(prefixes=(2, 0, 4), tokens=(4, 2, 0), behind=2, padding=1, k=4)
        yield cls(prefixes=(9, 20), tokens=(3, 3), behind=1, k=4, levels=2)
        # L = k − 1, k, k + 1; a page that is not full; a request without rows
        yield cls(prefixes=(PRODUCTION_K - 2, 70), tokens=(3, 0), behind=3, k=PRODUCTION_K)
        yield cls(prefixes=(130, 8190), tokens=(1, 1), padding=1, k=PRODUCTION_K)
        # more than 1,024 ties at the threshold; neighbours in float32
        yield cls(prefixes=(5000,), tokens=(2,), k=PRODUCTION_K, levels=1)
        yield cls(prefixes=(8190,), tokens=(2,), k=PRODUCTION_K, levels=1000)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        levels = st.sampled_from([0, 1, 2, 9])
        return st.builds(
            lambda k, levels, places, rows: cls(k=k, levels=levels, **places, **rows),
            st.integers(1, 20),
            levels,
            cls._places(),
            query_rows(),
        )

    @classmethod
    @abstractmethod
    def _places(cls) -> st.SearchStrategy[dict[str, Any]]:
        """Fields of the transform."""

    @classmethod
    def huge(cls) -> Self:
        """Logits of more than 2³¹ bytes."""
        return cls(prefixes=(57_400,), tokens=(8200,), k=64)


@dataclass(frozen=True, kw_only=True)
class TopkTransformPaged(_Choice):
    """Pages of each request lie anywhere. The table has −1 behind them, and a column more than any needs."""

    op: ClassVar[Op] = TOPK_TRANSFORM_PAGED

    page: int = 64

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [num_pages(length, self.page) for length in self.lengths]
        pages = 1 + torch.randperm(3 * sum(counts), generator=generator)
        table = torch.full((len(counts), max(counts) + 1), -1)
        for row, own in zip(table, pages[: sum(counts)].split(counts), strict=True):
            row[: len(own)] = own
        placed = {"page_table": table, "cu_seqlens_q": self.cu_seqlens_q, "page_size": self.page}
        return self.scored(generator) | placed

    @classmethod
    def _places(cls) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"page": st.sampled_from([4, 1, 2, 3, 16, 64])})


@dataclass(frozen=True, kw_only=True)
class TopkTransformRagged(_Choice):
    """Requests lie in the flattened K of attention with a gap between them, so that ks is no row start."""

    op: ClassVar[Op] = TOPK_TRANSFORM_RAGGED

    gap: int = 3  # rows between two requests; 0: row starts are ks

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        starts = tuple(start + i * self.gap for i, start in enumerate(self.key_starts[:-1]))
        return self.scored(generator) | {"row_starts": self.of_rows(starts)}

    @classmethod
    def _places(cls) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"gap": st.integers(0, 3)})


@st.composite
def _topk_merge(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a case."""
    width = draw(st.integers(1, 6))
    return {
        "counts": tuple(draw(st.lists(st.integers(0, width), min_size=1, max_size=4))),
        "rows": draw(st.integers(0, 4)),
        "width": width,
        "k": draw(st.integers(1, 10)),
        "levels": draw(st.sampled_from([0, 1, 2, 9])),
        "seed": draw(st.integers(0, 2**16)),
    }


@dataclass(frozen=True, kw_only=True)
class TopkMerge(Case):
    """Candidates of parts, each with keys of its own. Logits of no candidate are NaN."""

    op: ClassVar[Op] = TOPK_MERGE

    counts: tuple[int, ...]  # candidates of each part, in row 0; in row 1 of the part behind it, and so on
    rows: int
    width: int  # candidates that a part has room for
    k: int
    levels: int = 0

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        parts = len(self.counts)
        shape = (parts, self.rows, self.width)
        every = parts * self.width
        keys = torch.empty(min(self.rows, _DISTINCT_ROWS), every, dtype=torch.int64)
        for row in keys:
            row.copy_(torch.randperm(3 * every, generator=generator)[:every])
        keys = repeated(keys, self.rows).view(self.rows, parts, self.width).movedim(1, 0)
        part = torch.arange(parts)[:, None] + torch.arange(self.rows)
        absent = torch.arange(self.width) >= torch.tensor(self.counts)[part % parts][..., None]
        logits = close_logits(shape, self.levels, generator).masked_fill_(absent, torch.nan)
        return {"logits": logits, "keys": keys.masked_fill(absent, -1).contiguous(), "k": self.k}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(counts=(2, 1), rows=0, width=2, k=2)
        yield cls(counts=(1,), rows=1, width=1, k=1)
        yield cls(counts=(0, 0), rows=2, width=2, k=3)
        yield cls(counts=(2, 0, 1), rows=3, width=4, k=4)
        yield cls(counts=(4, 0, 3), rows=3, width=4, k=4)
        yield cls(counts=(4, 2, 4), rows=3, width=4, k=4, levels=2)
        production: dict[str, Any] = {"rows": 3, "width": PRODUCTION_K, "k": PRODUCTION_K}
        yield cls(counts=(PRODUCTION_K, 0, 300, PRODUCTION_K), **production)
        yield cls(counts=(PRODUCTION_K,) * 8, levels=1, **production)

    @classmethod
    def huge(cls) -> Self:
        """Logits of more than 2³¹ bytes, keys of twice as many."""
        return cls(counts=(PRODUCTION_K,) * 8, rows=32_800, width=PRODUCTION_K, k=PRODUCTION_K)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return _topk_merge().map(lambda fields: cls(**fields))
