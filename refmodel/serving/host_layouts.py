"""Pages in host memory: three layouts, two copy engines, and which go together (laws H1, H6).

| layout | MLA KV, D bytes a token | index |
|---|---|---|
| ``layer_first`` | [L, slots, D] | [L, pages, page bytes] |
| ``page_first`` | [slots, L, D] | [L, pages, page bytes] |
| ``page_first_direct`` | [pages, L, P, D] | [pages, L, page bytes] |

Engine ``kernel`` gathers and scatters token by token, ``direct`` makes one copy a page. Index pages always
move whole: in fp8 the keys of a page stand before its scales, so a page is not a run of tokens.

>>> from refmodel.storage.formats import mla_format
>>> mla = mla_format("fp8", latent=512, rope=64)
>>> def shape(layout, engine):
...     pool = empty_host_pool(layout, engine, Cache.KV, mla, page_size=64, layers=2, num_pages=3)
...     return list(pool.bytes.shape)
>>> shape(HostLayout.PAGE_FIRST, CopyEngine.KERNEL), shape(HostLayout.PAGE_FIRST_DIRECT, CopyEngine.DIRECT)
([192, 2, 656], [3, 2, 64, 656])
>>> check_engine(HostLayout.PAGE_FIRST_DIRECT, CopyEngine.KERNEL)
Traceback (most recent call last):
...
refmodel.errors.InvalidInput: host layout: expected layer_first or page_first with copy engine kernel, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import at_least, check_in_range
from refmodel.serving.page_groups import PagePairs
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache
from refmodel.storage.pages import words


class HostLayout(Enum):
    """Which comes first in host memory."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"


class CopyEngine(Enum):
    """How bytes move between host and device."""

    KERNEL = "kernel"  # token by token
    DIRECT = "direct"  # one copy a page


FITTING = MappingProxyType(
    {
        CopyEngine.KERNEL: (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST),
        CopyEngine.DIRECT: (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST_DIRECT),
    }
)


