"""Seams of the operations in :mod:`refmodel.ops.storage`, :mod:`refmodel.ops.quantize` and
:mod:`refmodel.ops.host`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refmodel.layout.ownership import NO_SLOT, logical_page
from refmodel.model.model import Model
from refmodel.serving.host_layouts import HostLayout, HostPool
from refmodel.serving.page_groups import PagePairs
from refmodel.storage.codecs import Plain, ScaledKey, ScaledLatent, as_bytes, as_type
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache
from refmodel.storage.pages import read_rows
from refmodel.storage.shard import Destinations, Shard
from refmodel.storage.view import ViewIndex, assemble
from sim.kernels.seams.seam import Kernel, Unsuited, seam

Right = Callable[..., Any]

_POISON = 0xFF


def page_tables(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """[requests, most pages + 1], −1 behind the pages of each."""
    table = tables[0].new_full((len(tables), 1 + max(map(len, tables))), NO_SLOT)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = pages
    return table


@seam("materialize", assemble)
def view_of_pages(
    kernel: Kernel, right: Right, buffers: torch.Tensor, index: ViewIndex, row_format: Format
) -> torch.Tensor:
    """The buffers of all ranks are shards of a cache in which only these pages are."""
    layout, W = index.layout, index.layout.grid.world_size
    most = len(buffers) // W
    dummies = buffers.new_full((W, 1, buffers.shape[1]), _POISON)
    shards = torch.cat([dummies, buffers.view(W, most, -1)], 1)
    pages = logical_page(index.places % max(most, 1) + 1, index.places // max(most, 1), W)
    tables = page_tables(pages.split(layout.request_pages))
    return kernel.one(shards, tables, layout.valid, layout.grid.page_size, row_format.fields)


# -- rows in and out ---------------------------------------------------------------------------------------


def _element(row_format: Format) -> torch.dtype | None:
    """As a kernel of MLA sees rows: bf16 where they are, else bytes. None: they are those of an index."""
    codec = row_format.codec
    if isinstance(codec, ScaledKey):
        return None
    is_bf16 = isinstance(codec, Plain) and codec.dtype is torch.bfloat16
    return torch.bfloat16 if is_bf16 else torch.uint8


def _cache(pages: torch.Tensor, row_format: Format, dtype: torch.dtype) -> torch.Tensor:
    """[slots, elements]: the pages themselves."""
    return pages.view(-1, row_format.bytes_per_token).view(dtype)


def _slots(to: Destinations, rows: int) -> torch.Tensor:
    """[rows] physical slots, −1 for those of others."""
    if len(to.slots.unique()) != len(to.slots):  # padding rows may share one
        raise Unsuited
    slots = to.slots.new_full((rows,), NO_SLOT)
    slots[to.rows] = to.slots
    return slots


def _require_width(shard: Shard, packed: torch.Tensor) -> None:
    if packed.shape[1] != shard.format.bytes_per_token:  # that is refused, and by the reference
        raise Unsuited


@seam("mla_write", Shard.write)
def write_mla(kernel: Kernel, right: Right, shard: Shard, to: Destinations, packed: torch.Tensor) -> None:
    dtype = _element(shard.format)
    if dtype is None:
        right(shard, to, packed)
        return
    _require_width(shard, packed)
    kernel(_cache(shard.pages, shard.format, dtype), _slots(to, len(packed)), as_type(packed, dtype))


@seam("index_write", Shard.write)
def write_index(kernel: Kernel, right: Right, shard: Shard, to: Destinations, packed: torch.Tensor) -> None:
    if not isinstance(shard.format.codec, ScaledKey):
        right(shard, to, packed)
        return
    _require_width(shard, packed)
    dim = shard.format.codec.width
    scales = as_type(packed[:, dim:], torch.float32).flatten()
    kernel(shard.pages, _slots(to, len(packed)), packed[:, :dim], scales, shard.grid.page_size)


@seam("mla_read", read_rows)
def read_mla(
    kernel: Kernel, right: Right, pages: torch.Tensor, slots: torch.Tensor, row_format: Format
) -> torch.Tensor:
    dtype = _element(row_format)
    if dtype is None:
        return right(pages, slots, row_format)
    return as_bytes(kernel.one(_cache(pages, row_format, dtype), slots))


@seam("index_read", read_rows)
def read_index(
    kernel: Kernel, right: Right, pages: torch.Tensor, slots: torch.Tensor, row_format: Format
) -> torch.Tensor:
    if not isinstance(row_format.codec, ScaledKey):
        return right(pages, slots, row_format)
    keys, scales = kernel(pages, slots, pages.shape[1] // row_format.bytes_per_token)
    return torch.cat([keys, as_bytes(scales[:, None])], 1)


# -- fp8 ---------------------------------------------------------------------------------------------------


@seam("quantize_mla", Model.pack)
def pack_mla(kernel: Kernel, right: Right, model: Model, cache: Cache, values: torch.Tensor) -> torch.Tensor:
    codec = model.formats[cache].codec
    if not isinstance(codec, ScaledLatent):
        return right(model, cache, values)
    finite, padding = _padding_aside(values)
    packed = kernel.one(finite, codec.latent, codec.tile)
    return torch.where(padding, right(model, cache, values), packed)


@seam("quantize_index", Model.pack)
def pack_index(
    kernel: Kernel, right: Right, model: Model, cache: Cache, values: torch.Tensor
) -> torch.Tensor:
    if not isinstance(model.formats[cache].codec, ScaledKey):
        return right(model, cache, values)
    finite, padding = _padding_aside(values)
    elements, scales = kernel(finite)
    packed = torch.cat([elements, as_bytes(scales[:, None])], 1)
    return torch.where(padding, right(model, cache, values), packed)


def _padding_aside(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values with zeros for padding rows, which are NaN; [n, 1] which these are)."""
    padding = ~values.isfinite().all(1, keepdim=True)
    return values.masked_fill(padding, 0), padding


# -- device and host ---------------------------------------------------------------------------------------


@seam("page_copy", HostPool.store)
def copy_to_host(
    kernel: Kernel, right: Right, pool: HostPool, pairs: PagePairs, layer: int, pages: torch.Tensor
) -> None:
    if pool.cache is Cache.KV:
        _copy(kernel, pool, pairs, layer, pages, to_host=1)
    else:
        right(pool, pairs, layer, pages)


@seam("page_copy", HostPool.load)
def copy_to_device(
    kernel: Kernel, right: Right, pool: HostPool, pairs: PagePairs, layer: int, pages: torch.Tensor
) -> None:
    if pool.cache is Cache.KV:
        _copy(kernel, pool, pairs, layer, pages, to_host=0)
    else:
        right(pool, pairs, layer, pages)


def _copy(
    kernel: Kernel, pool: HostPool, pairs: PagePairs, layer: int, pages: torch.Tensor, *, to_host: int
) -> None:
    """One layer, as the reference copies them."""
    pool.require(pairs, layer, pages)
    axis = 0 if pool.layout is HostLayout.LAYER_FIRST else 1
    host = pool.bytes.narrow(axis, layer, 1)
    device_pages, host_pages = (
        torch.tensor(side, dtype=torch.int64, device=pages.device) for side in (pairs.device, pairs.host)
    )
    kernel(pages[None], host, device_pages, host_pages, pool.page_size, pool.layout.value, to_host)
