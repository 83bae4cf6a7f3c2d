"""The oracle itself: numbers a person can check, and its judge of top-k against another definition of A2."""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel import oracle
from refmodel.model.layer import embed, finish, project
from refmodel.model.shape import TINY
from refmodel.model.weights import arrays, seeded_weights
from refmodel.oracle import (
    Array,
    Dense,
    Sizes,
    causal_mla,
    dense_model,
    relative_error,
    top_k_fault,
    worst_top_k_fault,
)

Choices = npt.NDArray[np.int64]

SIZES = Sizes(
    heads=1,
    latent=2,
    nope=1,
    rope=2,
    value=2,
    index_heads=1,
    index_dim=2,
    index_rope=0,
    top_k=2,
    rope_theta=10.0,
    yarn_factor=1.0,
    eps=1e-14,
)
A, B = [1.0, 1.0], [1.0, -1.0]  # the hidden rows of ids 0 and 1: their mean square is 1, so norms leave them


def _two_token_model(**changed: Any) -> Dense:
    """Ids 0, 1 through one layer that passes values on; what is not ``changed`` gives queries of 0."""
    matrices = {
        "q_down": np.eye(2),
        "q_up": np.zeros((1, 3, 2)),
        "kv_down": np.vstack([np.eye(2), np.zeros((2, 2))]),
        "k_up": np.zeros((1, 1, 2)),
        "v_up": np.eye(2)[None],
        "out": np.eye(2),
        "index_q": np.eye(2)[None],
        "index_k": np.eye(2),
        "index_k_bias": np.zeros(2),
        "index_weights": np.zeros((1, 2)),
    }
    ones = {name: np.ones(2) for name in ("norm", "q_norm", "kv_norm", "index_k_norm")}
    layer = matrices | ones | {name: np.array(value) for name, value in changed.items() if name != "sizes"}
    weights = {f"layers.0.{name}": value for name, value in layer.items()}
    weights |= {"embedding": np.array([A, B]), "norm": np.ones(2), "head": np.eye(2)}
    return dense_model([0, 1], weights, changed.get("sizes", SIZES), layers=1)


def _second_row(model: Dense) -> list[float]:
    row: list[float] = model.hidden[0][1].tolist()
    return row


def test_equal_scores_give_the_mean_of_the_values() -> None:
    model = _two_token_model()
    assert model.hidden[0][0].tolist() == pytest.approx([2.0, 2.0])  # A + A
    assert _second_row(model) == pytest.approx([2.0, -1.0])  # B + (A + B) / 2
    assert model.logits[0].tolist() == pytest.approx([1.0, 1.0])  # the norm of (2, 2)


def test_scores_are_expanded_keys_times_queries_scaled_by_the_head_not_the_row() -> None:
    # q_nope of B is −1 · −1; k_nope is (latent · (½, −½)): 0 for A, 1 for B; times ln 3 over the scale.
    model = _two_token_model(q_up=[[[0.0, -1.0], [0, 0], [0, 0]]], k_up=[[[0.5, -0.5]]])
    weight = math.exp(1 / math.sqrt(3))  # (nope + rope)^−0.5
    assert _second_row(model) == pytest.approx([2.0, -1 + (1 - weight) / (1 + weight)])


def test_yarn_raises_the_scale_by_the_square_of_mscale() -> None:
    sizes = Sizes.of(TINY)
    assert sizes.sm_scale == pytest.approx((6 + 4) ** -0.5 * (1 + 0.1 * math.log(2)) ** 2)


def test_rope_turns_by_the_distance_of_positions() -> None:
    # Every q and k is (1, 0) in its rope dims: the score at distance d is cos d.
    model = _two_token_model(q_up=[[[0.0, 0], [1, 0], [0, 0]]], kv_down=[[1.0, 0], [0, 1], [1, 0], [0, 0]])
    apart, self_ = (math.exp(math.cos(d) / math.sqrt(3)) for d in (1, 0))
    assert _second_row(model) == pytest.approx([2.0, -1 + (apart - self_) / (apart + self_)])


@pytest.mark.parametrize(("sign", "expected"), [(1.0, [2.0, -2.0]), (-1.0, [2.0, 0.0])])
def test_the_indexer_chooses_by_signed_weights_of_relu(sign: float, expected: list[float]) -> None:
    # LayerNorm makes A's index key 0 and leaves B's: q · k is 0 and 2, times w = ±1, over √1 · √2.
    model = _two_token_model(index_weights=[[sign, 0.0]], sizes=replace(SIZES, top_k=1))
    assert model.index_logits[0].tolist() == [[0, -math.inf], [0, pytest.approx(sign * math.sqrt(2))]]
    assert _second_row(model) == pytest.approx(expected)


