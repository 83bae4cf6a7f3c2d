"""Cases of the operations in :mod:`refmodel.ops.host`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.values import drawn
from refmodel.ops.host import LAYOUTS, PAGE_COPY
from refmodel.ops.op import Op


@st.composite
def _page_copy(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a case."""
    copied = draw(st.integers(0, 4))
    return {
        "layers": draw(st.integers(1, 3)),
        "local_pages": 1 + copied + draw(st.integers(0, 3)),
        "pool_pages": max(1, copied + draw(st.integers(0, 3))),
        "copied": copied,
        "page": draw(st.sampled_from([2, 1, 4, 16])),
        "width": draw(st.sampled_from([3, 1, 8, 132])),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "to_host": draw(st.integers(0, 1)),
        "seed": draw(st.integers(0, 2**16)),
    }


@dataclass(frozen=True, kw_only=True)
class PageCopy(Case):
    """Some pages, in no order, between a rank's shards and its pool. The dummy, local page 0, stays."""

    op: ClassVar[Op] = PAGE_COPY

    layers: int
    local_pages: int
    pool_pages: int
    copied: int  # pages, fewer than either side has
    page: int
    width: int  # bytes a token
    layout: str = "layer_first"
    to_host: int = 1

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        L, slots = self.layers, self.pool_pages * self.page
        host = {
            "layer_first": (L, slots, self.width),
            "page_first": (slots, L, self.width),
            "page_first_direct": (self.pool_pages, L, self.page, self.width),
        }[self.layout]
        return {
            "device": drawn((L, self.local_pages, self.page * self.width), torch.uint8, generator),
            "host": drawn(host, torch.uint8, generator),
            "device_pages": 1 + torch.randperm(self.local_pages - 1, generator=generator)[: self.copied],
            # From the end: in a large pool these are far from its beginning.
            "host_pages": self.pool_pages
            - 1
            - torch.randperm(self._reach, generator=generator)[: self.copied],
            "page_size": self.page,
            "layout": self.layout,
            "to_host": self.to_host,
        }

    @property
    def _reach(self) -> int:
        return min(self.pool_pages, max(8, 2 * self.copied))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def corners(cls) -> Iterator[Self]:
        small: dict[str, Any] = {"layers": 2, "local_pages": 4, "pool_pages": 5, "page": 2, "width": 3}
        ways: list[dict[str, Any]] = [
            {"layout": layout, "to_host": to_host} for layout in LAYOUTS for to_host in (1, 0)
        ]
        yield cls(copied=0, **small)
        yield cls(copied=1, **small)
        for way in ways:
            yield cls(copied=3, **small, **way)
        # MLA in bf16 and fp8, index keys in fp8: each of them both ways
        for way, width in zip(ways, (1152, 656, 656, 132, 132, 1152), strict=True):
            yield cls(layers=2, local_pages=5, pool_pages=6, copied=3, page=64, width=width, **way)

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return _page_copy().map(lambda fields: cls(**fields))

    @classmethod
    def huge(cls) -> Self:
        """A pool of more than 2³¹ bytes, whose last pages are copied."""
        pool: dict[str, Any] = {"layers": 2, "pool_pages": 26_000, "page": 64, "width": 656}
        return cls(local_pages=6, copied=4, layout="page_first_direct", to_host=0, **pool)
