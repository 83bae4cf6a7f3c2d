"""Law A1: the indexer's logits, against loops in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.attention.indexer import choose, mqa_logits
from refmodel.attention.ranges import KeyRanges, key_ranges
from refmodel.attention.topk import check_top_k
from refmodel.errors import InvalidInput
from refmodel.oracle import Array


@dataclass(frozen=True, slots=True, eq=False)
class Indexed:
    """What the indexer is given: integers, so that sums are exact in every order and ties are common."""

    q: torch.Tensor
    keys: torch.Tensor
    scale: torch.Tensor | None
    weights: torch.Tensor
    ranges: KeyRanges


def drawn_ranges(draw: st.DrawFn, rows: int, keys: int) -> KeyRanges:
    """A range for each row, empty ones among them."""
    bounds = [sorted(draw(st.tuples(st.integers(0, keys), st.integers(0, keys)))) for _ in range(rows)]
    ks, ke = torch.tensor(bounds, dtype=torch.int64).reshape(rows, 2).unbind(1)
    return key_ranges(ks, ke, keys)


@st.composite
def indexed(draw: st.DrawFn) -> Indexed:
    rows, heads, dim, keys = (draw(st.integers(low, 6)) for low in (0, 1, 1, 0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    scale = integers(keys) / 4 if draw(st.booleans()) else None
    ranges = drawn_ranges(draw, rows, keys)
    return Indexed(integers(rows, heads, dim), integers(keys, dim), scale, integers(rows, heads), ranges)


def by_hand(given: Indexed) -> Array:
    """The formula, a logit at a time; NaN outside the ranges."""
    q, keys, weights = (t.double().numpy() for t in (given.q, given.keys, given.weights))
    scale = np.ones(len(keys)) if given.scale is None else given.scale.double().numpy()
    logits = np.full((len(q), len(keys)), np.nan)
    for m, (ks, ke) in enumerate(zip(given.ranges.ks.tolist(), given.ranges.ke.tolist(), strict=True)):
        for n in range(ks, ke):
            dots = [max(0.0, float(q[m, h] @ keys[n])) for h in range(q.shape[1])]
            logits[m, n] = sum(w * dot for w, dot in zip(weights[m], dots, strict=True)) * scale[n]
    return logits


@proves("A1")
@given(indexed())
def test_logits_are_the_formula_and_nothing_outside_the_range(given: Indexed) -> None:
    logits = mqa_logits(given.q, given.keys, given.scale, given.weights, given.ranges)
    assert logits.dtype == (torch.float64 if given.q.dtype == torch.float64 else torch.float32)
    np.testing.assert_array_equal(logits.double().numpy(), by_hand(given))


@proves("A1")
@given(indexed(), st.integers(1, 8), st.sampled_from([1, 40, 1 << 24]))
def test_what_a_row_may_not_see_changes_nothing(given: Indexed, k: int, chunk_elements: int) -> None:
    rest = given.scale, given.weights, given.ranges
    chosen = choose(given.q, given.keys, *rest, k, chunk_elements=chunk_elements)
    logits = mqa_logits(given.q, given.keys, *rest)
    assert check_top_k(chosen, logits, given.ranges, k) is None
    for row, visible in enumerate(given.ranges.visible()):
        # Each row alone, as keys that it does not see are seen by others.
        poisoned = torch.where(visible[:, None], given.keys, torch.nan)
        alone = slice(row, row + 1)
        again = choose(given.q[alone], poisoned, given.scale, given.weights[alone], given.ranges[alone], k)
        assert check_top_k(again, logits[alone], given.ranges[alone], k) is None


@pytest.mark.parametrize(
    ("ks", "ke", "message"),
    [
        ([0], [1, 1], "of one length"),
        ([0, 0], [1, 4], "keys of row 1: expected 0 ≤ ks ≤ ke ≤ 3, got ks 0, ke 4"),
        ([-1, 0], [1, 1], "keys of row 0"),
        ([0, 2], [1, 1], "keys of row 1"),
    ],
)
def test_ranges_that_do_not_fit_the_keys_are_refused(ks: list[int], ke: list[int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        key_ranges(torch.tensor(ks), torch.tensor(ke), 3)


def test_rows_without_their_metadata_are_refused() -> None:
    ranges = key_ranges(torch.tensor([0]), torch.tensor([3]), 3)
    with pytest.raises(InvalidInput, match="expected 2 rows over 3 keys, got 1 rows over 3 keys"):
        mqa_logits(torch.ones(2, 1, 1), torch.ones(3, 1), None, torch.ones(2, 1), ranges)