def test_absorbed_scores_share_the_weight() -> None:
    # Two equal scores halve the weights; a key that is 2 ln 2 lower weighs a quarter of the other.
    q, kv = np.ones((2, 1, 2)), np.array([[1.0, 0.0], [3.0, -2.0 - 2 * np.log(2)]])
    out = causal_mla(q, kv, 0, latent=1, sm_scale=1.0)
    assert out[:, 0, 0].tolist() == [1.0, pytest.approx((4 * 1 + 1 * 3) / 5)]


@given(st.lists(st.integers(0, 63), min_size=1, max_size=12), st.integers(0, 2**16))
def test_absorbed_attention_is_the_expanded_one(ids: list[int], seed: int) -> None:
    weights = seeded_weights(TINY, seed, layers=1).to(torch.float64, "cpu")
    hidden = embed(torch.tensor(ids), weights)
    rows = project(hidden, torch.arange(len(ids)), weights.layers[0], weights.shape)
    sizes = Sizes.of(TINY)
    out = causal_mla(rows.q.numpy(), rows.kv.numpy(), 0, latent=sizes.latent, sm_scale=sizes.sm_scale)
    absorbed = finish(hidden, torch.from_numpy(out), weights.layers[0], weights.shape).numpy()
    expanded = dense_model(ids, arrays(weights), sizes, layers=1).hidden[0]  # no more ids than top_k
    assert relative_error(absorbed, expanded) <= 1e-12


@given(st.lists(st.integers(0, 63), min_size=1, max_size=24), st.data())
def test_rows_of_the_last_layer_alone_are_those_of_the_whole(ids: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=4))
    weights, sizes = arrays(seeded_weights(TINY, 0)), Sizes.of(TINY)
    whole = dense_model(ids, weights, sizes, layers=2)
    some = dense_model(ids, weights, sizes, layers=2, rows=rows)
    assert relative_error(some.logits, whole.logits[rows]) <= 1e-12
    assert some.hidden[1].shape == (len(rows), TINY.hidden)
    assert np.array_equal(some.hidden[0], whole.hidden[0])


def test_a_choice_that_is_given_replaces_the_oracles_own() -> None:
    weights, sizes = arrays(seeded_weights(TINY, 0, layers=1)), Sizes.of(TINY)
    only_itself = np.arange(5)[:, None]
    alone = [dense_model([i], weights, sizes, layers=1).hidden[0][0] for i in (7, 7, 9, 3, 0)]
    given_choice = dense_model([7, 7, 9, 3, 0], weights, sizes, layers=1, chosen=[only_itself])
    # One key has all the weight, whatever its score: position plays no part.
    assert relative_error(given_choice.hidden[0], np.stack(alone)) <= 1e-12


@pytest.mark.parametrize(
    ("ids", "chosen", "message"),
    [
        ([-1, 3], None, "ids from -1 to 3 of 64"),
        ([64], None, "ids from 64 to 64 of 64"),
        ([1, 2], [[0, -1], [-1, -1]], "row at position 1 attends to -1"),
        ([1, 2], [[1, 0], [1, 0]], "row at position 0 attends to 1, entry 0"),
        ([1, 2], [[0, -1], [1, -2]], "row at position 1 attends to -2, entry 1"),
    ],
)
def test_the_oracle_refuses_what_has_no_meaning(
    ids: list[int], chosen: list[list[int]] | None, message: str
) -> None:
    weights = arrays(seeded_weights(TINY, 0, layers=1))
    choice = None if chosen is None else [np.array(chosen)]
    with pytest.raises(ValueError, match=message):
        dense_model(ids, weights, Sizes.of(TINY), layers=1, chosen=choice)


LOGITS = np.array([1.0, 4.0, 4.0, 2.0])


