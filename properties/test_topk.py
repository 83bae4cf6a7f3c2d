"""Law A2: the choice of keys, ours and anybody's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from properties.test_indexer import drawn_ranges
from refmodel.attention.ranges import KeyRanges, key_ranges
from refmodel.attention.topk import NO_KEY, check_top_k, top_k
from refmodel.errors import InvalidInput

NASTY = (torch.nan, torch.inf, -torch.inf)


@st.composite
def scored(draw: st.DrawFn, *, max_keys: int = 12) -> tuple[torch.Tensor, KeyRanges, int]:
    """Logits of few values, so that most are ties, ranges, and k; outside the ranges NaN or an infinity."""
    rows, keys = draw(st.integers(0, 5)), draw(st.integers(0, max_keys))
    ranges = drawn_ranges(draw, rows, keys)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = torch.randint(-1, draw(st.integers(0, 6)), (rows, keys), generator=generator).float()
    outside = draw(st.sampled_from(NASTY))
    k = draw(st.integers(1, 3) | st.integers(1, max_keys + 3))
    return logits.masked_fill(~ranges.visible(), outside), ranges, k


def obeys(chosen: list[int], logits: list[float], k: int) -> bool:
    """A2 for one row, word by word: ``chosen`` of the row's own ``logits``."""
    keys = [key for key in chosen if key != NO_KEY]
    if len(chosen) != k or chosen != keys + [NO_KEY] * (k - len(keys)):
        return False
    if len(keys) != min(len(logits), k) or len(set(keys)) != len(keys):
        return False
    if not all(0 <= key < len(logits) for key in keys):
        return False
    if len(logits) <= k:
        return keys == list(range(len(logits)))
    unchosen = [logit for key, logit in enumerate(logits) if key not in keys]
    return all(logit <= logits[key] for logit in unchosen for key in keys)


def own_logits(logits: torch.Tensor, ranges: KeyRanges) -> list[list[float]]:
    """Of each row, those it may see."""
    bounds = zip(logits, ranges.ks.tolist(), ranges.ke.tolist(), strict=True)
    return [row[ks:ke].tolist() for row, ks, ke in bounds]


@proves("A2")
@given(scored())
def test_top_k_obeys_the_law(case: tuple[torch.Tensor, KeyRanges, int]) -> None:
    logits, ranges, k = case
    chosen = top_k(logits, ranges, k)
    assert chosen.shape == (len(logits), k)
    for row, own in zip(chosen.tolist(), own_logits(logits, ranges), strict=True):
        assert obeys(row, own, k)
    assert check_top_k(chosen, logits, ranges, k) is None


@proves("A2")
@given(scored(), st.data())
def test_the_judge_knows_right_choices_from_wrong_ones(
    case: tuple[torch.Tensor, KeyRanges, int], data: st.DataObject
) -> None:
    logits, ranges, k = case
    own = own_logits(logits, ranges)
    choices = [_right_choice(data, row, k) for row in own]
    if data.draw(st.booleans()) and choices:
        row = data.draw(st.integers(0, len(choices) - 1))
        choices[row] = _changed(data, choices[row], len(own[row]))
    right = all(obeys(*row, k) for row in zip(choices, own, strict=True))
    chosen = torch.tensor(choices, dtype=torch.int64).reshape(len(choices), k)
    finding = check_top_k(chosen, logits, ranges, k)
    assert (finding is None) == right, finding


def _right_choice(data: st.DataObject, own: list[float], k: int) -> list[int]:
    """The best k in any order, ties broken at random; those of a short row in ascending order."""
    by_chance = data.draw(st.permutations(range(len(own))))
    best = sorted(by_chance, key=lambda key: -own[key])[:k]
    chosen = sorted(best) if len(own) <= k else data.draw(st.permutations(best))
    return [*chosen, *[NO_KEY] * (k - len(chosen))]


def _changed(data: st.DataObject, row: list[int], keys: int) -> list[int]:
    """One entry is another, or all entries are any keys; it may be right all the same."""
    k = len(row)
    if keys > k and data.draw(st.booleans()):
        return data.draw(st.permutations(range(keys)))[:k]
    i = data.draw(st.integers(0, k - 1))
    return [*row[:i], data.draw(st.integers(NO_KEY, keys + 1)), *row[i + 1 :]]


@proves("A2")
@given(st.integers(1020, 2100), st.integers(1000, 2048), st.integers(0, 1100), st.integers(0, 2**16))
def test_ties_are_not_lost_however_many(keys: int, k: int, higher: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randperm(keys, generator=generator) < higher).float()[None]
    ranges = key_ranges(torch.tensor([0]), torch.tensor([keys]), keys)
    assert check_top_k(top_k(logits, ranges, k), logits, ranges, k) is None


@proves("A2")
@given(scored(), st.sampled_from(NASTY))
def test_short_rows_ignore_their_logits(case: tuple[torch.Tensor, KeyRanges, int], logit: float) -> None:
    logits, ranges, _ = case
    everything = top_k(torch.full_like(logits, logit), ranges, logits.shape[1] + 1)
    assert [[key for key in row if key != NO_KEY] for row in everything.tolist()] == [
        list(range(length)) for length in ranges.lengths.tolist()
    ]


def test_a_visible_key_of_minus_infinity_comes_before_one_that_is_not_visible() -> None:
    logits = torch.full((1, 6), -torch.inf)
    ranges = key_ranges(torch.tensor([2]), torch.tensor([5]), 6)
    assert check_top_k(top_k(logits, ranges, 2), logits, ranges, 2) is None


def test_the_judge_lets_no_nan_pass() -> None:
    ranges = key_ranges(torch.tensor([0]), torch.tensor([3]), 3)
    finding = check_top_k(torch.tensor([[0]]), torch.tensor([[1.0, torch.nan, 0.0]]), ranges, 1)
    assert finding is not None
    assert "row 0" in finding.what


def test_slack_forgives_what_the_logits_may_be_off_by() -> None:
    ranges = key_ranges(torch.tensor([0]), torch.tensor([2]), 2)
    logits, second_best = torch.tensor([[1.0, 1.5]]), torch.tensor([[0]])
    assert check_top_k(second_best, logits, ranges, 1, slack=0.5) is None
    assert check_top_k(second_best, logits, ranges, 1, slack=0.25) is not None


def test_no_k_is_refused() -> None:
    with pytest.raises(InvalidInput, match="k of top-k"):
        top_k(torch.ones(1, 1), key_ranges(torch.tensor([0]), torch.tensor([1]), 1), 0)
