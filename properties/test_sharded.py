"""Law A6: attention of every rank to its own keys, merged, against attention over the full view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import Placed, placed
from refmodel.attention.indexer import mqa_logits
from refmodel.attention.merge import merge_attended, merge_top_k
from refmodel.attention.ranges import KeyRanges, key_ranges
from refmodel.attention.sharded import (
    LocalKeys,
    Queries,
    ShardAware,
    attend_local,
    local_keys,
    shard_aware_attention,
)
from refmodel.attention.sparse import Attended, chosen_rows, sparse_mla
from refmodel.attention.topk import NO_KEY, check_top_k, top_k
from refmodel.errors import InvalidInput
from refmodel.layout.ownership import owner
from refmodel.layout.plan import Plan
from sim.world import World

HEADS, LATENT, WIDTH, INDEX_HEADS, INDEX_DIM, SM_SCALE = 2, 4, 6, 3, 2, 0.4


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Queries of all batch rows and the full view, before any of it is given to ranks."""

    batch: Placed
    queries: Queries
    keys: LocalKeys
    k: int

    def queries_of(self, rank: int) -> Queries:
        whole, rows = self.queries, self.batch.plan.rows(rank)
        ranges = KeyRanges(whole.ranges.ks[rows], whole.ranges.ke[rows], whole.ranges.num_keys)
        return Queries(whole.q[rows], whole.index_q[rows], whole.index_weights[rows], ranges)

    def keys_of(self, rank: int) -> LocalKeys:
        rows, whole = owned_rows(self.batch, rank), self.keys
        scale = None if whole.scale is None else whole.scale[rows]
        return local_keys(rows, whole.kv[rows], whole.index_keys[rows], scale)


