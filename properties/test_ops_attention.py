"""Operations of the indexer, sparse MLA and its merge: formulas in numpy, and what is within budget (A5)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from properties.kernels.cases.attention import LseMerge, MqaLogits, SparseMla
from properties.kernels.cases.case import Case
from properties.op_checks import any_case, judged
from properties.proofs import proves
from refmodel.attention.accumulating import accumulating_type
from refmodel.ops import judges
from refmodel.ops.attention import LSE_MERGE, MQA_LOGITS, SPARSE_MLA
from refmodel.ops.op import Arguments, Cost, Op, Results
from refmodel.oracle import Array


def wide(tensor: torch.Tensor) -> Array:
    array: Array = tensor.double().numpy()
    return array


# Bytes that must be read and written, then products and sums; each worked out by hand.
COSTS = (
    (MqaLogits(prefixes=(0,), tokens=(1,), heads=2, dim=4), 32 + 16 + 4 + 8 + 16 + 4, 2 * 2 * 4),
    (
        SparseMla(counts=(0, 2), keys=5, k=3, heads=2, tiles=3, tile=4, rope=2),
        224 + 2 * 56 + 48 + 192 + 16,
        2 * 2 * 2 * (14 + 12),
    ),
    (LseMerge(parts=2, rows=1, heads=2, latent=4), 64 + 16 + 32 + 8, 2 * 16),
)


@pytest.mark.parametrize(("case", "bytes_", "flops"), COSTS)
def test_costs_are_what_must_be_moved(case: Case, bytes_: int, flops: int) -> None:
    assert case.op.cost(**case.arguments()) == Cost(bytes_, flops)


# -- the indexer -------------------------------------------------------------------------------------------


@proves("A1")
@given(any_case(MQA_LOGITS))
@settings(max_examples=40)
def test_logits_are_exact_where_rows_see_keys(case: MqaLogits) -> None:
    given = case.arguments()
    (logits,) = MQA_LOGITS.reference(**given)
    q, keys, scale, weights = (wide(given[name]) for name in ("q", "keys", "scale", "weights"))
    for row, (ks, ke) in enumerate(zip(given["ks"].tolist(), given["ke"].tolist(), strict=True)):
        dots = np.maximum(q[row] @ keys[ks:ke].T, 0)
        np.testing.assert_array_equal(wide(logits[row, ks:ke]), weights[row] @ dots * scale[ks:ke])


@proves("S6")
@given(any_case(MQA_LOGITS))
def test_rows_see_their_request_up_to_themselves(case: MqaLogits) -> None:
    ranges = case.ranges()
    expected, first = [], 0
    for prefix, tokens in zip(case.prefixes, case.tokens, strict=True):
        expected += [(first, first + prefix + token + 1) for token in range(tokens)]
        first += prefix + tokens + case.behind
    expected += [(0, 0)] * case.padding
    assert list(zip(ranges.ks.tolist(), ranges.ke.tolist(), strict=True)) == expected
    assert ranges.num_keys == first


@given(any_case(MQA_LOGITS), st.sampled_from([0.0, torch.nan, torch.inf]))
@settings(max_examples=30)
def test_outside_its_range_a_logit_may_be_anything(case: MqaLogits, outside: float) -> None:
    def kernel(**given: Any) -> Results:
        (logits,) = MQA_LOGITS.reference(**given)
        return (logits.masked_fill(~case.ranges().visible(), outside),)

    assert judged(case, kernel) is None


@proves("A5")
@given(any_case(MQA_LOGITS), st.sampled_from([1, 100, 1 << 24]), st.data())
@settings(max_examples=30)
def test_one_unit_in_one_logit_shows(case: MqaLogits, chunk_elements: int, data: st.DataObject) -> None:
    # A wrong term changes a sum by a whole unit: 1/8 of a weight, 1/8 of a scale.
    visible = case.ranges().visible().nonzero()
    assume(len(visible))
    row, column = visible[data.draw(st.integers(0, len(visible) - 1))].tolist()

    def kernel(**given: Any) -> Results:
        (logits,) = MQA_LOGITS.reference(**given)
        logits[row, column] += float(given["scale"][column]) / 8
        return (logits,)

    with patch.object(judges, "CHUNK_ELEMENTS", chunk_elements):
        finding = judged(case, kernel)
    assert finding is not None
    assert f"row {row} " in finding.what


# -- sparse MLA --------------------------------------------------------------------------------------------


def softmax_by_hand(given: Arguments) -> tuple[Array, Array]:
    """The formula, a row and a head at a time."""
    q, kv, latent = wide(given["q"]), wide(given["kv"]), given["latent"]
    rows, heads, _ = q.shape
    out, lse = np.zeros((rows, heads, latent)), np.full((rows, heads), -np.inf)
    for row, keys in enumerate(given["chosen"].tolist()):
        own = kv[[key for key in keys if key >= 0]]
        for head in range(heads) if len(own) else ():
            scores = own @ q[row, head] * given["sm_scale"]
            exponentials = np.exp(scores - scores.max())
            out[row, head] = exponentials @ own[:, :latent] / exponentials.sum()
            lse[row, head] = np.log(exponentials.sum()) + scores.max()
    return out, lse


def exactly(op: Op, given: Arguments) -> tuple[Array, ...]:
    """The reference in float64."""
    as_f64 = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    return tuple(wide(result) for result in op.reference(**as_f64))


@proves("A4")
@given(any_case(SPARSE_MLA))
@settings(max_examples=40)
def test_attention_is_softmax_over_what_was_chosen(case: SparseMla) -> None:
    given = case.arguments()
    out, lse = softmax_by_hand(given)
    largest = np.abs(out).max(initial=1e-300)
    exact = exactly(SPARSE_MLA, given)
    np.testing.assert_allclose(exact[0], out, rtol=0, atol=1e-10 * largest)
    np.testing.assert_allclose(exact[1], lse, rtol=1e-12)


def summed_backwards(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float
) -> Results:
    """One dim of the score, and one key, after the other, from the last one on, in the accumulating type."""
    dtype = accumulating_type(q, kv)
    present = (chosen >= 0)[:, None]
    keys = kv[chosen.clamp(min=0)].to(dtype).masked_fill(~present.movedim(1, 2), 0)
    scores = torch.zeros(*q.shape[:2], chosen.shape[1], dtype=dtype)
    for dim in reversed(range(q.shape[2])):
        scores += q[..., dim, None].to(dtype) * keys[:, None, :, dim]
    scores = (scores * sm_scale).masked_fill(~present, -torch.inf)
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights, total = (scores - largest).exp(), torch.zeros_like(largest)
    out = torch.zeros(*q.shape[:2], latent, dtype=dtype)
    for key in reversed(range(chosen.shape[1])):
        total += weights[..., key, None]
        out += weights[..., key, None] * keys[:, None, key, :latent]
    lse = (total.log() + largest)[..., 0]
    return torch.where(total > 0, out / total, 0).to(q.dtype), lse


def in_blocks(
    q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, latent: int, sm_scale: float
) -> Results:
    """As fused kernels do: block by block, powers of two, weights rounded to the type of q for values."""
    dtype = accumulating_type(q, kv)
    state = torch.full((*q.shape[:2], 1), -torch.inf, dtype=dtype)
    total, out = torch.zeros_like(state), torch.zeros(*q.shape[:2], latent, dtype=dtype)
    log2_e = float(np.log2(np.e))
    for block in chosen.split(64, 1):
        present = (block >= 0)[:, None]
        keys = kv[block.clamp(min=0)].to(dtype).masked_fill(~present.movedim(1, 2), 0)
        scores = torch.einsum("mhd,mkd->mhk", q.to(dtype), keys) * (sm_scale * log2_e)
        scores = scores.masked_fill(~present, -torch.inf)
        largest = torch.maximum(state, scores.amax(-1, keepdim=True))
        zero = largest.nan_to_num(neginf=0)
        weights, old = (scores - zero).exp2(), (state - zero).exp2()
        total = total * old + weights.sum(-1, keepdim=True)
        out = out * old + torch.einsum("mhk,mkd->mhd", weights.to(q.dtype).to(dtype), keys[..., :latent])
        state = largest
    lse = ((total.log2() + state.nan_to_num(neginf=0)) / log2_e)[..., 0]
    return torch.where(total > 0, out / total, 0).to(q.dtype), lse


RIGHT = {"summed backwards": summed_backwards, "in blocks": in_blocks}


@proves("A5")
@given(st.sampled_from(sorted(RIGHT)), any_case(SPARSE_MLA))
@settings(max_examples=80)
def test_right_attention_is_within_the_budget(name: str, case: SparseMla) -> None:
    assume(case.keys)
    assert judged(case, RIGHT[name]) is None


@st.composite
def one_wrong_key(draw: st.DrawFn) -> tuple[SparseMla, str, torch.Tensor]:
    """A case, and its choice with one key of a row missing, twice, another one, or one too many."""
    case = draw(any_case(SPARSE_MLA).filter(lambda case: max(case.counts, default=0) > 1))
    chosen = case.arguments()["chosen"]
    longest = chosen[case.counts.index(max(case.counts))]
    row = draw(st.sampled_from([i for i, count in enumerate(case.counts) if count]))
    own = chosen[row][chosen[row] >= 0].tolist()
    others = [key for key in longest.tolist() if key >= 0 and key not in own]
    one = draw(st.sampled_from(own))
    wrong = {"missing": chosen[row].where(chosen[row] != one, -1)}
    wrong["twice"] = torch.cat([chosen[row], torch.tensor([one])])
    if others:
        wrong["another"] = chosen[row].where(chosen[row] != one, draw(st.sampled_from(others)))
        wrong["one too many"] = torch.cat([chosen[row], torch.tensor([draw(st.sampled_from(others))])])
    fault = draw(st.sampled_from(sorted(wrong)))
    changed = torch.cat([chosen, torch.full((len(chosen), 1), -1)], 1)
    changed[row] = -1
    changed[row, : len(wrong[fault])] = wrong[fault]
    return case, fault, changed


@proves("A5")
@given(one_wrong_key())
@settings(max_examples=80)
def test_one_wrong_key_exceeds_the_budget(fault: tuple[SparseMla, str, torch.Tensor]) -> None:
    case, _, changed = fault

    def kernel(chosen: torch.Tensor, **given: Any) -> Results:
        return SPARSE_MLA.reference(chosen=changed, **given)

    assert judged(case, kernel) is not None


# -- merge -------------------------------------------------------------------------------------------------


@proves("A6")
@given(any_case(LSE_MERGE))
def test_a_merge_weighs_parts_by_their_exponentials(case: LseMerge) -> None:
    given = case.arguments()
    outs, lses = wide(given["outs"]), wide(given["lses"])
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for row, head in np.ndindex(lse.shape):
        parts = np.flatnonzero(lses[:, row, head] > -np.inf)
        if len(parts):
            own = lses[parts, row, head]
            weights = np.exp(own - own.max())
            out[row, head] = weights @ outs[parts, row, head] / weights.sum()
            lse[row, head] = own.max() + np.log(weights.sum())
    exact = exactly(LSE_MERGE, given)
    np.testing.assert_allclose(exact[0], out, rtol=0, atol=1e-12 * np.abs(out).max(initial=1))
    np.testing.assert_allclose(exact[1], lse, rtol=1e-12)


def one_after_the_other(outs: torch.Tensor, lses: torch.Tensor) -> Results:
    """Two at a time, from the last part on, as ring attention does."""
    dtype = accumulating_type(outs, lses)
    out, lse = torch.zeros_like(outs[0], dtype=dtype), torch.full_like(lses[0], -torch.inf)
    for part, part_lse in reversed(list(zip(outs.to(dtype), lses, strict=True))):
        both = torch.logaddexp(lse, part_lse)
        zero = both.nan_to_num(neginf=0)
        kept = part.masked_fill(part_lse.isinf()[..., None], 0)
        out = (lse - zero).exp()[..., None] * out + (part_lse - zero).exp()[..., None] * kept
        lse = both
    return out.to(outs.dtype), lse


@proves("A5")
@given(any_case(LSE_MERGE))
def test_a_right_merge_is_within_the_budget(case: LseMerge) -> None:
    assert judged(case, one_after_the_other) is None


@proves("A5")
@given(any_case(LSE_MERGE).filter(lambda case: case.rows and case.spread <= 1), st.data())
def test_one_part_more_or_less_exceeds_the_budget(case: LseMerge, data: st.DataObject) -> None:
    lses = case.arguments()["lses"]
    has_keys = (~lses.isinf()).nonzero()
    assume(len(has_keys))
    part, row, head = has_keys[data.draw(st.integers(0, len(has_keys) - 1))].tolist()
    twice = data.draw(st.booleans())

    def kernel(outs: torch.Tensor, lses: torch.Tensor) -> Results:
        if twice:
            return LSE_MERGE.reference(torch.cat([outs, outs[[part]]]), torch.cat([lses, lses[[part]]]))
        lses = lses.clone()
        lses[part, row, head] = -torch.inf
        return LSE_MERGE.reference(outs, lses)

    assert judged(case, kernel) is not None
