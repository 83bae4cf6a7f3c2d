"""What one forward does, as plain values: pages, who computes and owns them, the write, what each rank sends.

``cpkv show`` prints them as text (:mod:`sim.picture.strip`) or JSON, or draws them (:mod:`sim.picture.plot`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from refmodel.layout.ownership import current_slots, owner
from refmodel.layout.plan import Plan, Segment
from refmodel.layout.rows import buffer_rows
from refmodel.storage.view import view_layout
from refmodel.storage.write import WritePath, write_verdict
from sim.cases.case import Case, Forward, Turn

Source = Literal["cache", "new", "both"]


class Page(msgspec.Struct, frozen=True):
    """One page of a request: a cell of its ownership strip."""

    position: int  # page position in the request
    logical: int
    owner: int
    rows: int  # valid tokens, at most P
    source: Source  # where its rows come from; "both": the prefix ends inside
    computed_by: list[int]  # ranks that compute its new rows


class Piece(msgspec.Struct, frozen=True):
    """A segment: absolute positions [start, stop) of a request."""

    request: str
    start: int
    stop: int  # also its kv_stop


class Rank(msgspec.Struct, frozen=True):
    """What one rank computes and sends, for each cache and layer."""

    rank: int
    prev: list[Piece]
    next: list[Piece]
    rows: int  # local rows; without `prev` and `next` (round-robin) their only description
    padding_rows: int  # of them, rows of no request (S9)
    write_rows: int | None  # into the gathered write; null: a direct write sends nothing
    write_filler: int  # rows more, to the longest rank's
    view_pages: int
    view_filler: int  # pages more, to the longest rank's


class Strip(msgspec.Struct, frozen=True):
    """One request in a forward."""

    request: str
    prefix: int
    tokens: int
    rotation: int
    pages: list[Page]


class Anatomy(msgspec.Struct, frozen=True):
    """One forward."""

    step: int
    world_size: int
    page_size: int
    split: str
    write: str
    reason: str
    requests: list[Strip]
    ranks: list[Rank]


def anatomy(case: Case, forward: Forward) -> Anatomy:
    """Take a forward apart."""
    plan = forward.plan(case.grid, case.split)
    verdict = write_verdict(plan, current_slots(plan, forward.tables))
    return Anatomy(
        step=forward.step,
        world_size=case.grid.world_size,
        page_size=case.grid.page_size,
        split=case.split.value,
        write=verdict.path.value,
        reason=verdict.reason,
        requests=[_strip(turn, plan, i) for i, turn in enumerate(forward.turns)],
        ranks=list(_ranks(plan, forward, verdict.path)),
    )


def _strip(turn: Turn, plan: Plan, request: int) -> Strip:
    return Strip(
        request=turn.name,
        prefix=turn.extent.prefix,
        tokens=turn.extent.tokens,
        rotation=turn.rotation,
        pages=list(_pages(turn, plan, request)),
    )


def _pages(turn: Turn, plan: Plan, request: int) -> Iterator[Page]:
    P, first_row = plan.grid.page_size, plan.row_starts[request]
    rank_of_position = plan.rank_of_row[first_row : first_row + turn.extent.tokens].tolist()
    for position, logical in enumerate(turn.table.pages.tolist()):
        start, stop = position * P, min((position + 1) * P, turn.extent.end)
        new_from = max(start - turn.extent.prefix, 0)
        computed_by = set(rank_of_position[new_from : max(stop - turn.extent.prefix, 0)])
        yield Page(
            position=position,
            logical=logical,
            owner=owner(logical, plan.grid.world_size),
            rows=stop - start,
            source=_source(start, stop, turn.extent.prefix),
            computed_by=sorted(computed_by),
        )


def _source(start: int, stop: int, prefix: int) -> Source:
    if stop <= prefix:
        return "cache"
    return "new" if start >= prefix else "both"


def _ranks(plan: Plan, forward: Forward, path: WritePath) -> Iterator[Rank]:
    page_counts = view_layout(forward.tables, forward.valid, plan.grid).page_counts
    gathered = path is WritePath.GATHERED
    for rank, rows in enumerate(plan.row_counts):
        prev, following = plan.halves(rank)
        yield Rank(
            rank=rank,
            prev=_pieces(prev.segments, forward),
            next=_pieces(following.segments, forward),
            rows=rows,
            padding_rows=rows - prev.valid_rows - following.valid_rows,
            write_rows=rows if gathered else None,
            write_filler=plan.max_rank_rows - rows if gathered else 0,
            view_pages=page_counts[rank],
            view_filler=buffer_rows(page_counts) - page_counts[rank],
        )


def _pieces(segments: tuple[Segment, ...], forward: Forward) -> list[Piece]:
    return [Piece(forward.turns[s.request].name, s.start, s.stop) for s in segments if s.tokens]
