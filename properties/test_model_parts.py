"""What a forward gets ready before it runs, and what it refuses (laws S5, S6, A1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import Placed, place, placed
from refmodel.attention.indexer import mqa_logits
from refmodel.attention.ranges import key_ranges
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.model.attend import index_logits
from refmodel.model.batch import Batch, batch_rows
from refmodel.model.forward import Output, forward
from refmodel.model.layer import Projected
from refmodel.model.model import build_model
from refmodel.model.shape import TINY
from refmodel.model.weights import seeded_weights
from refmodel.storage.codecs import quantize
from refmodel.storage.formats import mla_format
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage, open_passage
from refmodel.storage.shard import empty_shard
from sim.failures import RankFailed
from sim.lockstep.schedule import in_order
from sim.world import World

CPU = torch.device("cpu")


def _passage(batch: Placed, rank: int) -> Passage:
    return open_passage(batch.plan, batch.tables, rank, local_pages=batch.local_pages)


@proves("S5", "S6")
@given(placed())
def test_rows_know_their_positions_and_see_the_keys_up_to_their_own(batch: Placed) -> None:
    plan = batch.plan
    rows = [(-1, 0, 0)] * plan.padding  # position, ks, ke
    for i in reversed(range(len(plan.extents))):
        extent, first = plan.extents[i], sum(other.end for other in plan.extents[:i])
        rows = [(p, first, first + p + 1) for p in range(extent.prefix, extent.end)] + rows
    ids = torch.arange(plan.real_rows)
    for rank in range(plan.grid.world_size):
        mine = batch_rows(_passage(batch, rank), ids, CPU)
        ks, ke = (torch.cat([getattr(half.ranges, name) for half in mine.halves]) for name in ("ks", "ke"))
        assert [len(half.ranges) for half in mine.halves] == [len(half.rows) for half in plan.halves(rank)]
        assert torch.equal(torch.stack([mine.positions, ks, ke], 1), plan.take(torch.tensor(rows), rank))
        assert torch.equal(mine.ids, plan.rows(rank).where(plan.rows(rank) < plan.real_rows, -1))


@proves("A1")
@given(st.integers(1, 9), st.integers(0, 2**16))
def test_quantized_queries_and_keys_give_the_logits_of_what_they_stand_for(rows: int, seed: int) -> None:
    """fp8 elements times their scales, in float64; float32 may differ by one rounding an operation."""
    model = build_model(seeded_weights(TINY, 0, layers=1), "fp8")
    projected = _random_rows(rows, seed)
    ranges = key_ranges(torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1), rows)
    views = {Cache.INDEX: model.pack(Cache.INDEX, projected.index_k)}
    actual = index_logits(projected, views, ranges, model)

    elements, scale = quantize(projected.index_q)
    q, weights = elements.double() * scale, projected.index_weights.double()
    keys, key_scale = model.formats[Cache.INDEX].keys_and_scales(views[Cache.INDEX])
    assert key_scale is not None
    exact = mqa_logits(q, keys.double(), key_scale.double(), weights, ranges)
    largest = mqa_logits(q.abs(), keys.double().abs(), key_scale.double(), weights.abs(), ranges)
    roundings = TINY.index_dim + TINY.index_heads + 1
    allowed = roundings * torch.finfo(torch.float32).eps * largest
    visible = ranges.visible()
    assert bool(((actual - exact).abs() <= allowed)[visible].all())


def _random_rows(rows: int, seed: int) -> Projected:
    """bf16 rows whose magnitudes differ by row and head, as their scales then do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        loudness = torch.randn(*sizes[:-1], 1, generator=generator).exp()
        return (torch.randn(*sizes, generator=generator) * loudness).bfloat16()

    return Projected(
        q=draw(rows, TINY.heads, TINY.width),
        kv=draw(rows, TINY.width),
        index_q=draw(rows, TINY.index_heads, TINY.index_dim),
        index_weights=draw(rows, TINY.index_heads),
        index_k=draw(rows, TINY.index_dim),
    )


# -- what does not fit -------------------------------------------------------------------------------------


def _one_request(tokens: int, world_size: int = 1) -> Placed:
    plan = plan_batch([Extent(0, tokens)], Grid(world_size, 4), Split.PAGE_ALIGNED)
    return place(plan, lambda _: torch.zeros(num_pages(tokens, 4), dtype=torch.int64), seed=0)


def _rows(batch: Placed, tokens: int) -> Batch:
    return batch_rows(_passage(batch, 0), torch.zeros(tokens, dtype=torch.int64), CPU)


def test_ids_of_another_batch_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"token ids of a batch: expected \[5\], .* got \[6\]"):
        _rows(_one_request(5), 6)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (_one_request(5).tables * 2, "page tables: expected 1, one a request of the plan, got 2"),
        (_one_request(4).tables, "position in a page table: expected 0 … 3, got 4"),
    ],
)
def test_tables_of_another_batch_are_refused(tables: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _passage(replace(_one_request(5), tables=tables), 0)


@pytest.mark.parametrize(
    ("rank", "layers", "message"),
    [
        (1, TINY.layers, r"rank and world of a batch: expected \(0, 2\), as the group's, got \(1, 2\)"),
        (0, TINY.layers - 1, "shards: expected those of 2 layers, got 1"),
    ],
)
def test_a_batch_of_another_rank_and_missing_layers_are_refused(rank: int, layers: int, message: str) -> None:
    model, of_rank = build_model(seeded_weights(TINY, 0), "f64"), _one_request(5, world_size=2)

    def program(group: dist.ProcessGroup) -> Output:
        shards = {cache: empty_shard(Grid(2, 4), 0, f, 4) for cache, f in model.formats.items()}
        rows = batch_rows(_passage(of_rank, rank), torch.arange(5), CPU)
        return forward(group, model, rows, [shards] * layers)

    with pytest.raises(RankFailed, match=message):
        World.lockstep(2, schedule=in_order()).run(program)


def test_models_without_meaning_are_refused() -> None:
    with pytest.raises(InvalidInput, match="top_k of the model: expected an integer >= 1, got 0"):
        replace(TINY, top_k=0)
    with pytest.raises(InvalidInput, match=r"precision: expected one of f64, f32, bf16, fp8, got '?fp4"):
        build_model(seeded_weights(TINY, 0), "fp4")
    with pytest.raises(InvalidInput, match="tile"):
        mla_format("fp8", latent=16, rope=4, tile=5)