def check_engine(layout: HostLayout, engine: CopyEngine) -> None:
    """:class:`InvalidInput` unless the copy engine can read and write the layout (H6)."""
    if layout not in FITTING[engine]:
        allowed = " or ".join(fitting.value for fitting in FITTING[engine])
        raise InvalidInput(
            "host layout",
            expected=f"{allowed} with copy engine {engine.value}",
            received=layout.value,
            fix="Neither setting is changed to suit the other.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """Host pages of one cache on one rank, all layers. Build it with :func:`empty_host_pool`.

    The value is fixed, the bytes are not: :meth:`store` changes them, nothing else does.
    """

    layout: HostLayout
    engine: CopyEngine
    cache: Cache  # KV or INDEX, of the model or of its draft model
    format: Format
    page_size: int
    layers: int
    num_pages: int
    bytes: torch.Tensor  # uint8, in the shape of the layout

    def __post_init__(self) -> None:
        check_engine(self.layout, self.engine)
        for what, size in (("page size P", self.page_size), ("layers", self.layers)):
            at_least(1, size, f"{what} of a host pool")
        at_least(0, self.num_pages, "pages of a host pool")
        if self.cache is Cache.QUERY:
            raise InvalidInput("cache of a host pool", expected="KV or INDEX", received=self.cache.name)
        if self.cache is Cache.KV and len(self.format.fields) != 1:
            raise InvalidInput(
                "format of a host pool of KV",
                expected="one whose tokens lie one behind the other, as they move token by token",
                received=self.format.name,
            )
        if list(self.bytes.shape) != self._shape or self.bytes.dtype != torch.uint8:
            raise InvalidInput(
                f"bytes of a host pool, {self.layout.value}",
                expected=f"uint8 {self._shape}",
                received=f"{self.bytes.dtype} {list(self.bytes.shape)}",
            )

    def store(self, pairs: PagePairs, layer: int, pages: torch.Tensor) -> None:
        """Copy pages of a layer of a shard, uint8 [local pages, page bytes], to the host.

        Returns when the bytes are there. :class:`InvalidInput` before any byte moves: a layer or page out of
        range, the dummy page, pages of another size.
        """
        self.require(pairs, layer, pages)
        self._move(self._items(pages), pairs.device, self._layer(layer), pairs.host)

    def load(self, pairs: PagePairs, layer: int, pages: torch.Tensor) -> None:
        """Copy host pages into a layer of a shard, uint8 [local pages, page bytes]; other pages stay.

        Towards CUDA it is queued and not waited for (S7). Errors as of :meth:`store`.
        """
        self.require(pairs, layer, pages)
        self._move(self._layer(layer), pairs.host, self._items(pages), pairs.device)

    # -- what one copy moves: tokens with the engine `kernel`, pages with `direct` and for the index -----

    @property
    def _by_token(self) -> bool:
        return self.cache is Cache.KV and self.engine is CopyEngine.KERNEL

    def _items(self, pages: torch.Tensor) -> torch.Tensor:
        """Bytes of pages [pages or slots, …] as the items that a copy moves: a view."""
        if self.cache is Cache.INDEX:
            return pages
        item = (self.format.bytes_per_token,) if self._by_token else self._page
        return pages.view(-1, *item)

    def _layer(self, layer: int) -> torch.Tensor:
        """The items of one layer on the host: a view."""
        axis = _layer_axis(self.layout, self.cache)
        if self.layout is HostLayout.LAYER_FIRST:
            return self._items(self.bytes[layer])
        return self.bytes.select(axis, layer)

    def _move(
        self, source: torch.Tensor, taken: Sequence[int], target: torch.Tensor, put: Sequence[int]
    ) -> None:
        """Pages ``taken`` of the source become pages ``put`` of the target."""
        if self.engine is CopyEngine.DIRECT:
            for page, place in zip(taken, put, strict=True):
                target[place].copy_(source[page], non_blocking=target.is_cuda)
            return
        wide = words(target)
        moved = words(source)[self._index(taken, source)].view(torch.uint8).view(wide.dtype)
        wide[self._index(put, target)] = moved.to(target.device, non_blocking=target.is_cuda)

    def _index(self, pages: Sequence[int], side: torch.Tensor) -> torch.Tensor:
        """Indices of the items of pages, on the device of that side."""
        index = torch.tensor(pages, dtype=torch.int64)
        if self._by_token:
            index = (index[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        return index.to(side.device, non_blocking=True)

    # -- shape -------------------------------------------------------------------------------------------

    @property
    def _page(self) -> tuple[int, int]:
        return self.page_size, self.format.bytes_per_token

    @property
    def _shape(self) -> list[int]:
        return _shape(self.layout, self.cache, self.format, self.page_size, self.layers, self.num_pages)

    def require(self, pairs: PagePairs, layer: int, pages: torch.Tensor) -> None:
        """:class:`InvalidInput` unless these pages can be copied between a layer of a shard and the host."""
        where = Where(layer=layer)
        check_in_range(layer, self.layers, "layer of a host pool", where)
        page_bytes = self.format.page_bytes(self.page_size)
        if pages.dim() != 2 or pages.shape[1] != page_bytes:
            raise InvalidInput(
                f"pages in format {self.format.name}",
                expected=f"[local pages, {page_bytes}]",
                received=list(pages.shape),
                where=where,
            )
        if not len(pairs):
            return
        check_in_range(max(pairs.host), self.num_pages, "host page", where)
        check_in_range(max(pairs.device), len(pages), "local page", where)
        if min(pairs.device) == 0:
            raise InvalidInput("local page", expected=">= 1", received="0, the dummy page", where=where)


def _layer_axis(layout: HostLayout, cache: Cache) -> int:
    by_page = layout is HostLayout.PAGE_FIRST_DIRECT or cache is Cache.KV
    return 1 if layout is not HostLayout.LAYER_FIRST and by_page else 0


def _shape(
    layout: HostLayout, cache: Cache, row_format: Format, page_size: int, layers: int, num_pages: int
) -> list[int]:
    """Of the bytes of a host pool, as the table at the head of this module has it."""
    if cache is Cache.INDEX:
        shape = [num_pages, row_format.page_bytes(page_size)]
    elif layout is HostLayout.PAGE_FIRST_DIRECT:
        shape = [num_pages, page_size, row_format.bytes_per_token]
    else:
        shape = [num_pages * page_size, row_format.bytes_per_token]
    shape.insert(_layer_axis(layout, cache), layers)
    return shape


def empty_host_pool(
    layout: HostLayout,
    engine: CopyEngine,
    cache: Cache,
    row_format: Format,
    *,
    page_size: int,
    layers: int,
    num_pages: int,
    device: torch.device | None = None,
) -> HostPool:
    """A pool in which every byte is poison. Default device: the CPU. :class:`InvalidInput` as of H6."""
    check_engine(layout, engine)
    shape = _shape(layout, cache, row_format, page_size, layers, num_pages)
    bytes_ = (
        row_format.poison_bytes(1)
        .to(device or "cpu")
        .expand(shape)
        .clone(memory_format=torch.contiguous_format)
    )
    return HostPool(layout, engine, cache, row_format, page_size, layers, num_pages, bytes_)
