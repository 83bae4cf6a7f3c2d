"""What a draft layer (MTP, EAGLE) embeds: ids shifted by one, each rank its own rows (laws D1, D2).

A draft layer looks one token further: the row at position p embeds the id at p + 1, the last row of a request
its next token, which is the sampled one or, after a chunk, the next of the prompt. The shift comes before the
split: the row after the last of a segment lies on another rank.

>>> from refmodel.layout.geometry import Extent, Grid
>>> from refmodel.layout.plan import plan_batch
>>> from refmodel.layout.split import Split
>>> plan = plan_batch([Extent(0, 5), Extent(0, 3)], Grid(2, 64), Split.TOKEN_BALANCED)
>>> ids = shifted(torch.tensor([10, 11, 12, 13, 14, 20, 21, 22]), plan, [15, 23], vocab=30)
>>> plan.take(ids, 0).tolist(), plan.take(ids, 1).tolist()
([11, 12, 21, 15], [13, 22, 14, 23])
>>> embedded = embed_draft(torch.arange(30.0).unsqueeze(1), ids, plan, plan, rank=1)
>>> embedded.rows.flatten().tolist(), embedded.rows_embedded
([13.0, 22.0, 14.0, 23.0], 4)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from refmodel.errors import FallbackWarning, InvalidInput, Where
from refmodel.layout.plan import PADDING, Plan
from refmodel.layout.rows import pad_rows
from refmodel.model.layer import lookup


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """A rank's embedded rows, and what they cost."""

    rows: torch.Tensor  # [row_counts[rank], hidden], in local order
    rows_embedded: int  # rows looked up for them: max_rank_rows, or num_rows in the fallback (D2)


def shifted(ids: torch.Tensor, plan: Plan, next_ids: Sequence[int], *, vocab: int) -> torch.Tensor:
    """Ids of the batch rows [num_rows] → ids that the draft layer embeds [num_rows], both int64 on the CPU.

    Shifted by one inside each request, ``next_ids`` [requests] at the ends; −1 for padding rows, whose ids
    are not read. :class:`InvalidInput` for wrong lengths and for ids to embed outside 0 … vocab−1: the one
    place that looks at contents, so that the lookup need not ask the device (S7).
    """
    if ids.shape != (plan.num_rows,):
        raise InvalidInput("draft ids", expected=[plan.num_rows], received=list(ids.shape))
    if len(next_ids) != len(plan.extents):
        raise InvalidInput("next ids", expected=f"{len(plan.extents)}, one a request", received=len(next_ids))
    last_rows = torch.tensor(plan.row_starts[1:]) - 1
    moved = ids[: plan.real_rows].roll(-1).index_put_((last_rows,), torch.tensor(next_ids))
    _check_vocabulary(moved, plan, vocab)
    return torch.cat([moved, moved.new_full((plan.padding,), PADDING)])


def _check_vocabulary(moved: torch.Tensor, plan: Plan, vocab: int) -> None:
    outside = ((moved < 0) | (moved >= vocab)).nonzero().flatten()
    if len(outside):
        row = int(outside[0])
        request, position = int(plan.request_of_row[row]), int(plan.positions[row]) + 1
        raise InvalidInput(
            "draft id",
            expected=f"0 … {vocab - 1}",
            received=int(moved[row]),
            where=Where(request=str(request), position=position),
        )


def embed_local(table: torch.Tensor, local_ids: torch.Tensor, plan: Plan, rank: int) -> Embedded:
    """Embed the rank's ids [row_counts[rank]] only: padded to max_rank_rows, looked up, trimmed (D1).

    Padded, so that all ranks run one shape, a rank without rows too. ``table`` [vocab, hidden], floating
    point, on the device of the ids; padding rows embed as NaN (S9).
    """
    mine = len(plan.rows(rank))
    if local_ids.shape != (mine,):
        raise InvalidInput(
            "local draft ids",
            expected=[mine],
            received=list(local_ids.shape),
            where=Where(rank=rank),
            fix="Take them from the shifted ids with the same plan.",
        )
    buffer = lookup(table, pad_rows(local_ids, plan.max_rank_rows))
    return Embedded(buffer[:mine], len(buffer))


def embed_draft(
    table: torch.Tensor, ids: torch.Tensor, batch: Plan, plan: Plan | None, rank: int
) -> Embedded:
    """The rank's rows of the batch, embedded locally if ``plan`` is a plan of this batch (D2).

    ``ids`` [num_rows] from :func:`shifted`, on the CPU; ``table`` [vocab, hidden] on any device. ``batch``
    is the batch being served, as all ranks split it; ``plan`` what came with this pass: it may be missing,
    or be left over from another batch. Then the rank looks up all ids, warns, and keeps its rows. Either
    way the caller gets the same local rows. All ranks decide alike, as their plans are alike.
    """
    if ids.shape != (batch.num_rows,):
        raise InvalidInput("draft ids", expected=[batch.num_rows], received=list(ids.shape))
    reason = why_unfit(plan, batch)
    if plan is not None and reason is None:
        return embed_local(table, _to(plan.take(ids, rank), table), plan, rank)
    warnings.warn(
        f"every rank embeds all {batch.num_rows} draft ids: {reason}", FallbackWarning, stacklevel=2
    )
    everything = lookup(table, _to(ids, table))
    return Embedded(everything[_to(batch.rows(rank), table)], len(everything))


def _to(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """From the CPU to the table's device, without waiting for what is queued there (S7)."""
    return index.to(table.device, non_blocking=True)


def why_unfit(plan: Plan | None, batch: Plan) -> str | None:
    """Why local rows cannot be taken with ``plan``: it is missing or stale. None if it is the batch's.

    Everything that makes a plan must be equal. Equal numbers of rows are not enough: with another rotation,
    say, the same number of other rows.
    """
    if plan is None:
        return "there is no plan"
    parts = [part.name for part in fields(Plan)]
    other = [name for name in parts if getattr(plan, name) != getattr(batch, name)]
    return f"the plan is of another batch, with other {', '.join(other)}" if other else None
