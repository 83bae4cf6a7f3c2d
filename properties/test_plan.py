"""Laws S4–S7, S9: the plan of a batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import reached
from properties.proofs import proves
from properties.strategies import ZIGZAGS, Placed, placed, plans
from refmodel.layout.ownership import current_slots
from refmodel.layout.plan import PADDING, Plan, plan_batch
from refmodel.layout.rows import pad_rows, trim_rows
from refmodel.layout.split import Split


@proves("S4")
@given(plans(), st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.uint8]))
def test_take_pad_gather_rerange_is_the_identity(plan: Plan, dtype: torch.dtype) -> None:
    reached.note(plan)
    batch = torch.arange(plan.num_rows * 2).reshape(-1, 2).to(dtype)
    ranks = range(plan.grid.world_size)
    buffers = [pad_rows(plan.take(batch, rank), plan.max_rank_rows) for rank in ranks]
    assert all(len(buffer) == plan.max_rank_rows for buffer in buffers)
    assert torch.equal(plan.rerange(torch.cat(buffers)), batch)
    assert torch.equal(trim_rows(torch.cat(buffers), plan.row_counts), batch[plan.gather_order])


@proves("S5")
@given(plans())
def test_local_rows_are_cut_where_the_prev_segments_end(plan: Plan) -> None:
    W = plan.grid.world_size
    for rank in range(W):
        prev, following = plan.cut(plan.rows(rank), rank)
        half_of_row = [_is_prev(plan, row) for row in plan.rows(rank).tolist()]
        assert half_of_row == [True] * len(prev) + [False] * len(following)


def _is_prev(plan: Plan, row: int) -> bool:
    """From the definition: a row is in the prev half if its segment is one of the first W."""
    request = int(plan.request_of_row[row])
    if plan.split is Split.ROUND_ROBIN:
        return True
    if request == PADDING:  # split token-balanced, like a request of its own
        base, more = divmod(plan.padding, 2 * plan.grid.world_size)
        first_half = base * plan.grid.world_size + min(more, plan.grid.world_size)
        return row - plan.real_rows < first_half
    return int(plan.positions[row]) < plan.bounds[request][plan.grid.world_size]


@proves("S6")
@given(plans(max_page=16))
def test_a_row_sees_its_own_request_up_to_itself(plan: Plan) -> None:
    keys = [(request, p) for request, extent in enumerate(plan.extents) for p in range(extent.end)]
    rows = [(request, p) for request, e in enumerate(plan.extents) for p in range(e.prefix, e.end)]
    for rank in range(plan.grid.world_size):
        for half in plan.halves(rank):
            ks, ke = plan.visibility(half.rows)
            for row, start, stop in zip(half.rows.tolist(), ks.tolist(), ke.tolist(), strict=True):
                visible = keys[start:stop]
                if row >= len(rows):
                    assert visible == []
                    continue
                request, position = rows[row]
                assert visible == [(request, p) for p in range(position + 1)]


@proves("S6")
@given(plans(splits=ZIGZAGS))
def test_kv_stop_is_what_the_last_row_of_a_segment_sees(plan: Plan) -> None:
    for rank in range(plan.grid.world_size):
        for half in plan.halves(rank):
            first = 0
            for segment in half.segments:
                rows = half.rows[first : first + segment.tokens]
                first += segment.tokens
                if len(rows):
                    ks, ke = plan.visibility(rows)
                    assert int(ke[-1] - ks[-1]) == segment.stop
            assert first == half.valid_rows


@proves("S7")
@given(plans())
def test_valid_rows_are_a_contiguous_prefix_of_known_length(plan: Plan) -> None:
    for rank in range(plan.grid.world_size):
        for half in plan.halves(rank):
            real = plan.request_of_row[half.rows] != PADDING
            assert real.tolist() == [True] * half.valid_rows + [False] * (len(half.rows) - half.valid_rows)
            if plan.split is Split.ROUND_ROBIN:
                continue
            requests = plan.request_of_row[half.rows[: half.valid_rows]]
            _, ke = plan.visibility(half.rows[: half.valid_rows])
            same_request = requests[1:] == requests[:-1]
            assert bool((ke.diff()[same_request] == 1).all())


@proves("S9")
@given(plans(), st.integers(0, 40))
def test_padding_changes_no_real_row_and_is_split_with_the_rest(plan: Plan, padding: int) -> None:
    padded = plan_batch(plan.extents, plan.grid, plan.split, rotations=plan.rotations, padding=padding)
    bare = plan_batch(plan.extents, plan.grid, plan.split, rotations=plan.rotations)
    shares = []
    for rank in range(plan.grid.world_size):
        rows = padded.rows(rank)
        assert torch.equal(rows[rows < padded.real_rows], bare.rows(rank))
        shares.append(int((rows >= padded.real_rows).sum()))
    assert sum(shares) == padding
    assert max(shares) - min(shares) <= 1
    ks, ke = padded.visibility(torch.arange(padded.real_rows, padded.num_rows))
    assert bool((ks == ke).all())
    assert padded.key_starts == bare.key_starts


@proves("S9")
@given(placed())
def test_padding_rows_go_to_the_dummy_page_of_their_rank(batch: Placed) -> None:
    plan = batch.plan
    slots = current_slots(plan, batch.tables)
    is_padding = plan.request_of_row == PADDING
    pages = slots // plan.grid.page_size
    assert torch.equal(pages[is_padding], plan.rank_of_row[is_padding])
    assert bool((pages[~is_padding] >= plan.grid.world_size).all())
