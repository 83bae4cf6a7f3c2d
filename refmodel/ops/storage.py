"""Operations on caches: rows into pages, out of them, into a view (laws V1, V2, V7, O1, O3, F1, F2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.layout.rows import buffer_rows, pad_rows
from refmodel.ops.judges import equal_bytes
from refmodel.ops.op import Argument, Arguments, Cost, Kind, Op, Result, Results, Space
from refmodel.ops.placing import read, written
from refmodel.storage.codecs import as_bytes, as_type
from refmodel.storage.formats import Format, index_format
from refmodel.storage.pages import byte_offsets, read_rows
from refmodel.storage.shard import Shard, destinations
from refmodel.storage.view import assemble, contribute, view_index, view_layout

Ints = tuple[int, ...]

_SCALE_BYTES = 4
_PAGE_SIZE = Argument("page_size", Kind.INT, "P")
_WRITE_SLOTS = Argument("slots", Kind.INDEX, "physical, each once; −1: not this rank's row", "[n]")
_READ_SLOTS = Argument("slots", Kind.INDEX, "physical, none is −1; may come twice", "[n]")
_MLA = (torch.bfloat16, torch.uint8)
_BYTES = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class _Raw:
    """Packed rows as they are: of a cache only the fields are known."""

    fields: Ints

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed


def raw_format(fields: Ints) -> Format:
    """The format of rows of which only the bytes a token of each field are known."""
    return Format("raw", sum(fields), _Raw(tuple(fields)))


# -- the view ----------------------------------------------------------------------------------------------


def _materialize(
    shards: torch.Tensor, page_table: torch.Tensor, valid: Ints, page_size: int, fields: Ints
) -> Results:
    """Page 3 is local page 1 of rank 1: two keys of one byte, then their scales, of which the first is valid.

    >>> shards = torch.zeros(2, 2, 4, dtype=torch.uint8)
    >>> shards[1, 1] = torch.tensor([7, 8, 70, 80])
    >>> _materialize(shards, torch.tensor([[3, -1]]), valid=(1,), page_size=2, fields=(1, 1))
    (tensor([[ 7, 70]], dtype=torch.uint8),)
    """
    grid, row_format = Grid(len(shards), page_size), raw_format(fields)
    rows = zip(page_table.cpu().long(), valid, strict=True)
    tables = [
        PageTable(row[: num_pages(tokens, page_size)], grid, str(request))
        for request, (row, tokens) in enumerate(rows)
    ]
    layout = view_layout(tables, valid, grid)
    length = buffer_rows(layout.page_counts)
    buffers = []
    for rank, pages in enumerate(shards.contiguous()):
        index = view_index(layout, rank, local_pages=len(pages), device=shards.device)
        buffers.append(pad_rows(contribute(Shard(grid, rank, row_format, pages), index), length))
    return (assemble(torch.cat(buffers), index, row_format),)


MATERIALIZE = Op(
    name="materialize",
    meaning="The pages of all ranks → one dense row a token, in batch and position order.",
    arguments=(
        Argument("shards", Kind.VALUES, "of every rank", "[world_size, local_pages, page_bytes]", _BYTES),
        Argument("page_table", Kind.INDEX, "logical pages by position; −1 behind", "[requests, most_pages]"),
        Argument("valid", Kind.INTS, "tokens of each request in the view", "[requests]"),
        _PAGE_SIZE,
        Argument("fields", Kind.INTS, "bytes a token of each field: all of a page's first, then the next"),
    ),
    results=(Result("view", "[sum(valid), sum(fields)]", "uint8; the fields of a token side by side"),),
    reference=_materialize,
    spaces=lambda shards, page_table, valid, page_size, fields: (
        Space((sum(valid), sum(fields)), torch.uint8),
    ),
    judge=equal_bytes("V1"),
    compared="byte for byte",
    laws=("V1", "V2", "V7", "O1", "F2"),
    cost=lambda shards, page_table, valid, page_size, fields: Cost(2 * sum(valid) * sum(fields)),
    row_width=lambda shards, page_table, valid, page_size, fields: sum(fields),
)


# -- rows of MLA KV ----------------------------------------------------------------------------------------


def _write(
    cache: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, row_format: Format, page_size: int
) -> None:
    whole = cache.contiguous()
    shard = Shard(Grid(1, page_size), 0, row_format, as_bytes(whole))  # shares its memory
    shard.write(destinations(slots.long(), shard.num_slots, 0, device=cache.device), packed)
    cache.copy_(whole)  # itself, unless it had other strides


def _mla_write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Results:
    """
    >>> cache = torch.zeros(3, 2, dtype=torch.bfloat16)
    >>> _mla_write(cache, torch.tensor([2, -1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16))
    ()
    >>> cache.tolist()
    [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    packed = as_bytes(rows)
    _write(cache, slots, packed, raw_format((packed.shape[1],)), page_size=1)
    return ()


MLA_WRITE = Op(
    name="mla_write",
    meaning="Rows of MLA KV into the slots of one rank's cache; rows of other ranks are passed over.",
    arguments=(
        Argument("cache", Kind.VALUES, "one row a slot", "[num_slots, width]", _MLA, written=True),
        _WRITE_SLOTS,
        Argument("rows", Kind.VALUES, "of the dtype of the cache", "[n, width]", _MLA),
    ),
    results=(),
    reference=_mla_write,
    spaces=lambda cache, slots, rows: (),
    judge=written("cache", law="F1", survival="O3"),
    compared="byte for byte, the whole cache",
    laws=("F1", "F2", "O3"),
    cost=lambda cache, slots, rows: Cost(slots.nbytes + 2 * int((slots >= 0).sum()) * cache[:1].nbytes),
    row_width=lambda cache, slots, rows: cache.shape[-1],
)


def _mla_read(cache: torch.Tensor, slots: torch.Tensor) -> Results:
    """
    >>> _mla_read(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.uint8), torch.tensor([2, 0]))
    (tensor([[5, 6],
            [1, 2]], dtype=torch.uint8),)
    """
    stored = as_bytes(cache)
    return (as_type(read_rows(stored, slots.long(), raw_format((stored.shape[1],))), cache.dtype),)


MLA_READ = Op(
    name="mla_read",
    meaning="The rows of MLA KV at slots of one rank's cache.",
    arguments=(Argument("cache", Kind.VALUES, "one row a slot", "[num_slots, width]", _MLA), _READ_SLOTS),
    results=(Result("rows", "[n, width]", "of the dtype of the cache"),),
    reference=_mla_read,
    spaces=lambda cache, slots: (Space((len(slots), cache.shape[1]), cache.dtype),),
    judge=read(
        lambda arguments: (arguments["slots"].long() + 1) * arguments["cache"][:1].nbytes,
        law="F1",
    ),
    compared="byte for byte",
    laws=("F1", "F2"),
    cost=lambda cache, slots: Cost(slots.nbytes + 2 * len(slots) * cache[:1].nbytes),
    row_width=lambda cache, slots: cache.shape[-1],
)


# -- index keys and their scales ---------------------------------------------------------------------------


def _index_write(
    pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, page_size: int
) -> Results:
    """Slot 3 is the second of page 1: its key is byte 1 of that page, its scale the second behind the keys.

    >>> pages = torch.zeros(2, 10, dtype=torch.uint8)
    >>> keys, scales = torch.tensor([[7]], dtype=torch.uint8), torch.tensor([1.0])
    >>> _index_write(pages, torch.tensor([3]), keys, scales, page_size=2)
    ()
    >>> pages.tolist()
    [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 7, 0, 0, 0, 0, 0, 0, 128, 63]]
    """
    packed = torch.cat([keys, as_bytes(scales[:, None])], 1)
    _write(pages, slots, packed, index_format("fp8", keys.shape[1]), page_size)
    return ()


INDEX_WRITE = Op(
    name="index_write",
    meaning="Index keys and scales into the pages of one rank: all keys of a page, then all its scales.",
    arguments=(
        Argument(
            "pages", Kind.VALUES, "page bytes: P × (dim + 4)", "[local_pages, page_bytes]", _BYTES, True
        ),
        _WRITE_SLOTS,
        Argument("keys", Kind.VALUES, "bytes of fp8-e4m3", "[n, dim]", _BYTES),
        Argument("scales", Kind.VALUES, "", "[n]", (torch.float32,)),
        _PAGE_SIZE,
    ),
    results=(),
    reference=_index_write,
    spaces=lambda pages, slots, keys, scales, page_size: (),
    judge=written("pages", law="F1", survival="O3"),
    compared="byte for byte, all pages",
    laws=("F1", "F2", "O3"),
    cost=lambda pages, slots, keys, scales, page_size: Cost(
        slots.nbytes + 2 * int((slots >= 0).sum()) * (keys.shape[1] + _SCALE_BYTES)
    ),
    row_width=lambda pages, slots, keys, scales, page_size: keys.shape[-1],
)


def _key_dim(pages: torch.Tensor, page_size: int) -> int:
    return pages.shape[1] // page_size - _SCALE_BYTES


def _index_read(pages: torch.Tensor, slots: torch.Tensor, page_size: int) -> Results:
    """
    >>> pages = torch.tensor([[6, 7, 0, 0, 0, 0, 0, 0, 128, 63]], dtype=torch.uint8)
    >>> _index_read(pages, torch.tensor([1]), page_size=2)
    (tensor([[7]], dtype=torch.uint8), tensor([1.]))
    """
    dim = _key_dim(pages, page_size)
    packed = read_rows(pages.contiguous(), slots.long(), index_format("fp8", dim))
    return packed[:, :dim].contiguous(), as_type(packed[:, dim:], torch.float32).flatten()


def _scale_ends(arguments: Arguments) -> torch.Tensor:
    """Where the scale of each slot ends: behind its key."""
    pages, slots, page_size = (arguments[name] for name in ("pages", "slots", "page_size"))
    return (
        byte_offsets(slots, index_format("fp8", _key_dim(pages, page_size)), page_size)[:, 1] + _SCALE_BYTES
    )


INDEX_READ = Op(
    name="index_read",
    meaning="The index keys and scales at slots of one rank's pages.",
    arguments=(
        Argument("pages", Kind.VALUES, "page bytes: P × (dim + 4)", "[local_pages, page_bytes]", _BYTES),
        _READ_SLOTS,
        _PAGE_SIZE,
    ),
    results=(
        Result("keys", "[n, dim]", "uint8: bytes of fp8-e4m3"),
        Result("scales", "[n]", "fp32"),
    ),
    reference=_index_read,
    spaces=lambda pages, slots, page_size: (
        Space((len(slots), _key_dim(pages, page_size)), torch.uint8),
        Space((len(slots),), torch.float32),
    ),
    judge=read(_scale_ends, law="F1"),
    compared="byte for byte",
    laws=("F1", "F2"),
    cost=lambda pages, slots, page_size: Cost(slots.nbytes + 2 * len(slots) * pages.shape[1] // page_size),
    row_width=lambda pages, slots, page_size: _key_dim(pages, page_size),
)
