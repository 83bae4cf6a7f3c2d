"""Laws A3 and A4: from chosen positions to slots or rows, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import Placed, placed
from refmodel.attention.sparse import Attended, Chosen, chosen_rows, sparse_mla
from refmodel.attention.topk import NO_KEY
from refmodel.attention.transform import Addressing, Transform, addressing, to_rows
from refmodel.errors import InvalidInput
from refmodel.layout.plan import PADDING, Half
from refmodel.oracle import Array

LATENT, ROPE, SM_SCALE = 5, 2, 0.4


def halves(batch: Placed) -> list[tuple[Half, Addressing]]:
    """Both halves of every rank."""
    plan = batch.plan
    found = [half for rank in range(plan.grid.world_size) for half in plan.halves(rank)]
    return [(half, addressing(plan, half, batch.tables)) for half in found]


def some_positions(batch: Placed, half: Half, k: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, k] positions that each row may see, some −1; all of them in padding rows."""
    visible = (batch.plan.positions[half.rows] + 1)[:, None]
    drawn = torch.randint(-2, 2**40, (len(half.rows), k), generator=generator)
    return torch.where((drawn < 0) | (visible == 0), NO_KEY, drawn % visible.clamp(min=1))


@proves("A3")
@given(placed(max_page=16), st.integers(1, 4), st.integers(0, 2**16))
@settings(max_examples=40)
def test_both_transforms_name_the_chosen_tokens(batch: Placed, k: int, seed: int) -> None:
    plan, generator = batch.plan, torch.Generator().manual_seed(seed)
    for half, address in halves(batch):
        positions = some_positions(batch, half, k, generator)
        slots = address.transform(positions, Transform.PAGED)
        assert "row_starts" not in vars(address), "PAGED built an offsets tensor"
        rows = address.transform(positions, Transform.RAGGED)
        for kind, indices in ((Transform.PAGED, slots), (Transform.RAGGED, rows)):
            assert torch.equal(address.undo(indices, kind), positions)
        for i, request in enumerate(plan.request_of_row[half.rows].tolist()):
            seen = positions[i][positions[i] != NO_KEY]
            if request == PADDING:
                assert {*slots[i].tolist(), *rows[i].tolist()} == {NO_KEY}
                continue
            assert torch.equal(slots[i][slots[i] >= 0], batch.tables[request].slots(seen))
            assert torch.equal(rows[i][rows[i] >= 0], plan.key_starts[request] + seen)


