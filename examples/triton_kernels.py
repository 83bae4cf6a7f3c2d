"""Five operations as Triton kernels, short enough to copy from.

    cpkv check examples/triton_kernels.py                  # interpreted, on a machine without a GPU
    cpkv check examples/triton_kernels.py --device cuda    # compiled

A kernel for cpkv is a function with the name and the arguments of an operation: it allocates the result and
launches. Four habits keep these right. Offsets are computed in 64 bits. Strides are arguments. What must not
be read is masked out of the load. Lengths come from the host's metadata, so nothing waits for the GPU.
"""

# Triton has no types, and parameters of a kernel get theirs at a launch.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (blocks are constants to Triton, hence capitals)

from __future__ import annotations

import os
from itertools import accumulate
from math import gcd

import torch

# Before the import: Triton decides there whether it compiles or interprets.
INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1") == "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

Ints = tuple[int, ...]

# What is declared is tried. The rest is as the contract has it: any page size, strides, either index type.
# (That the interpreter repeats itself proves nothing.)
_ALL = {"devices": ("cpu",) if INTERPRETED else ("cuda",), "deterministic": not INTERPRETED}
CAPABILITIES = {
    "logical_to_physical": _ALL,
    "rerange": _ALL,
    "materialize": _ALL,
    "index_write": _ALL,
    "sparse_mla": _ALL | {"dtypes": (torch.bfloat16, torch.float32)},
}


def tile(length: int, compiled: int) -> int:
    """Size of a block: one for all shapes where it is compiled, and as large as they are where it is not."""
    return min(triton.next_power_of_2(max(length, 1)), 16 * compiled) if INTERPRETED else compiled


def on_device(numbers: list[list[int]], device: torch.device) -> torch.Tensor:
    """Metadata of the host as int64 there; from pinned memory, as any other copy waits for the GPU (S7)."""
    table = torch.tensor(numbers)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


# -- logical_to_physical: one element, one slot --------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "stride", "rank", "world_size", "page_size"])
def _to_physical(slots, physical, n, stride, rank, world_size, page_size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at * stride, mask=at < n, other=-1)
    page = slot // page_size
    here = page // world_size * page_size + slot % page_size
    # −1 is nobody's. `//` cuts towards 0 here: −1 // 64 is page 0, which rank 0 would take for its own.
    mine = (slot >= 0) & (page % world_size == rank)
    tl.store(physical + at, tl.where(mine, here, -1), mask=at < n)


