"""Wrong kernels of the operations on slots and pages in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.layout.geometry import coverage
from refmodel.ops.layout import CURRENT_REUSE_REMAP, LOGICAL_TO_PHYSICAL, TRANSFER_PAIRS

Tensor = torch.Tensor

# -- logical_to_physical, owner_mask -----------------------------------------------------------------------


@adversary("logical_to_physical", law="O2")
def logical_slots_of_its_own(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """A rank's own slots stay group-wide: beyond the end of its storage."""
    mine = (slots >= 0) & (slots // page_size % world_size == rank)
    return torch.where(mine, slots, -1)


@adversary("logical_to_physical", law="O2")
def pages_of_64(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Pages have 64 slots, whatever the page size."""
    return LOGICAL_TO_PHYSICAL.reference(slots, rank, world_size, 64)[0]


@adversary("logical_to_physical", law="O2")
def memory_read_as_int32(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Slots are read as int32, whatever their dtype: of int64, every other one is an upper half."""
    halves = slots.contiguous().view(torch.int32)[: len(slots)]
    return LOGICAL_TO_PHYSICAL.reference(halves, rank, world_size, page_size)[0].to(slots.dtype)


@adversary("owner_mask", law="O1")
def minus_one_has_an_owner(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """−1 is taken for a slot of page −1: the last rank owns it."""
    return slots // page_size % world_size == rank


@adversary("owner_mask", law="O1")
def owned_token_by_token(slots: Tensor, rank: int, world_size: int, page_size: int) -> Tensor:
    """Slots go round the ranks, not pages: right for pages of one slot."""
    return (slots >= 0) & (slots % world_size == rank)


# -- tail_mask ---------------------------------------------------------------------------------------------


@adversary("tail_mask", law="V2")
def every_slot(valid: Tensor, page_size: int, num_slots: int) -> Tensor:
    """All slots of a page count: right for full pages."""
    return torch.ones(num_slots, dtype=torch.bool, device=valid.device)


@adversary("tail_mask", law="V2")
def tail_of_the_last_request(valid: Tensor, page_size: int, num_slots: int) -> Tensor:
    """Only what is behind all tokens of the batch is masked: right for one request."""
    return torch.arange(num_slots, device=valid.device) < valid.sum()


@adversary("tail_mask", law="V2")
def one_slot_too_many(valid: Tensor, page_size: int, num_slots: int) -> Tensor:
    """The slot behind the last token counts: right for full pages."""
    spans = [torch.arange(coverage(tokens, page_size)) <= tokens for tokens in valid.tolist()]
    return torch.cat(spans).to(valid.device)


# -- current_reuse_remap -----------------------------------------------------------------------------------


@adversary("current_reuse_remap", law="V3")
def pages_follow_each_other(
    slots: Tensor, pages: Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Tensor:
    """Positions are counted from the first page's slot: right where pages follow each other."""
    position = slots - (pages[:1].sum() * page_size).to(slots.dtype)
    return torch.where((position >= first) & (position < stop), position - first + first_row, -1)


@adversary("current_reuse_remap", law="V3")
def nearest_page_found(
    slots: Tensor, pages: Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Tensor:
    """The page found is not compared with the one looked for: slots of other requests get rows."""
    if not len(pages):
        return torch.full_like(slots, -1)
    ordered, positions = pages.sort()
    found = torch.searchsorted(ordered, (slots // page_size).to(ordered.dtype)).clamp(max=len(pages) - 1)
    position = positions[found] * page_size + slots % page_size
    wanted = (slots >= 0) & (position >= first) & (position < stop)
    return torch.where(wanted, position - first + first_row, -1).to(slots.dtype)


@adversary("current_reuse_remap", law="V3")
def minus_one_is_the_last_page(
    slots: Tensor, pages: Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Tensor:
    """Positions are looked up in a table by page, in which −1 is the last entry."""
    right = CURRENT_REUSE_REMAP.reference(slots, pages, first, stop, first_row, page_size)[0]
    if not len(pages):
        return right
    position = int(pages.argmax()) * page_size + page_size - 1
    row = position - first + first_row if first <= position < stop else -1
    return torch.where(slots == -1, row, right)


@adversary("current_reuse_remap", law="V3")
def prefix_floored_to_a_page(
    slots: Tensor, pages: Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Tensor:
    """Current rows begin with a page: right behind a prefix of whole pages (V4)."""
    start = first // page_size * page_size
    return CURRENT_REUSE_REMAP.reference(slots, pages, start, stop, first_row, page_size)[0]


@adversary("current_reuse_remap", law="V3")
def tail_page_whole(
    slots: Tensor, pages: Tensor, first: int, stop: int, first_row: int, page_size: int
) -> Tensor:
    """Slots past the last token get rows, too: right where the last page is full (V2)."""
    return CURRENT_REUSE_REMAP.reference(
        slots, pages, first, coverage(stop, page_size), first_row, page_size
    )[0]


# -- transfer_pairs ----------------------------------------------------------------------------------------


@adversary("transfer_pairs", law="T2")
def in_order_of_the_list(pages: Tensor, first_position: int, rank: int, world_size: int) -> Tensor:
    """The first page that a rank sends is the first of the request, and so on: not by position."""
    pairs = TRANSFER_PAIRS.reference(pages, first_position, rank, world_size)[0].clone()
    pairs[:, 1] = first_position + torch.arange(len(pairs), dtype=pairs.dtype, device=pairs.device)
    return pairs


@adversary("transfer_pairs", law="T2")
def positions_in_the_chunk(pages: Tensor, first_position: int, rank: int, world_size: int) -> Tensor:
    """Positions are counted from the chunk's first page: right for the first chunk."""
    return TRANSFER_PAIRS.reference(pages, 0, rank, world_size)[0]


@adversary("transfer_pairs", law="T2")
def pages_not_made_local(pages: Tensor, first_position: int, rank: int, world_size: int) -> Tensor:
    """Pages keep their group-wide numbers: right in a world of one."""
    pairs = TRANSFER_PAIRS.reference(pages, first_position, rank, world_size)[0].clone()
    pairs[:, 0] = pages[pages % world_size == rank]
    return pairs


@adversary("transfer_pairs", law="T2")
def ranges_of_page_numbers(pages: Tensor, first_position: int, rank: int, world_size: int) -> Tensor:
    """A rank sends a range of page numbers, from the smallest on: right where pages follow each other."""
    pairs = TRANSFER_PAIRS.reference(pages, first_position, rank, world_size)[0].clone()
    if len(pairs):
        share = -(-len(pages) // world_size)
        wanted = (pages - pages.min()) // share == rank
        found = wanted.nonzero().flatten()[: len(pairs)]
        pairs.zero_()
        pairs[: len(found), 0] = pages[found] // world_size
        pairs[: len(found), 1] = (first_position + found).to(pairs.dtype)
    return pairs


# -- validate_page_groups ----------------------------------------------------------------------------------


def _as_long(host: Tensor, device: Tensor, page_size: int) -> bool:
    return len(host) == len(device) and len(host) % page_size == 0


def _pages_in_order(slots: Tensor, page_size: int) -> bool:
    groups = slots.view(-1, page_size) if len(slots) else slots.view(0, page_size)
    in_order = groups == groups[:, :1] + torch.arange(page_size, device=slots.device)
    return bool(in_order.all() and (groups[:, 0] % page_size == 0).all())


def _each_once(slots: Tensor) -> bool:
    return len(slots.unique()) == len(slots)


def _answer(accepted: bool, beside: Tensor) -> Tensor:
    return torch.tensor(accepted, device=beside.device)


@adversary("validate_page_groups", law="H2")
def lengths_only(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """As many slots on both sides, and a multiple of P: nothing else is looked at."""
    return _answer(_as_long(host, device, page_size), host)


@adversary("validate_page_groups", law="H2")
def first_slots_only(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """Of each group only the first slot is looked at."""
    starts = torch.cat([host[::page_size], device[::page_size]])
    good = bool((starts % page_size == 0).all() and (starts >= 0).all())
    once = _each_once(host[::page_size]) and _each_once(device[::page_size])
    return _answer(_as_long(host, device, page_size) and good and once, host)


@adversary("validate_page_groups", law="H2")
def both_ends_only(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """Of each group only the first and the last slot are looked at."""
    accepted = first_slots_only(host, device, page_size)
    if not bool(accepted):
        return accepted
    sides = (host, device)
    whole = [(s[page_size - 1 :: page_size] == s[::page_size] + page_size - 1).all() for s in sides]
    return _answer(all(map(bool, whole)), host)


@adversary("validate_page_groups", law="H2")
def host_side_only(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """The device's slots are not looked at, but for how many there are."""
    good = _as_long(host, device, page_size) and _pages_in_order(host.contiguous(), page_size)
    return _answer(good and _each_once(host) and bool((host >= 0).all()), host)


@adversary("validate_page_groups", law="H2")
def repeats_accepted(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """A page may come twice."""
    good = _as_long(host, device, page_size) and bool((host >= 0).all() and (device >= 0).all())
    both = (host.contiguous(), device.contiguous())
    return _answer(good and all(_pages_in_order(side, page_size) for side in both), host)


@adversary("validate_page_groups", law="H2")
def negatives_accepted(host: Tensor, device: Tensor, page_size: int) -> Tensor:
    """A group may lie before slot 0, as long as it is a page."""
    both = (host.contiguous(), device.contiguous())
    good = _as_long(host, device, page_size) and all(_each_once(side) for side in both)
    return _answer(good and all(_pages_in_order(side, page_size) for side in both), host)