def owned_rows(batch: Placed, rank: int) -> torch.Tensor:
    """Rows of the flattened K that lie on a rank."""
    P, W = batch.plan.grid.page_size, batch.plan.grid.world_size
    owners = [
        owner(table.pages, W)[torch.arange(end) // P]
        for table, end in zip(batch.tables, batch.valid, strict=True)
    ]
    return (torch.cat(owners) == rank).nonzero().flatten()


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    """Random q and kv; index rows of small integers, so that logits are exact and full of ties."""
    batch = draw(placed(max_page=4))
    plan = batch.plan
    reached.note(plan)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    rows, keys = plan.num_rows, plan.key_starts[-1]
    ranges = key_ranges(*plan.visibility(torch.arange(rows)), keys)
    q = torch.randn(rows, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    queries = Queries(q, integers(rows, INDEX_HEADS, INDEX_DIM), integers(rows, INDEX_HEADS), ranges)
    for padded in (queries.q, queries.index_q, queries.index_weights):
        padded[plan.real_rows :] = torch.nan  # such rows see no key, and must come out as 0 all the same
    kv = torch.randn(keys, WIDTH, generator=generator, dtype=torch.float64)
    scale = integers(keys).abs() / 2 if draw(st.booleans()) else None
    view = local_keys(torch.arange(keys), kv, integers(keys, INDEX_DIM), scale)
    return Whole(batch, queries, view, draw(st.integers(1, 12)))


def attend_without_a_view(group: dist.ProcessGroup, whole: Whole) -> ShardAware:
    rank = group.rank()
    return shard_aware_attention(
        whole.queries_of(rank),
        whole.keys_of(rank),
        whole.batch.plan.row_counts,
        whole.k,
        latent=LATENT,
        sm_scale=SM_SCALE,
        group=group,
        chunk_elements=64,
    )


def in_batch_order(plan: Plan, of_ranks: list[torch.Tensor]) -> torch.Tensor:
    rows = torch.cat(of_ranks)
    return torch.empty_like(rows).index_put_((plan.gather_order,), rows)


@proves("A6")
@given(wholes())
@settings(max_examples=25)
def test_attention_without_a_view_is_attention_over_the_view(whole: Whole) -> None:
    plan, queries, keys = whole.batch.plan, whole.queries, whole.keys
    run = World.lockstep(plan.grid.world_size).execute(attend_without_a_view, whole)
    chosen = in_batch_order(plan, [result.chosen for result in run.results])
    logits = mqa_logits(queries.index_q, keys.index_keys, keys.scale, queries.index_weights, queries.ranges)
    positions = torch.where(chosen == NO_KEY, NO_KEY, chosen - queries.ranges.ks[:, None])
    assert check_top_k(positions, logits, queries.ranges, whole.k) is None
    view = sparse_mla(queries.q, keys.kv, chosen_rows(chosen, len(keys)), latent=LATENT, sm_scale=SM_SCALE)
    for name in ("out", "lse"):
        merged = in_batch_order(plan, [getattr(result.attended, name) for result in run.results])
        np.testing.assert_allclose(merged, getattr(view, name), rtol=1e-12, atol=1e-12)


@proves("V6")
@given(wholes())
@settings(max_examples=10)
def test_every_rank_calls_the_same_gathers(whole: Whole) -> None:
    run = World.lockstep(whole.batch.plan.grid.world_size).execute(attend_without_a_view, whole)
    assert len(set(run.ledgers)) == 1
    names = ["q", "index_q", "index_weights", "ranges", "candidate_logits", "candidates", "out", "lse"]
    assert [call.site for call in run.ledgers[0]] == [f"sharded.{name}" for name in names]


# -- merging -----------------------------------------------------------------------------------------------


@st.composite
def dealt(draw: st.DrawFn, dtype: torch.dtype) -> tuple[torch.Tensor, LocalKeys, list[LocalKeys]]:
    """(q, all keys, the same keys dealt to parts, some of which get none)."""
    keys, parts = draw(st.integers(0, 12)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    q = torch.randn(2, HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    kv = torch.randn(keys, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    whole = local_keys(torch.arange(keys), kv, kv, None)
    holder = torch.randint(parts, (keys,), generator=generator)
    owned = [(holder == part).nonzero().flatten() for part in range(parts)]
    return q, whole, [local_keys(rows, kv[rows], kv[rows], None) for rows in owned]


def merged_and_whole(q: torch.Tensor, whole: LocalKeys, parts: list[LocalKeys]) -> tuple[Attended, Attended]:
    """Attention of the first row to all keys and of the last to none: merged over parts, and at once."""
    chosen = torch.stack([torch.arange(len(whole)), torch.full((len(whole),), NO_KEY)])
    partial = [attend_local(q, part, chosen, latent=LATENT, sm_scale=SM_SCALE) for part in parts]
    at_once = sparse_mla(q, whole.kv, chosen_rows(chosen, len(whole)), latent=LATENT, sm_scale=SM_SCALE)
    return merge_attended(partial), at_once


@proves("A6")
@given(dealt(torch.float64))
def test_parts_merge_into_the_whole(case: tuple[torch.Tensor, LocalKeys, list[LocalKeys]]) -> None:
    merged, expected = merged_and_whole(*case)
    np.testing.assert_allclose(merged.out, expected.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.lse, expected.lse, rtol=1e-12, atol=1e-12)
    assert bool((merged.out[1] == 0).all())
    assert bool((merged.lse[1] == -torch.inf).all())


@proves("A5", "A6")
@given(dealt(torch.bfloat16))
def test_the_error_of_a_merge_does_not_grow_with_the_parts(
    case: tuple[torch.Tensor, LocalKeys, list[LocalKeys]],
) -> None:
    q, whole, _ = case
    merged, at_once = merged_and_whole(*case)
    # What rounding in the accumulating type can do, of either result: a score is a sum of WIDTH products,
    # its error scales its weight, and weights and outputs are sums over the keys.
    largest = whole.kv.double().abs().amax() if len(whole) else torch.tensor(0.0)
    scores = SM_SCALE * WIDTH * largest * q.double().abs().amax()
    roundings = WIDTH * scores + scores + 2 * len(whole) + 8
    budget = 2 * torch.finfo(torch.float32).eps * roundings * largest
    assert float((merged.out - at_once.out).abs().max()) <= float(budget)


@proves("A6")
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**16))
def test_the_best_of_every_part_hold_the_best_of_all(
    parts: int, rows: int, n: int, k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    all_logits = torch.randint(-2, 3, (rows, parts * n), generator=generator).float()
    num_keys = int(torch.randint(0, parts * n + 1, (1,), generator=generator))
    ranges = key_ranges(torch.zeros(rows).long(), torch.full((rows,), num_keys), parts * n)
    # Each part holds n of the keys and brings all that are visible; poison stands where there is none.
    keys = torch.randperm(parts * n, generator=generator).view(parts, 1, n).expand(parts, rows, n)
    logits = all_logits.gather(1, keys.movedim(0, 1).flatten(1)).view(rows, parts, n).movedim(1, 0)
    present = keys < num_keys
    merged = merge_top_k(logits.where(present, torch.nan), keys.where(present, NO_KEY), k)
    assert check_top_k(merged, all_logits, ranges, k) is None
    assert check_top_k(top_k(all_logits, ranges, k), all_logits, ranges, k) is None


def test_an_empty_part_may_hold_anything() -> None:
    part = Attended(torch.ones(1, 1, 2), torch.zeros(1, 1))
    empty = Attended(torch.full((1, 1, 2), torch.nan), torch.full((1, 1), -torch.inf))
    merged = merge_attended([part, empty])
    assert torch.equal(merged.out, part.out)
    assert torch.equal(merged.lse, part.lse)


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [([1, 1], 2, "ascending"), ([-1, 0], 2, "ascending"), ([0, 1], 3, "each part")],
)
def test_keys_of_a_rank_that_do_not_fit_are_refused(rows: list[int], length: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        local_keys(torch.tensor(rows), torch.ones(length, 2), torch.ones(length, 2), None)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(InvalidInput, match="parts to merge"):
        merge_attended([])