def logical_to_physical(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
    """O2: group-wide slots → slots of one rank's storage, −1 where another rank owns them."""
    physical = torch.empty_like(slots, memory_format=torch.contiguous_format)
    if n := len(slots):
        block = tile(n, 1024)
        grid = (triton.cdiv(n, block),)
        _to_physical[grid](slots, physical, n, slots.stride(0), rank, world_size, page_size, BLOCK=block)
    return physical


# -- rerange: a segment is one copy --------------------------------------------------------------------------


def page_bounds(prefix: int, tokens: int, parts: int, page_size: int) -> list[int]:
    """Where the segments of one request begin, and its end: whole pages, counted from position 0 (S2)."""
    first, end = prefix // page_size, prefix + tokens
    base, more = divmod(-(-end // page_size) - first, parts)
    pages = accumulate((base + (i < more) for i in range(parts)), initial=first)
    return [min(max(page * page_size, prefix), end) for page in pages]


def segments(prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> list[list[int]]:
    """[first row in the buffers, first row of the batch, rows] of each segment that has any (S1, S3)."""
    requests = list(zip(prefixes, tokens, accumulate(tokens, initial=0), strict=False))
    bounds = [page_bounds(prefix, count, 2 * world_size, page_size) for prefix, count, _ in requests]
    by_rank = [
        [
            (start + at[i] - prefix, at[i + 1] - at[i])
            for i in (rank, 2 * world_size - 1 - rank)  # prev of every request, then next of every one
            for (prefix, _, start), at in zip(requests, bounds, strict=True)
        ]
        for rank in range(world_size)
    ]
    longest = max(sum(rows for _, rows in mine) for mine in by_rank)  # as long as any rank's buffer (S4)
    copies = []
    for rank, mine in enumerate(by_rank):
        places = accumulate((rows for _, rows in mine), initial=rank * longest)
        copies += [[place, row, rows] for place, (row, rows) in zip(places, mine, strict=False) if rows]
    return copies


@triton.jit(do_not_specialize=["width", "from_row", "from_column", "to_row", "to_column"])
def _copy_segments(
    copies, buffers, rows, width, from_row, from_column, to_row, to_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    copy = copies + tl.program_id(0) * 3
    source, target, count = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(2).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < count) & (column < width)
    values = tl.load(buffers + (source + row) * from_row + column * from_column, mask=mask)
    tl.store(rows + (target + row) * to_row + column * to_column, values, mask=mask)


def rerange(
    buffers: torch.Tensor,
    prefixes: Ints,
    tokens: Ints,
    world_size: int,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """S4: rows as a gather of all ranks brings them → batch order. ``out``, with any strides, is optional."""
    width = buffers.shape[1]
    rows = buffers.new_empty(sum(tokens), width) if out is None else out
    copies = segments(prefixes, tokens, world_size, page_size) if tokens else []
    if copies and width:
        source, target = as_words(buffers, rows)
        most, width = max(count for _, _, count in copies), target.shape[1]
        block, columns = tile(most, 16), tile(width, 128)
        grid = len(copies), triton.cdiv(most, block), triton.cdiv(width, columns)
        _copy_segments[grid](
            on_device(copies, buffers.device), source, target, width,
            *source.stride(), *target.stride(), block, columns,
        )  # fmt: skip
    return rows


WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_words(source: torch.Tensor, target: torch.Tensor, *lengths: int) -> list[torch.Tensor]:
    """The same bits as integers, since a NaN that is loaded as a float need not come through as it was.

    As wide as all rows, strides, addresses and ``lengths`` in bytes are multiples of: fewer, larger loads.
    """
    size = source.itemsize
    if source.stride(-1) == target.stride(-1) == 1:
        for tensor in (source, target):
            steps = (tensor.itemsize * step for step in (tensor.shape[-1], *tensor.stride()[:-1]))
            lengths += (tensor.data_ptr(), *steps)
        size = gcd(8, *lengths)
    return [tensor.view(WORDS[size]) for tensor in (source, target)]


# -- materialize: pages of all ranks become one view ---------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        *("slots", "page_size", "table_row", "table_column", "world_size", "rank_stride", "page_stride"),
        *("width", "field_start", "field_words", "column"),
    ]
)
def _copy_pages(
    pages, slots, page_size, shards, page_table, view, table_row, table_column, world_size, rank_stride,
    page_stride, width, field_start, field_words, column, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)  # of all pages, in a row
    token = slot % page_size
    about = pages + slot // page_size * 4
    tokens = tl.load(about, mask=slot < slots, other=0)
    real = token < tokens  # slots behind the valid length are not read (V2)
    first_row, request = tl.load(about + 1, mask=real), tl.load(about + 2, mask=real)
    entry = page_table + request * table_row + tl.load(about + 3, mask=real) * table_column
    # In 64 bits: page × bytes of a page passes 2³¹ (F2).
    page = tl.load(entry, mask=real, other=0).to(tl.int64)
    source = page % world_size * rank_stride + page // world_size * page_stride + token * field_words
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    mask = real[:, None] & (word < field_words)
    values = tl.load(shards + field_start + source[:, None] + word, mask=mask)
    tl.store(view + (first_row + token)[:, None] * width + column + word, values, mask=mask)


def materialize(
    shards: torch.Tensor, page_table: torch.Tensor, valid: Ints, page_size: int, fields: Ints
) -> torch.Tensor:
    """V1: all valid tokens of all requests, in order, from the pages of all ranks."""
    view = shards.new_empty(sum(valid), sum(fields))
    pages = [
        [min(page_size, tokens - position * page_size), first + position * page_size, request, position]
        for request, (tokens, first) in enumerate(zip(valid, accumulate(valid, initial=0), strict=False))
        for position in range(-(-tokens // page_size))
    ]
    if not pages:
        return view
    if shards.stride(2) != 1:
        shards = shards.contiguous()  # no engine keeps the bytes of a page apart
    source, target = as_words(shards, view, *fields)
    about, slots = on_device(pages, shards.device), len(pages) * page_size
    start = column = 0
    for words in (field // target.itemsize for field in fields):  # a page holds field 0 of all its tokens …
        block, columns = tile(slots, 64), tile(words, 64)
        _copy_pages[triton.cdiv(slots, block), triton.cdiv(words, columns)](
            about, slots, page_size, source, page_table, target, *page_table.stride(), len(shards),
            *source.stride()[:2], target.shape[1], start, words, column, block, columns,
        )  # fmt: skip
        start, column = start + page_size * words, column + words  # … then field 1
    return view


# -- index_write: keys and scales into their places ----------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        *("n", "page_size", "dim", "page_stride", "byte_stride"),
        *("slot_stride", "key_stride", "element_stride", "scale_stride"),
    ]
)
def _write_index(
    pages, slots, keys, scales, n, page_size, dim, page_stride, byte_stride, slot_stride, key_stride,
    element_stride, scale_stride, TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token * slot_stride, mask=token < n, other=-1).to(tl.int64)
    mine = slot >= 0  # −1 is another rank's (O3)
    page, offset = pages + slot // page_size * page_stride, slot % page_size
    element = tl.arange(0, DIM)[None, :]
    mask = mine[:, None] & (element < dim)
    key = tl.load(keys + token[:, None] * key_stride + element * element_stride, mask=mask)
    tl.store(page[:, None] + (offset[:, None] * dim + element) * byte_stride, key, mask=mask)
    # Scales stand behind all keys of the page, not beside theirs (F1). In bytes: they need not be aligned.
    bits = tl.load(scales + token * scale_stride, mask=mine).to(tl.int32, bitcast=True)
    for byte in tl.static_range(4):
        place = page + (page_size * dim + 4 * offset + byte) * byte_stride
        tl.store(place, (bits >> 8 * byte).to(tl.uint8), mask=mine)


def index_write(
    pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, page_size: int
) -> None:
    """F1, F2, O3: keys and scales of tokens [n] into the pages, in place; a slot of −1 is not ours."""
    n, dim = keys.shape
    if n:
        block = tile(n, 32)
        _write_index[(triton.cdiv(n, block),)](
            pages, slots, keys, scales, n, page_size, dim, *pages.stride(), slots.stride(0), *keys.stride(),
            scales.stride(0), block, triton.next_power_of_2(dim),
        )  # fmt: skip


# -- sparse_mla: attention over chosen rows ------------------------------------------------------------------


@triton.jit(do_not_specialize=["heads", "k"])
def _attend(
    q, kv, chosen, out, lse, heads, k, latent, rope, sm_scale,
    q_row, q_head, q_column, kv_row, kv_column, chosen_row, chosen_column,
    PRODUCT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    value, turn = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    is_value, is_turn = value < latent, turn < rope
    start = q + row * q_row + head * q_head
    q_value = tl.load(start + value * q_column, mask=(head < heads) & is_value, other=0.0)
    q_turn = tl.load(start + (latent + turn) * q_column, mask=(head < heads) & is_turn, other=0.0)
    q_value, q_turn = q_value.to(PRODUCT), q_turn.to(PRODUCT)
    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, LATENT], tl.float32)
    for step in range(STEPS):
        place = step * KEYS + tl.arange(0, KEYS)
        key = tl.load(chosen + row * chosen_row + place * chosen_column, mask=place < k, other=-1)
        # What nobody chose is not loaded: it may be NaN, which a weight of 0 would not remove.
        there = (key >= 0)[:, None]
        start = kv + key.to(tl.int64)[:, None] * kv_row
        kv_value = tl.load(start + value * kv_column, mask=there & is_value, other=0.0).to(PRODUCT)
        kv_turn = tl.load(start + (latent + turn) * kv_column, mask=there & is_turn, other=0.0).to(PRODUCT)
        # "ieee": by default float32 is multiplied with 10 bits, beyond any budget.
        scores = tl.dot(q_value, tl.trans(kv_value), input_precision="ieee")
        scores = tl.dot(q_turn, tl.trans(kv_turn), scores, input_precision="ieee") * sm_scale
        scores = tl.where((key >= 0)[None, :], scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # no key yet: −inf − −inf would be NaN
        weights, kept = tl.exp(scores - base[:, None]), tl.exp(most - base)
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(PRODUCT), kv_value, sums * kept[:, None], input_precision="ieee")
        most = higher
    some = total > 0
    total = tl.where(some, total, 1.0)
    log_sum = tl.where(some, most + tl.log(total), -float("inf"))[:, None]
    place = row * heads + head
    tl.store(lse + place, log_sum, mask=head < heads)
    # `sums` is 0 where there was no key, and so is the result.
    mean = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place * latent + value, mean, mask=(head < heads) & is_value)


def sparse_mla(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A4: attention of each row over the rows of ``kv`` that it chose; 0 and −inf where it chose none."""
    m, heads, width = q.shape
    out, lse = q.new_empty(m, heads, latent), q.new_empty(m, heads, dtype=torch.float32)
    if m:
        k, rope = chosen.shape[1], width - latent
        block, keys = max(16, tile(heads, 16)), max(16, tile(k, 32))  # matrices of 16 rows at least
        _attend[m, triton.cdiv(heads, block)](
            q, kv, chosen, out, lse, heads, k, latent, rope, sm_scale,
            *q.stride(), *kv.stride(), *chosen.stride(),
            # The interpreter multiplies bfloat16 as the integers in which it keeps them.
            PRODUCT=tl.float32 if INTERPRETED or q.dtype == torch.float32 else tl.bfloat16,
            HEADS=block, KEYS=keys,
            # A constant of the model, rounded up so that few different ones are compiled.
            STEPS=triton.next_power_of_2(max(triton.cdiv(k, keys), 1)),
            LATENT=max(16, triton.next_power_of_2(latent)), ROPE=max(16, triton.next_power_of_2(rope)),
            num_warps=8,
        )  # fmt: skip
    return out, lse
