"""Operations of :mod:`refmodel.ops.layout`, each against loops over tokens, slots or pages."""

from __future__ import annotations

from typing import TypeVar

import torch
from hypothesis import given

from properties.kernels.cases.case import Case
from properties.kernels.cases.layout import LocalEmbedding, Rerange, ZigzagSplit
from properties.kernels.cases.slots import (
    CurrentReuseRemap,
    LogicalToPhysical,
    OwnerMask,
    TailMask,
    TransferPairs,
    ValidatePageGroups,
)
from properties.proofs import proves

C = TypeVar("C", bound=Case)
Ints = tuple[int, ...]


def _outcome(case: Case) -> torch.Tensor:
    (result,) = case.op.reference(**case.arguments())
    return result


# -- rows, by dealing out pages one by one -----------------------------------------------------------------


def segments(prefix: int, tokens: int, world_size: int, page_size: int) -> list[list[int]]:
    """New tokens of each of the 2W segments, counted from the first: a unit is a page that holds any."""
    units: dict[int, list[int]] = {}
    for position in range(prefix, prefix + tokens):
        units.setdefault(position // page_size, []).append(position - prefix)
    pages = list(units.values())
    base, more = divmod(len(pages), 2 * world_size)
    dealt = []
    for segment in range(2 * world_size):
        mine = [pages.pop(0) for _ in range(base + (1 if segment < more else 0))]
        dealt.append([token for page in mine for token in page])
    assert not pages
    return dealt


def rows_of_rank(prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int) -> list[int]:
    """Batch rows of a rank: segment r of every request, then segment 2W−1−r of every request."""
    starts = [sum(tokens[:request]) for request in range(len(tokens))]
    cut = [segments(p, n, world_size, page_size) for p, n in zip(prefixes, tokens, strict=True)]
    halves = (rank, 2 * world_size - 1 - rank)
    return [
        start + token
        for half in halves
        for start, mine in zip(starts, cut, strict=True)
        for token in mine[half]
    ]


@proves("S1", "S2", "S3")
@given(ZigzagSplit.strategy())
def test_a_rank_takes_the_pages_that_are_dealt_to_it(case: ZigzagSplit) -> None:
    rows = case.arguments()["rows"]
    mine = rows_of_rank(case.prefixes, case.tokens, case.rank, case.world, case.page)
    assert torch.equal(_outcome(case), torch.stack([rows[row] for row in mine]) if mine else rows[:0])


@proves("S4")
@given(Rerange.strategy())
def test_every_row_comes_back_from_the_place_where_its_rank_put_it(case: Rerange) -> None:
    buffers, rows = case.arguments()["buffers"], _outcome(case)
    seen = 0
    for rank, buffer in enumerate(buffers.chunk(case.world)):
        mine = rows_of_rank(case.prefixes, case.tokens, rank, case.world, case.page)
        assert torch.equal(rows[mine], buffer[: len(mine)])
        assert bool(buffer[len(mine) :].isnan().all()), "padding that is not poison"
        seen += len(mine)
    assert seen == len(rows)


@proves("D1")
@given(LocalEmbedding.strategy())
def test_each_id_gets_its_own_row_of_the_table(case: LocalEmbedding) -> None:
    given_ = case.arguments()
    rows = [given_["table"][token] for token in given_["ids"].tolist()]
    assert torch.equal(_outcome(case), torch.stack(rows) if rows else given_["table"][:0])


# -- slots, by filling the ranks page after page -----------------------------------------------------------


def stored(world_size: int, page_size: int, pages: int) -> dict[int, tuple[int, int]]:
    """Logical slot → (rank, physical slot): pages are dealt to the ranks in turn, slots follow each other."""
    filled = [0] * world_size
    where = {}
    for page in range(pages):
        rank = page % world_size
        for offset in range(page_size):
            where[page * page_size + offset] = (rank, filled[rank])
            filled[rank] += 1
    return where


@proves("O1", "O2")
@given(LogicalToPhysical.strategy())
def test_a_slot_lies_where_filling_page_after_page_puts_it(case: LogicalToPhysical) -> None:
    where = stored(case.world, case.page, 8 * case.world)
    wanted = []
    for slot in case.arguments()["slots"].tolist():
        rank, physical = where.get(slot, (None, -1))
        wanted.append(physical if rank == case.rank else -1)
    assert _outcome(case).tolist() == wanted


@proves("O1")
@given(OwnerMask.strategy())
def test_a_slot_is_owned_by_the_rank_that_filling_gives_it_to(case: OwnerMask) -> None:
    where = stored(case.world, case.page, 8 * case.world)
    wanted = [slot in where and where[slot][0] == case.rank for slot in case.arguments()["slots"].tolist()]
    assert _outcome(case).tolist() == wanted


@proves("V2")
@given(TailMask.strategy())
def test_a_slot_is_real_if_a_token_is_in_it(case: TailMask) -> None:
    wanted = []
    for tokens in case.valid:
        page: list[bool] = []
        while tokens > 0 or page:
            page.append(tokens > 0)
            tokens -= 1
            if len(page) == case.page:
                wanted += page
                page = []
    assert _outcome(case).tolist() == wanted


@proves("V2", "V3", "V4")
@given(CurrentReuseRemap.strategy())
def test_a_slot_maps_to_the_row_of_the_token_in_it(case: CurrentReuseRemap) -> None:
    given_ = case.arguments()
    tokens = [page * case.page + offset for page in given_["pages"].tolist() for offset in range(case.page)]
    row_of = {
        slot: case.first_row + position - case.first
        for position, slot in enumerate(tokens)
        if case.first <= position < case.stop
    }
    assert _outcome(case).tolist() == [row_of.get(slot, -1) for slot in given_["slots"].tolist()]


# -- pages -------------------------------------------------------------------------------------------------


@proves("T2")
@given(TransferPairs.strategy())
def test_a_rank_sends_its_pages_by_position(case: TransferPairs) -> None:
    pages = case.arguments()["pages"].tolist()
    where = stored(case.world, 1, max(pages, default=0) + 1)
    wanted = [
        [where[page][1], case.first_position + index]
        for index, page in enumerate(pages)
        if where[page][0] == case.rank
    ]
    assert _outcome(case).tolist() == wanted


@proves("T3")
@given(TransferPairs.strategy())
def test_over_the_ranks_each_position_is_sent_once(case: TransferPairs) -> None:
    given_ = case.arguments()
    sent = [case.op.reference(**{**given_, "rank": rank})[0][:, 1] for rank in range(case.world)]
    assert sorted(torch.cat(sent).tolist()) == [case.first_position + i for i in range(case.pages)]


@proves("H2")
@given(ValidatePageGroups.strategy())
def test_a_copy_is_accepted_if_each_side_is_a_list_of_whole_pages(case: ValidatePageGroups) -> None:
    given_ = case.arguments()
    host, device = given_["host"].tolist(), given_["device"].tolist()
    assert _outcome(case).item() == (
        len(host) == len(device) and _whole_pages(host, case.page) and _whole_pages(device, case.page)
    )


def _whole_pages(slots: list[int], page_size: int) -> bool:
    left, pages = list(slots), []
    while left:
        group, left = left[:page_size], left[page_size:]
        page = group[0] // page_size
        if page < 0 or group != [page * page_size + offset for offset in range(page_size)]:
            return False
        pages.append(page)
    return len(pages) == len(set(pages))
