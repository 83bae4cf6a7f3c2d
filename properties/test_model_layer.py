"""Law A5 on one rank: the layers, absorbed and in torch, against the oracle, which is neither."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.errors import InvalidInput
from refmodel.model.layer import Projected, embed, finish, head, project
from refmodel.model.shape import DEEPSEEK_V32, GLM_5, PRESETS, TINY, ModelShape
from refmodel.model.weights import Weights, arrays, seeded_weights
from refmodel.oracle import Sizes, dense_model, relative_error, worst_top_k_fault

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small models whose sizes are all over the place, with and without rotation in the indexer."""
    index_dim, tile = draw(st.integers(4, 7)), draw(st.sampled_from([2, 4]))
    return ModelShape(
        vocab=draw(st.integers(1, 9)),
        hidden=draw(st.integers(4, 12)),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        q_rank=draw(st.integers(4, 7)),
        latent=tile * draw(st.integers(2, 3)),
        nope=draw(st.integers(1, 4)),
        rope=draw(st.sampled_from([2, 4])),
        value=draw(st.integers(1, 4)),
        index_heads=draw(st.integers(1, 3)),
        index_dim=index_dim,
        index_rope=draw(st.sampled_from([0, 2, 4])),
        top_k=draw(st.integers(1, 9)),
        quant_tile=tile,
        rope_theta=draw(st.sampled_from([10.0, 10_000.0])),
        yarn_factor=draw(st.sampled_from([1.0, 40.0])),
    )


def _index_logits(rows: Projected) -> torch.Tensor:
    """[tokens, tokens], −inf for keys behind the row: A1, for one request from position 0."""
    logits = torch.einsum("mhd,nd->mhn", rows.index_q, rows.index_k).relu()
    logits = torch.einsum("mhn,mh->mn", logits, rows.index_weights)
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)


