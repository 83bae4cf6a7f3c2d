"""Laws D1, D2: what the draft layer embeds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import plans
from refmodel.errors import FallbackWarning, InvalidInput
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.plan import PADDING, Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.serving.draft import embed_draft, embed_local, shifted

VOCAB = 97
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**16)


class Drafted:
    """Random tokens of each request of a batch, one more than the batch extends, and a random table."""

    def __init__(self, plan: Plan, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plan = plan
        self.tokens = [torch.randint(VOCAB, (e.tokens + 1,), generator=generator) for e in plan.extents]
        self.table = torch.randn(VOCAB, 3, generator=generator).to(dtype)

    @property
    def shifted(self) -> torch.Tensor:
        """What the function under test makes of them."""
        garbage = torch.full((self.plan.padding,), VOCAB)
        ids = torch.cat([*(tokens[:-1] for tokens in self.tokens), garbage])
        return shifted(ids, self.plan, [int(tokens[-1]) for tokens in self.tokens], vocab=VOCAB)

    def split_of_the_whole(self, rank: int) -> torch.Tensor:
        """From the definition: all rows embedded, then split."""
        padding = torch.full((self.plan.padding, 3), torch.nan, dtype=self.table.dtype)
        whole = torch.cat([*(self.table[tokens[1:]] for tokens in self.tokens), padding])
        return self.plan.take(whole, rank)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals NaN here: padding rows are compared too."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@proves("D1")
@given(plans(max_page=16), seeds)
def test_a_row_embeds_the_next_id_of_its_own_request(plan: Plan, seed: int) -> None:
    reached.note(plan)
    batch = Drafted(plan, seed)
    rows = zip(batch.shifted.tolist(), plan.request_of_row.tolist(), plan.positions.tolist(), strict=True)
    for drafted, request, position in rows:
        if request == PADDING:
            assert drafted == PADDING
        else:
            assert drafted == batch.tokens[request][position - plan.extents[request].prefix + 1]


@proves("D1")
@given(plans(max_page=16), seeds, dtypes)
def test_embedding_local_ids_is_splitting_the_full_embedding(
    plan: Plan, seed: int, dtype: torch.dtype
) -> None:
    batch = Drafted(plan, seed, dtype)
    for rank in range(plan.grid.world_size):
        embedded = embed_local(batch.table, plan.take(batch.shifted, rank), plan, rank)
        assert same_bits(embedded.rows, batch.split_of_the_whole(rank))


@proves("D2")
@given(plans(max_page=16), seeds)
def test_with_a_plan_of_its_batch_a_rank_embeds_as_many_rows_as_the_longest(plan: Plan, seed: int) -> None:
    batch = Drafted(plan, seed)
    made_elsewhere = replace(plan)
    for rank in range(plan.grid.world_size):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            embedded = embed_draft(batch.table, batch.shifted, plan, made_elsewhere, rank)
        assert embedded.rows_embedded == plan.max_rank_rows
        assert same_bits(embedded.rows, batch.split_of_the_whole(rank))


def left_over(batch: Plan) -> st.SearchStrategy[Plan | None]:
    """No plan, or one that is not the batch's: of any other, or of one that differs in one thing."""
    W, P = batch.grid.world_size, batch.grid.page_size
    first, *others = batch.extents
    turned = 0 if batch.split is Split.ROUND_ROBIN else 1
    near_misses = [
        replace(batch, rotations=tuple((b + turned) % W for b in batch.rotations)),
        replace(batch, extents=batch.extents[::-1]),
        replace(batch, extents=(Extent(first.prefix + 1, first.tokens), *others)),
        replace(batch, padding=batch.padding + 1),
        replace(batch, grid=Grid(W, P + 1)),
        replace(batch, grid=Grid(W + 1, P)),
    ]
    anything = st.none() | st.sampled_from(near_misses) | plans(max_page=16)
    return anything.filter(lambda plan: plan is None or _parts(plan) != _parts(batch))


def _parts(plan: Plan) -> tuple[object, ...]:
    return plan.grid, plan.split, plan.extents, plan.rotations, plan.padding


@proves("D1", "D2")
@given(st.data(), plans(max_page=16), seeds)
def test_without_a_plan_of_its_batch_every_rank_embeds_all_rows_and_warns(
    data: st.DataObject, plan: Plan, seed: int
) -> None:
    batch, stale = Drafted(plan, seed), data.draw(left_over(plan))
    said = []
    for rank in range(plan.grid.world_size):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            embedded = embed_draft(batch.table, batch.shifted, plan, stale, rank)
        said += [(warning.category, str(warning.message)) for warning in heard]
        assert embedded.rows_embedded == plan.num_rows
        assert same_bits(embedded.rows, batch.split_of_the_whole(rank))
    assert [category for category, _ in said] == [FallbackWarning] * plan.grid.world_size
    assert len(set(said)) == 1


TWO = plan_batch([Extent(0, 5), Extent(6, 3)], Grid(2, 64), Split.TOKEN_BALANCED, padding=1)


@pytest.mark.parametrize(
    ("stale", "reason"),
    [
        (None, "all 9 draft ids: there is no plan"),
        (replace(TWO, rotations=(1, 0)), "of another batch, with other rotations$"),
        (replace(TWO, extents=TWO.extents[:1], rotations=(0,)), "with other extents, rotations$"),
    ],
)
def test_the_warning_says_why(stale: Plan | None, reason: str) -> None:
    with pytest.warns(FallbackWarning, match=reason):
        embed_draft(torch.zeros(1, 2), torch.zeros(9, dtype=torch.int64), TWO, stale, rank=0)


@pytest.mark.parametrize(
    ("ids", "next_ids", "message"),
    [
        (range(8), [0, 0], r"draft ids: expected \[9\], got \[8\]"),
        (range(9), [0], "next ids: expected 2, one a request, got 1"),
        ([0, 0, 0, 0, 0, 0, 10, 0, 0], [0, 0], r"0 … 9, got 10 \(request 1, position 7\)"),
        ([0, -1, 0, 0, 0, 0, 0, 0, 0], [0, 0], r"0 … 9, got -1 \(request 0, position 1\)"),
        ([0] * 9, [11, 0], r"0 … 9, got 11 \(request 0, position 5\)"),
    ],
)
def test_wrong_ids_are_refused(ids: Sequence[int], next_ids: list[int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        shifted(torch.tensor(ids), TWO, next_ids, vocab=10)


def test_ids_of_another_length_are_refused() -> None:
    table = torch.zeros(1, 2)
    with pytest.raises(InvalidInput, match=r"local draft ids: expected \[5\], got \[4\] \(rank 0\)"):
        embed_local(table, torch.zeros(4, dtype=torch.int64), TWO, 0)
    with pytest.raises(InvalidInput, match=r"draft ids: expected \[9\], got \[8\]"):
        embed_draft(table, torch.zeros(8, dtype=torch.int64), TWO, TWO, 0)
