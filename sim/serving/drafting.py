"""The draft layer's embedding of a forward's rows, on one rank (laws D1, D2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from refmodel.errors import Finding, Where
from refmodel.layout.plan import Plan
from refmodel.model.shape import TINY
from refmodel.serving.draft import Embedded, embed_draft, shifted
from sim.cases.arithmetic import token_ids
from sim.cases.case import Case, Forward


@dataclass(frozen=True, slots=True)
class Drafted:
    """What came of a forward's draft rows on one rank."""

    fell_back: bool
    findings: tuple[Finding, ...]


def embed_draft_rows(case: Case, index: int, rank: int) -> Drafted:
    """Embed the draft ids of forward ``index``, with the plan that the case brings, and check the rows."""
    forward = case.forwards[index]
    batch, given = forward.plan(case.grid, case.split), _given_plan(case, index)
    table = torch.arange(TINY.vocab, dtype=torch.float32)[:, None]  # a row says whose it is
    next_ids = [_id(turn.request, turn.extent.end) for turn in forward.turns]
    ids = shifted(_ids(forward), batch, next_ids, vocab=TINY.vocab)
    embedded = embed_draft(table, ids, batch, given, rank)
    fell_back = not _is_of_this_batch(case, index)
    return Drafted(fell_back, tuple(_wrong(embedded, forward, batch, rank, fell_back)))


def _given_plan(case: Case, index: int) -> Plan | None:
    forward = case.forwards[index]
    if forward.draft == "missing":
        return None
    source = case.forwards[index - 1] if forward.draft == "stale" else forward
    return source.plan(case.grid, case.split)


def _is_of_this_batch(case: Case, index: int) -> bool:
    """From the case, not from plans: a stale plan may happen to fit."""
    forward = case.forwards[index]
    if forward.draft != "stale":
        return forward.draft == "current"
    before = case.forwards[index - 1]
    sizes = [[(turn.extent, turn.rotation) for turn in each.turns] for each in (before, forward)]
    return sizes[0] == sizes[1] and before.padding == forward.padding


def _ids(forward: Forward) -> torch.Tensor:
    """Ids of the batch rows; those of padding rows are not read."""
    real = [
        token_ids(turn.request, turn.extent.end, TINY.vocab)[turn.extent.prefix :] for turn in forward.turns
    ]
    return torch.cat([*real, torch.full((forward.padding,), TINY.vocab)])


def _id(request: int, position: int) -> int:
    return int(token_ids(request, position + 1, TINY.vocab)[position])


def _wrong(
    embedded: Embedded, forward: Forward, batch: Plan, rank: int, fell_back: bool
) -> Iterator[Finding]:
    where = Where(step=forward.step, rank=rank)
    expected = []
    for row in batch.rows(rank).tolist():
        request, position = int(batch.request_of_row[row]), int(batch.positions[row])
        expected.append(float(_id(forward.turns[request].request, position + 1)) if request >= 0 else None)
    received = [None if value != value else value for value in embedded.rows.flatten().tolist()]
    if received != expected:
        yield Finding("D1", "draft rows of a rank, by the id embedded", str(expected), str(received), where)
    rows = batch.num_rows if fell_back else batch.max_rank_rows
    if embedded.rows_embedded != rows:
        yield Finding("D2", "rows embedded on a rank", str(rows), str(embedded.rows_embedded), where)
