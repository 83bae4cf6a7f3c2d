"""Law A5: attention over the view, against the dense oracle, which shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import plans
from refmodel.attention.mla import MlaShape, dense_mla
from refmodel.errors import InvalidInput
from refmodel.layout.plan import Plan
from refmodel.oracle import causal_mla, relative_error

SHAPE = MlaShape(heads=2, latent=6, rope=2)
SCALE = 0.3


def _inputs(plan: Plan, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of all batch rows, NaN in padding, and the flattened K of all requests; fp64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(plan.num_rows, SHAPE.heads, SHAPE.width, generator=generator, dtype=torch.float64)
    q[plan.real_rows :] = torch.nan
    return q, torch.randn(plan.key_starts[-1], SHAPE.width, generator=generator, dtype=torch.float64)


def _sharded(plan: Plan, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Each rank attends with its own rows, prev and next apart; the outputs in batch order."""
    outputs = []
    for rank in range(plan.grid.world_size):
        local = plan.cut(plan.take(q, rank), rank)
        for half, q_half in zip(plan.halves(rank), local, strict=True):
            ks, ke = plan.visibility(half.rows)
            outputs.append(dense_mla(q_half, kv, ks, ke, latent=SHAPE.latent, sm_scale=SCALE, chunk_rows=7))
    return plan.rerange(torch.cat(outputs))


@proves("A5")
@given(plans(max_page=4), st.integers(0, 2**16))
def test_sharded_attention_is_the_dense_oracle(plan: Plan, seed: int) -> None:
    q, kv = _inputs(plan, seed)
    out = _sharded(plan, q, kv)
    for request, extent in enumerate(plan.extents):
        rows = slice(plan.row_starts[request], plan.row_starts[request + 1])
        keys = kv[plan.key_starts[request] : plan.key_starts[request + 1]]
        truth = causal_mla(q[rows].numpy(), keys.numpy(), extent.prefix, latent=SHAPE.latent, sm_scale=SCALE)
        assert relative_error(out[rows].numpy(), truth) <= 1e-10
    assert bool((out[plan.real_rows :] == 0).all())


def test_the_oracle_on_numbers_a_person_can_check() -> None:
    # Two equal scores halve the weights; a key that is 2 ln 2 lower weighs a quarter of the other.
    q = np.ones((2, 1, 2))
    kv = np.array([[1.0, 0.0], [3.0, -2.0 - 2 * np.log(2)]])
    out = causal_mla(q, kv, 0, latent=1, sm_scale=1.0)
    assert out[0, 0, 0] == 1.0
    assert out[1, 0, 0] == pytest.approx((4 * 1 + 1 * 3) / 5)


@pytest.mark.parametrize(
    ("ks", "ke", "message"),
    [
        ([0], [1, 1], "as many ks and ke as q rows"),
        ([0, 0], [1, 4], r"0 … 3"),
        ([-1, 0], [1, 1], "ks from -1"),
    ],
)
def test_attention_refuses_ranges_that_do_not_fit(ks: list[int], ke: list[int], message: str) -> None:
    q, kv = torch.ones(2, 1, 2), torch.ones(3, 2)
    with pytest.raises(InvalidInput, match=message):
        dense_mla(q, kv, torch.tensor(ks), torch.tensor(ke), latent=1, sm_scale=1.0)


def test_nan_equals_nothing() -> None:
    assert relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert relative_error(np.array([np.nan]), np.array([np.nan])) == float("inf")