@proves("A3")
@given(placed(max_page=16, max_requests=1, padded=False), st.integers(0, 2**16))
@settings(max_examples=20)
def test_for_one_request_the_zero_vector_serves(batch: Placed, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for half, address in halves(batch):
        positions = some_positions(batch, half, 3, generator)
        rows = to_rows(positions, torch.zeros(len(half.rows), dtype=torch.int64))
        assert torch.equal(rows, address.transform(positions, Transform.RAGGED))


@pytest.mark.parametrize(
    ("cu_seqlens_q", "message"),
    [
        ((0, 2), "got 2 and 2"),
        ((0, 3, 2), "ascending"),
        ((1, 2, 3), "0 first"),
        ((0, 2, 9), "at most 4"),
    ],
)
def test_addressing_that_contradicts_itself_is_refused(cu_seqlens_q: tuple[int, ...], message: str) -> None:
    tables = torch.tensor([7]), torch.tensor([8])
    with pytest.raises(InvalidInput, match=message):
        Addressing(cu_seqlens_q, num_rows=4, key_starts=(0, 4), tables=tables, page_size=4)


# -- attention -------------------------------------------------------------------------------------------


@st.composite
def sparse_inputs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, Chosen]:
    """q, kv with NaN in every row that nobody chose, and choices with −1 anywhere."""
    rows, heads, keys, k = (draw(st.integers(low, high)) for low, high in ((0, 5), (1, 3), (0, 9), (1, 8)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    one_row = st.lists(st.integers(0, keys - 1), max_size=k, unique=True) if keys else st.just([])
    chosen = [_with_gaps(draw, draw(one_row), k) for _ in range(rows)]
    kv = torch.randn(keys, LATENT + ROPE, generator=generator, dtype=torch.float64)
    kv[sorted(set(range(keys)) - {key for row in chosen for key in row})] = torch.nan
    q = 3 * torch.randn(rows, heads, LATENT + ROPE, generator=generator, dtype=torch.float64)
    return q, kv, chosen_rows(torch.tensor(chosen, dtype=torch.int64).reshape(rows, k), keys)


def _with_gaps(draw: st.DrawFn, keys: list[int], k: int) -> list[int]:
    return draw(st.permutations([*keys, *[NO_KEY] * (k - len(keys))]))


def by_hand(q: torch.Tensor, kv: torch.Tensor, chosen: Chosen) -> tuple[Array, Array]:
    """The formula, a row and a head at a time."""
    rows, heads, _ = q.shape
    out, lse = np.zeros((rows, heads, LATENT)), np.full((rows, heads), -np.inf)
    for row, keys in enumerate(chosen.rows.tolist()):
        own = kv.numpy()[[key for key in keys if key >= 0]]
        for head in range(heads) if len(own) else ():
            exponentials = np.exp(own @ q[row, head].numpy() * SM_SCALE)
            out[row, head] = exponentials @ own[:, :LATENT] / exponentials.sum()
            lse[row, head] = np.log(exponentials.sum())
    return out, lse


def attend(q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, chunk_elements: int = 1 << 24) -> Attended:
    return sparse_mla(q, kv, chosen, latent=LATENT, sm_scale=SM_SCALE, chunk_elements=chunk_elements)


@proves("A4")
@given(sparse_inputs(), st.sampled_from([1, 60, 1 << 24]))
def test_attention_is_softmax_over_the_chosen_rows(
    inputs: tuple[torch.Tensor, torch.Tensor, Chosen], chunk_elements: int
) -> None:
    out, lse = by_hand(*inputs)
    attended = attend(*inputs, chunk_elements)
    np.testing.assert_allclose(attended.out.numpy(), out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(attended.lse.numpy(), lse, rtol=1e-12, atol=1e-12)


@proves("A4")
@given(sparse_inputs(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_results_are_in_the_accumulating_type(
    inputs: tuple[torch.Tensor, torch.Tensor, Chosen], dtype: torch.dtype
) -> None:
    q, kv, chosen = inputs
    attended = attend(q.to(dtype), kv.to(dtype), chosen)
    assert {attended.out.dtype, attended.lse.dtype} == {torch.float32}


def test_attention_on_numbers_a_person_can_check() -> None:
    # Two equal scores halve the weights; a key that is 2 ln 2 lower weighs a quarter of the other.
    q = torch.ones(2, 1, 2, dtype=torch.float64)
    kv = torch.tensor([[1.0, 0.0], [3.0, -2.0 - 2 * np.log(2)]], dtype=torch.float64)
    attended = sparse_mla(q, kv, chosen_rows(torch.tensor([[0, -1], [1, 0]]), 2), latent=1, sm_scale=1.0)
    assert attended.out.flatten().tolist() == pytest.approx([1, (4 * 1 + 1 * 3) / 5])
    assert attended.lse.flatten().tolist() == pytest.approx([1, 1 + np.log(5 / 4)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1], [3, 1]], "chosen by row 1: expected −1 or 0 … 2"),
        ([[-2, 1]], "chosen by row 0"),
        ([[-1, -1], [2, 2]], "chosen by row 1: expected each key once"),
    ],
)
def test_wrong_choices_are_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        chosen_rows(torch.tensor(rows), 3)


def test_choices_that_do_not_fit_are_refused() -> None:
    chosen = chosen_rows(torch.tensor([[0]]), 3)
    with pytest.raises(InvalidInput, match="expected 2 rows over 3 keys, got 1 rows over 3 keys"):
        sparse_mla(torch.ones(2, 1, 2), torch.ones(3, 2), chosen, latent=1, sm_scale=1.0)
