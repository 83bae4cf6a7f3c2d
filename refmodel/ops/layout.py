"""Operations on rows, slots and pages: who has which (laws S1–S5, O1, O2, V2–V4, T2, H2, D1)."""

from __future__ import annotations

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid, coverage
from refmodel.layout.ownership import NO_SLOT, owned, owner, to_physical
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.rows import pad_rows
from refmodel.layout.split import Split
from refmodel.model.layer import lookup
from refmodel.ops.judges import equal_bytes
from refmodel.ops.op import Argument, Cost, Kind, Op, Result, Results, Space
from refmodel.serving.page_groups import check_page_groups
from refmodel.serving.transfer import pairs
from refmodel.storage.view import CompactTable

Ints = tuple[int, ...]

_SLOTS = Argument("slots", Kind.INDEX, "logical; −1 for none", "[n]")
PREFIXES = Argument("prefixes", Kind.INTS, "tokens of each request in cache", "[requests]")
TOKENS = Argument("tokens", Kind.INTS, "new tokens of each request", "[requests]")
WORLD_SIZE = Argument("world_size", Kind.INT, "W")
PAGE_SIZE = Argument("page_size", Kind.INT, "P")


def page_aligned_plan(prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Plan:
    """The page-aligned plan of requests with these ``prefixes`` and new ``tokens``; no rotation (S2)."""
    extents = [Extent(prefix, count) for prefix, count in zip(prefixes, tokens, strict=True)]
    return plan_batch(extents, Grid(world_size, page_size), Split.PAGE_ALIGNED)


def _zigzag_split(
    rows: torch.Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Results:
    """Of 5 tokens behind a prefix of 3, pages of 2: page positions 1, 2, 3, one a segment.

    >>> _zigzag_split(torch.tensor([[3], [4], [5], [6], [7]]), (3,), (5,), rank=1, world_size=2, page_size=2)
    (tensor([[4],
            [5],
            [6],
            [7]]),)
    """
    return (page_aligned_plan(prefixes, tokens, world_size, page_size).take(rows, rank),)


ZIGZAG_SPLIT = Op(
    name="zigzag_split",
    meaning="Batch rows → those of one rank: segment r of every request, then segment 2W−1−r of every one.",
    arguments=(
        Argument("rows", Kind.VALUES, "of the batch, in order", "[sum(tokens), width]"),
        PREFIXES,
        TOKENS,
        Argument("rank", Kind.INT, "whose rows"),
        WORLD_SIZE,
        PAGE_SIZE,
    ),
    results=(Result("local", "[rows of the rank, width]", "prev, then next; none is normal"),),
    reference=_zigzag_split,
    spaces=lambda rows, prefixes, tokens, rank, world_size, page_size: (
        Space(
            (page_aligned_plan(prefixes, tokens, world_size, page_size).row_counts[rank], *rows.shape[1:]),
            rows.dtype,
        ),
    ),
    judge=equal_bytes("S2"),
    compared="byte for byte",
    laws=("S1", "S2", "S3", "S5"),
    cost=lambda rows, prefixes, tokens, rank, world_size, page_size: Cost(
        2 * page_aligned_plan(prefixes, tokens, world_size, page_size).row_counts[rank] * rows[:1].nbytes
    ),
    row_width=lambda rows, prefixes, tokens, rank, world_size, page_size: rows.shape[-1],
)


def _rerange(buffers: torch.Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Results:
    """What :func:`_zigzag_split` took, gathered from both ranks; the first has fewer rows.

    >>> gathered = torch.tensor([[3], [-1], [-1], [-1], [4], [5], [6], [7]])
    >>> _rerange(gathered, (3,), (5,), world_size=2, page_size=2)[0].flatten()
    tensor([3, 4, 5, 6, 7])
    """
    return (page_aligned_plan(prefixes, tokens, world_size, page_size).rerange(buffers),)


RERANGE = Op(
    name="rerange",
    meaning="Rows as a gather of all ranks brings them, padded to the longest rank → batch order.",
    arguments=(
        Argument("buffers", Kind.VALUES, "of all ranks, each padded", "[world_size × most rows, width]"),
        PREFIXES,
        TOKENS,
        WORLD_SIZE,
        PAGE_SIZE,
    ),
    results=(Result("rows", "[sum(tokens), width]", "in batch order; padding never leaks"),),
    reference=_rerange,
    spaces=lambda buffers, prefixes, tokens, world_size, page_size: (
        Space((sum(tokens), *buffers.shape[1:]), buffers.dtype),
    ),
    judge=equal_bytes("S4"),
    compared="byte for byte",
    laws=("S1", "S3", "S4"),
    cost=lambda buffers, prefixes, tokens, world_size, page_size: Cost(
        2 * sum(tokens) * buffers[:1].nbytes,
    ),
    row_width=lambda buffers, prefixes, tokens, world_size, page_size: buffers.shape[-1],
)


def _logical_to_physical(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> Results:
    """
    >>> _logical_to_physical(torch.tensor([453, 512, -1]), rank=3, world_size=4, page_size=64)
    (tensor([69, -1, -1]),)
    """
    return (to_physical(slots, rank, Grid(world_size, page_size)),)


LOGICAL_TO_PHYSICAL = Op(
    name="logical_to_physical",
    meaning="Group-wide slots → slots of one rank's storage, −1 where another rank owns them.",
    arguments=(_SLOTS, Argument("rank", Kind.INT, "whose storage"), WORLD_SIZE, PAGE_SIZE),
    results=(Result("physical", "[n]", "of the dtype of slots"),),
    reference=_logical_to_physical,
    spaces=lambda slots, rank, world_size, page_size: (Space(tuple(slots.shape), slots.dtype),),
    judge=equal_bytes("O2"),
    compared="byte for byte",
    laws=("O1", "O2"),
    cost=lambda slots, rank, world_size, page_size: Cost(2 * slots.nbytes),
)


def _owner_mask(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> Results:
    """
    >>> _owner_mask(torch.tensor([453, 512, -1]), rank=3, world_size=4, page_size=64)
    (tensor([ True, False, False]),)
    """
    return (owned(slots, rank, Grid(world_size, page_size)),)


OWNER_MASK = Op(
    name="owner_mask",
    meaning="Which group-wide slots one rank owns; −1 is nobody's.",
    arguments=(_SLOTS, Argument("rank", Kind.INT, "whose"), WORLD_SIZE, PAGE_SIZE),
    results=(Result("mine", "[n]", "bool; true where the rank owns the slot"),),
    reference=_owner_mask,
    spaces=lambda slots, rank, world_size, page_size: (Space(tuple(slots.shape), torch.bool),),
    judge=equal_bytes("O1"),
    compared="byte for byte",
    laws=("O1",),
    cost=lambda slots, rank, world_size, page_size: Cost(slots.nbytes + slots.numel()),
)


def _tail_mask(valid: torch.Tensor, page_size: int, num_slots: int) -> Results:
    """
    >>> _tail_mask(torch.tensor([3, 0, 2]), page_size=2, num_slots=6)
    (tensor([ True,  True,  True, False,  True,  True]),)
    """
    lengths = valid.tolist()
    spans = [torch.arange(coverage(tokens, page_size)) < tokens for tokens in lengths]
    return (torch.cat(spans).to(valid.device),)


TAIL_MASK = Op(
    name="tail_mask",
    meaning="Which slots of whole pages hold a token: false in a tail page past its request's length.",
    arguments=(
        Argument("valid", Kind.INDEX, "tokens of each request", "[requests]"),
        PAGE_SIZE,
        Argument("num_slots", Kind.INT, "of all pages: the sum of each request's coverage"),
    ),
    results=(Result("real", "[num_slots]", "bool; true for tokens, in batch and position order"),),
    reference=_tail_mask,
    spaces=lambda valid, page_size, num_slots: (Space((num_slots,), torch.bool),),
    judge=equal_bytes("V2"),
    compared="byte for byte",
    laws=("V2",),
    cost=lambda valid, page_size, num_slots: Cost(valid.nbytes + num_slots),
)


def _current_reuse_remap(
    slots: torch.Tensor, pages: torch.Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Results:
    """Pages 9, 5 of 4 slots hold positions 0 … 7, of which 3 … 5 are current, in rows 10 … 12.

    >>> _current_reuse_remap(torch.tensor([38, 39, 20, 21, 22, -1]), torch.tensor([9, 5]), 3, 6, 10, 4)
    (tensor([-1, 10, 11, 12, -1, -1]),)
    """
    by_page = torch.argsort(pages.long())
    from_zero = CompactTable(page_size, pages.long()[by_page], by_page, first_row - first, stop)
    rows = from_zero.rows_of(slots.long())
    return (torch.where(rows >= first_row, rows, NO_SLOT).to(slots.dtype),)


CURRENT_REUSE_REMAP = Op(
    name="current_reuse_remap",
    meaning="Logical slots of one request → compact rows that hold its positions [first, stop), else −1.",
    arguments=(
        Argument("slots", Kind.INDEX, "logical, of any request; −1 for none", "[n]"),
        Argument("pages", Kind.INDEX, "logical, of the request, by position", "[pages]"),
        Argument("first", Kind.INT, "position of the first row: the prefix for current rows, 0 for history"),
        Argument("stop", Kind.INT, "position behind the last row"),
        Argument("first_row", Kind.INT, "row of position `first`"),
        PAGE_SIZE,
    ),
    results=(Result("rows", "[n]", "first_row + (position − first), else −1; of the dtype of slots"),),
    reference=_current_reuse_remap,
    spaces=lambda slots, pages, first, stop, first_row, page_size: (Space(tuple(slots.shape), slots.dtype),),
    judge=equal_bytes("V3"),
    compared="byte for byte",
    laws=("V2", "V3", "V4"),
    cost=lambda slots, pages, first, stop, first_row, page_size: Cost(2 * slots.nbytes + pages.nbytes),
)


def _transfer_pairs(pages: torch.Tensor, first_position: int, rank: int, world_size: int) -> Results:
    """
    >>> _transfer_pairs(torch.tensor([4, 9, 12]), first_position=0, rank=0, world_size=4)
    (tensor([[1, 0],
            [3, 2]]),)
    """
    mine = pairs(pages.tolist(), first_position, rank, world_size)
    return (torch.tensor(mine, dtype=pages.dtype, device=pages.device).view(-1, 2),)


TRANSFER_PAIRS = Op(
    name="transfer_pairs",
    meaning="Pages of one request → what a rank sends of them: where it keeps a page, and which page it is.",
    arguments=(
        Argument("pages", Kind.INDEX, "logical, by position; none is a dummy", "[n]"),
        Argument("first_position", Kind.INT, "page position of the first"),
        Argument("rank", Kind.INT, "who sends"),
        WORLD_SIZE,
    ),
    results=(Result("pairs", "[m, 2]", "(local page, page position), rising positions; of pages' dtype"),),
    reference=_transfer_pairs,
    spaces=lambda pages, first_position, rank, world_size: (
        Space((int((owner(pages, world_size) == rank).sum()), 2), pages.dtype),
    ),
    judge=equal_bytes("T2"),
    compared="byte for byte",
    laws=("T2", "T3"),
    cost=lambda pages, first_position, rank, world_size: Cost(pages.nbytes),
)


def _validate_page_groups(host: torch.Tensor, device: torch.Tensor, page_size: int) -> Results:
    """
    >>> _validate_page_groups(torch.tensor([4, 5, 0, 1]), torch.tensor([2, 3, 8, 9]), page_size=2)
    (tensor(True),)
    >>> _validate_page_groups(torch.tensor([4, 5, 0, 1]), torch.tensor([2, 3, 7, 8]), page_size=2)
    (tensor(False),)
    """
    try:
        check_page_groups(host.cpu(), device.cpu(), page_size)
    except InvalidInput:
        return (torch.tensor(False, device=host.device),)
    return (torch.tensor(True, device=host.device),)


VALIDATE_PAGE_GROUPS = Op(
    name="validate_page_groups",
    meaning="Whether the slots of a copy between host and device are whole pages on both sides.",
    arguments=(
        Argument("host", Kind.INDEX, "slots of the host, P of them a page", "[n]"),
        Argument("device", Kind.INDEX, "slots of the device; may be another number", "[m]"),
        PAGE_SIZE,
    ),
    results=(Result("accepted", "[]", "bool; true only if the copy may begin"),),
    reference=_validate_page_groups,
    spaces=lambda host, device, page_size: (Space((), torch.bool),),
    judge=equal_bytes("H2"),
    compared="byte for byte",
    laws=("H2",),
    cost=lambda host, device, page_size: Cost(host.nbytes + device.nbytes),
)


def _local_embedding(ids: torch.Tensor, table: torch.Tensor, max_rank_rows: int) -> Results:
    """
    >>> _local_embedding(torch.tensor([2, 0]), torch.tensor([[0.0], [1.0], [2.0]]), max_rank_rows=3)
    (tensor([[2.],
            [0.]]),)
    """
    return (lookup(table, pad_rows(ids, max_rank_rows))[: len(ids)],)


LOCAL_EMBEDDING = Op(
    name="local_embedding",
    meaning="Ids of one rank's rows → their embeddings, looked up in a buffer that is equally long on all.",
    arguments=(
        Argument("ids", Kind.INDEX, "0 … vocab−1", "[n]"),
        Argument("table", Kind.VALUES, "embedding of each id", "[vocab, hidden]"),
        Argument("max_rank_rows", Kind.INT, "rows of the longest rank; at least n"),
    ),
    results=(Result("rows", "[n, hidden]", "trimmed: padding never leaks; none is normal"),),
    reference=_local_embedding,
    spaces=lambda ids, table, max_rank_rows: (Space((*ids.shape, *table.shape[1:]), table.dtype),),
    judge=equal_bytes("D1"),
    compared="byte for byte",
    laws=("D1",),
    cost=lambda ids, table, max_rank_rows: Cost(ids.nbytes + 2 * ids.numel() * table[:1].nbytes),
    row_width=lambda ids, table, max_rank_rows: table.shape[-1],
)