def _choose(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[tokens, k] keys each row attends to: A2."""
    tokens, entries = len(logits), torch.arange(k)
    best = logits.topk(min(k, tokens)).indices
    best = torch.nn.functional.pad(best, (0, k - best.shape[1]))
    length = torch.arange(1, tokens + 1)[:, None]
    return torch.where(length > k, best, torch.where(entries < length, entries, -1))


def _attend(rows: Projected, chosen: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    scores = torch.einsum("mhd,nd->mhn", rows.q, rows.kv) * shape.sm_scale
    hidden_keys = torch.ones(len(chosen), len(chosen) + 1, dtype=torch.bool)
    hidden_keys.scatter_(1, chosen.where(chosen >= 0, len(chosen)), False)
    weights = scores.masked_fill(hidden_keys[:, None, :-1], -torch.inf).softmax(-1)
    return weights @ rows.kv[:, : shape.latent]


def _dense_pass(
    ids: list[int], weights: Weights
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """One request from position 0 on one rank: logits of the head, index logits and choices of each layer."""
    hidden, index_logits, choices = embed(torch.tensor(ids), weights), [], []
    for layer in weights.layers:
        rows = project(hidden, torch.arange(len(ids)), layer, weights.shape)
        index_logits.append(_index_logits(rows))
        choices.append(_choose(index_logits[-1], weights.shape.top_k))
        hidden = finish(hidden, _attend(rows, choices[-1], weights.shape), layer, weights.shape)
    return head(hidden, weights), index_logits, choices


@proves("A5")
@given(shapes(), st.integers(1, 24), st.integers(0, 2**16))
def test_a_pass_over_all_tokens_is_the_dense_oracle(shape: ModelShape, tokens: int, seed: int) -> None:
    weights = seeded_weights(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab, (tokens,), generator=generator).tolist()
    logits, index_logits, choices = _dense_pass(ids, weights.to(torch.float64, "cpu"))
    chosen = [choice.numpy() for choice in choices]
    truth = dense_model(ids, arrays(weights), Sizes.of(shape), layers=shape.layers, chosen=chosen)
    assert relative_error(logits.numpy(), truth.logits) <= 1e-12
    visible = np.tril(np.ones((tokens, tokens), np.bool_))
    for choice, ours, theirs in zip(chosen, index_logits, truth.index_logits, strict=True):
        assert relative_error(ours.numpy()[visible], theirs[visible]) <= 1e-10
        slack = 1e-10 * np.abs(theirs[visible]).max()
        lengths = np.arange(1, tokens + 1)
        assert worst_top_k_fault(choice, theirs, lengths, shape.top_k, slack) is None


@proves("A5")
@given(shapes(), st.integers(1, 4000), st.integers(0, 2**16))
def test_scores_depend_on_the_distance_of_positions_and_rows_on_the_positions(
    shape: ModelShape, shift: int, seed: int
) -> None:
    weights = seeded_weights(shape, seed, layers=1).to(torch.float64, "cpu")
    hidden = torch.randn(3, shape.hidden, generator=torch.Generator().manual_seed(seed)).double()
    positions = torch.tensor([0, 1, 5])
    here, there = (project(hidden, positions + s, weights.layers[0], shape) for s in (0, shift))
    for q, k in (("q", "kv"), ("index_q", "index_k")):
        scores = [torch.einsum("mhd,nd->mhn", getattr(rows, q), getattr(rows, k)) for rows in (here, there)]
        assert relative_error(scores[1].numpy(), scores[0].numpy()) <= 1e-9
    assert bool((here.kv != there.kv).any(1).all())
    assert bool((here.q != there.q).any(2).all())
    assert torch.equal(here.kv[:, : shape.latent], there.kv[:, : shape.latent])
    assert torch.equal(here.index_q[..., shape.index_rope :], there.index_q[..., shape.index_rope :])
    assert torch.equal(here.index_weights, there.index_weights)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_layers_work_in_the_type_of_the_rows_without_rows_and_beside_padding(dtype: torch.dtype) -> None:
    weights = seeded_weights(TINY, 0, layers=1).to(dtype, "cpu")
    for ids, positions in (([], []), ([5, -1, 0], [3, -1, 7])):
        hidden = embed(torch.tensor(ids, dtype=torch.int64), weights)
        rows = project(hidden, torch.tensor(positions, dtype=torch.int64), weights.layers[0], TINY)
        out = torch.zeros(len(ids), TINY.heads, TINY.latent, dtype=torch.promote_types(dtype, torch.float32))
        logits = head(finish(hidden, out, weights.layers[0], TINY), weights)
        parts = (rows.q, rows.kv, rows.index_q, rows.index_weights, rows.index_k, logits)
        assert {part.dtype for part in parts} == {dtype}
        assert [part.isnan().flatten(1).any(1).tolist() for part in parts] == [[i < 0 for i in ids]] * 6


def test_shapes_of_the_parts() -> None:
    weights = seeded_weights(TINY, 0, vocab=5)
    rows = project(embed(torch.arange(5), weights), torch.arange(5), weights.layers[0], TINY)
    assert rows.q.shape == (5, 2, 20)
    assert rows.kv.shape == (5, 20)
    assert rows.index_q.shape == (5, 3, 8)
    assert rows.index_weights.shape == (5, 3)
    assert rows.index_k.shape == (5, 8)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_zero_token_has_zero_rows_at_any_position(dtype: torch.dtype) -> None:
    weights = seeded_weights(TINY, 3).to(dtype, "cpu")
    rows = project(
        embed(torch.zeros(4, dtype=torch.int64), weights), torch.arange(4), weights.layers[0], TINY
    )
    assert not rows.kv.any()
    assert not rows.index_k.any()
    assert not rows.q.any()


def test_equal_tokens_tie_when_the_indexer_does_not_rotate() -> None:
    shape = replace(TINY, index_rope=0)
    weights = seeded_weights(shape, 1)
    ids = torch.full((40,), 7)
    rows = project(embed(ids, weights), torch.arange(40), weights.layers[0], shape)
    assert torch.equal(rows.index_k, rows.index_k[:1].expand(40, -1))


def test_nothing_asks_the_device_for_a_value() -> None:
    # Tensors without storage have no values to give: reading one is an error.
    weights = seeded_weights(TINY, 0).to(torch.bfloat16, "meta")
    ids = torch.zeros(6, dtype=torch.int64, device="meta")
    hidden = embed(ids, weights)
    rows = project(hidden, ids, weights.layers[0], TINY)
    out = finish(hidden, rows.q[..., : TINY.latent].float(), weights.layers[0], TINY)
    assert head(out, weights).shape == (6, TINY.vocab)


def test_rows_that_do_not_fit_are_refused() -> None:
    weights = seeded_weights(TINY, 0)
    hidden = embed(torch.arange(3), weights)
    with pytest.raises(InvalidInput, match="positions of a layer: expected 3 rows"):
        project(hidden, torch.arange(1), weights.layers[0], TINY)
    with pytest.raises(InvalidInput, match="output of attention: expected 3 rows"):
        finish(hidden, torch.zeros(1, TINY.heads, TINY.latent), weights.layers[0], TINY)


def test_weights_are_a_function_of_the_seed_and_hold_in_bfloat16() -> None:
    one, same, other = (arrays(seeded_weights(TINY, seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["layers.1.out"], other["layers.1.out"])
    narrow = arrays(seeded_weights(TINY, 1).to(torch.bfloat16, "cpu"))
    assert all(np.array_equal(one[name], narrow[name]) for name in one)
    assert not one["embedding"][0].any()
    assert (one["layers.0.index_weights"] < 0).any()
    assert not one["layers.0.index_k_bias"].any()


def test_presets_have_the_numbers_of_the_model_cards() -> None:
    assert (DEEPSEEK_V32.width, GLM_5.width) == (576, 576)
    assert DEEPSEEK_V32.sm_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert GLM_5.sm_scale == 1 / 16
    assert (DEEPSEEK_V32.top_k, GLM_5.top_k) == (2048, 2048)
    assert dict(PRESETS) == {"tiny": TINY, "deepseek-v3.2": DEEPSEEK_V32, "glm-5": GLM_5}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 0}, "heads of the model: expected an integer >= 1, got 0"),
        ({"rope": 0}, "rope of the model: expected an integer >= 2, got 0"),
        ({"rope": 3}, "rope of the model: expected an even number"),
        ({"index_rope": 3}, "index_rope of the model: expected an even number"),
        ({"index_rope": 10}, "index_rope of the model: expected at most the index dims, 8"),
        ({"quant_tile": 6}, "quant_tile of the model: expected a divisor of the latent dims, 16, got 6"),
        ({"rope_theta": 0.0}, "rope_theta of the model: expected a finite number > 0, got 0"),
        ({"yarn_factor": 0.5}, "yarn_factor of the model: expected a finite number >= 1, got 0.5"),
        ({"eps": float("nan")}, "eps of the model: expected a finite number > 0, got nan"),
    ],
)
def test_shapes_without_meaning_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(TINY, **changed)


@pytest.mark.parametrize("changed", [{"seed": -1}, {"layers": 0}, {"vocab": 0}])
def test_weights_without_meaning_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="expected an integer"):
        seeded_weights(TINY, **({"seed": 0} | changed))