@pytest.mark.parametrize(
    ("chosen", "keys", "slack", "fault"),
    [
        ([1, 2], 4, 0.0, None),
        ([2, 1], 4, 0.0, None),
        ([1, 3], 4, 0.0, "4.0 of key 2, exceeds a chosen one, 2.0 of key 3"),
        ([1, 3], 4, 2.0, None),
        ([1, 0], 4, 2.0, "4.0 of key 2, exceeds a chosen one, 1.0 of key 0, by more than 2"),
        ([1, 1], 4, 0.0, "1 keys are chosen more than once"),
        ([1, -1], 4, 0.0, "entry 1 is -1, not 0 … 3"),
        ([1, 4], 4, 0.0, "entry 1 is 4, not 0 … 3"),
        ([0, 1], 2, 0.0, None),
        ([1, 0], 2, 0.0, "entry 0 is 1: a short row is ascending"),
        ([0, -1], 1, 0.0, None),
        ([0, 0], 1, 0.0, "entry 1 is 0, not −1"),
        ([-1, 0], 1, 0.0, "entry 0 is -1, not 0 … 0"),
        ([-1, -1], 0, 0.0, None),
        ([-1, -2], 0, 0.0, "entry 1 is -2, not −1"),
        ([1], 4, 0.0, "1 entries, not 2"),
    ],
)
def test_faults_of_a_choice_are_named(chosen: list[int], keys: int, slack: float, fault: str | None) -> None:
    found = top_k_fault(np.array(chosen), LOGITS[:keys], 2, slack)
    assert found is None if fault is None else fault in str(found)


def test_nan_is_never_a_lawful_threshold() -> None:
    for chosen in ([0, 1], [1, 2]):
        assert top_k_fault(np.array(chosen), np.array([np.nan, 1.0, 1.0]), 2, 1.0) is not None
    assert top_k_fault(np.array([0, -1]), np.array([np.nan]), 2) is None  # short: logits are ignored


@st.composite
def _choices(draw: st.DrawFn) -> tuple[Choices, Array, Choices, int]:
    """chosen, logits, lengths, k: right choices with ties, some spoilt; NaN behind each row's keys."""
    rows, tokens, k = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    source = np.random.default_rng(draw(st.integers(0, 2**16)))
    logits = source.integers(0, 3, (rows, tokens)).astype(np.float64)
    lengths = source.integers(0, tokens + 1, rows)
    chosen = np.full((rows, k), -1)
    for row, length in enumerate(lengths):
        logits[row, length:] = np.nan
        order = np.argsort(-logits[row, :length])[:k]
        chosen[row, : len(order)] = np.arange(length) if length <= k else source.permutation(order)
    for _ in range(draw(st.integers(0, 2))):
        chosen[source.integers(rows), source.integers(k)] = source.integers(-2, tokens + 1)
    return chosen, logits, lengths, k


def _keeps_a2(chosen: Choices, logits: Array, k: int) -> bool:
    """A2 by the values chosen: they are the k highest."""
    keys = chosen[: len(logits)].tolist()
    if len(logits) <= k:
        return keys == list(range(len(logits))) and bool((chosen[len(logits) :] == -1).all())
    if len(set(keys)) < k or not set(keys) <= set(range(len(logits))):
        return False
    return sorted(logits[keys]) == sorted(logits)[-k:]


@proves("A2")
@given(_choices())
def test_both_judges_of_top_k_are_the_definition(case: tuple[Choices, Array, Choices, int]) -> None:
    chosen, logits, lengths, k = case
    seen = [row[:length] for row, length in zip(logits, lengths, strict=True)]
    right = [_keeps_a2(*pair, k) for pair in zip(chosen, seen, strict=True)]
    assert [top_k_fault(*pair, k) is None for pair in zip(chosen, seen, strict=True)] == right
    fault = worst_top_k_fault(chosen, logits, lengths, k)
    assert (fault is None) if all(right) else str(fault).startswith(f"row {right.index(False)}: ")


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([1e-300], [0.0], math.inf),
        ([np.inf], [np.inf], math.inf),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_errors_are_relative_to_the_largest_expected(
    actual: list[float], expected: list[float], error: float
) -> None:
    assert relative_error(np.array(actual), np.array(expected)) == error


def test_the_judge_of_all_rows_takes_a_slack_for_each() -> None:
    chosen, logits = np.array([[0], [0]]), np.array([[1.0, 2.0], [1.0, 2.0]])
    lengths = np.array([2, 2])
    assert worst_top_k_fault(chosen, logits, lengths, 1, np.array([1.0, 1.0])) is None
    assert str(worst_top_k_fault(chosen, logits, lengths, 1, np.array([1.0, 0.5]))).startswith("row 1: ")
    assert worst_top_k_fault(chosen, logits, lengths, 2) == "choices of shape (2, 1), not (2, 2)"


def test_the_oracle_knows_nothing_of_the_rest() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    known = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    known |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in known} <= sys.stdlib_module_names | {"numpy"}
