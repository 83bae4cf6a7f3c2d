"""Wrong embeddings of the draft layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout.plan import Plan
from refmodel.model import layer
from refmodel.serving import draft
from refmodel.serving.draft import Embedded, why_unfit


@mutant(draft.shifted, "draft-01", "D1", source="derived from the fork's history")
def sliced_before_the_shift(
    right: Right, ids: torch.Tensor, plan: Plan, next_ids: Sequence[int], *, vocab: int
) -> torch.Tensor:
    """Each rank shifts the slice it holds: a segment ends with an id from further on, or the next token."""
    wrong = right(ids, plan, next_ids, vocab=vocab)
    for rank in range(plan.grid.world_size):
        rows = plan.rows(rank)
        for request, token in enumerate(next_ids):
            mine = rows[plan.request_of_row[rows] == request]
            wrong[mine] = torch.cat([ids[mine], torch.tensor([token])])[1:]
    return wrong


@mutant(draft.shifted, "shift-over-the-batch", "D1")
def shifted_over_the_whole_batch(
    right: Right, ids: torch.Tensor, plan: Plan, next_ids: Sequence[int], *, vocab: int
) -> torch.Tensor:
    """The batch is shifted as one: the last row of a request gets the first id of the next request."""
    moved = right(ids, plan, next_ids, vocab=vocab)
    for request, end in enumerate(plan.row_starts[1:-1], start=1):
        moved[end - 1] = ids[plan.row_starts[request]]
    return moved


@mutant(draft.shifted, "request-ends-unshifted", "D1")
def last_row_keeps_its_id(
    right: Right, ids: torch.Tensor, plan: Plan, next_ids: Sequence[int], *, vocab: int
) -> torch.Tensor:
    """The last row of a request keeps its own id: the next token is not known to the shift."""
    return right(ids, plan, [int(ids[end - 1]) for end in plan.row_starts[1:]], vocab=vocab)


@mutant(layer.lookup, "padding-is-the-last-id", "D1")
def minus_one_indexes_the_table(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """−1 is looked up: padding rows get the last row of the table, which looks like a real one."""
    return table[ids]


@mutant(draft.embed_local, "average-draft-buffer", "D1", "D2")
def padded_to_the_average(
    right: Right, table: torch.Tensor, local_ids: torch.Tensor, plan: Plan, rank: int
) -> Embedded:
    """Local ids are padded to ceil(n / W): the longest rank loses rows."""
    average = -(-plan.num_rows // plan.grid.world_size)
    return Embedded(right(table, local_ids, plan, rank).rows[:average], average)


@mutant(draft.why_unfit, "draft-03", "D2", source="derived from the fork's history")
def any_plan_fits(right: Right, plan: Plan | None, batch: Plan) -> str | None:
    """Whether a plan is stale is not checked: local ids go by another batch's row counts."""
    return right(plan, batch) if plan is None else None


@mutant(draft.why_unfit, "equal-row-counts-fit", "D2", source="derived from sglang's check")
def equal_row_counts_fit(right: Right, plan: Plan | None, batch: Plan) -> str | None:
    """A plan counts as the batch's if its row counts agree, though they be counts of other rows."""
    return None if plan and plan.row_counts == batch.row_counts else right(plan, batch)


@mutant(draft.embed_draft, "every-id-on-every-rank", "D2")
def all_ids_although_planned(
    right: Right, table: torch.Tensor, ids: torch.Tensor, batch: Plan, plan: Plan | None, rank: int
) -> Embedded:
    """With a plan, too, every rank embeds all ids: right rows, W times the peak."""
    if why_unfit(plan, batch):
        return right(table, ids, batch, plan, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return right(table, ids, batch, None, rank)


@mutant(draft.embed_draft, "lost-plan-unnoticed", "D2")
def fallback_by_a_plan_of_its_own(
    right: Right, table: torch.Tensor, ids: torch.Tensor, batch: Plan, plan: Plan | None, rank: int
) -> Embedded:
    """Without a plan of the batch the rank quietly makes one: nobody learns that a plan was lost."""
    return right(table, ids, batch, batch, rank)
