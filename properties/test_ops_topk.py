"""Operations that choose keys (laws A2, A3, A6): word by word, a row at a time; and who else is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from properties.kernels.cases.case import Case
from properties.kernels.cases.topk import TopkMerge, TopkTransformPaged, TopkTransformRagged
from properties.op_checks import any_case, judged
from properties.proofs import proves
from properties.test_topk import obeys
from refmodel.ops.op import Cost, Results
from refmodel.ops.topk import TOPK_MERGE, TOPK_TRANSFORM_PAGED, TOPK_TRANSFORM_RAGGED

AnyChoice = TopkTransformPaged | TopkTransformRagged


@pytest.mark.parametrize(
    ("case", "bytes_"),
    [
        (TopkTransformPaged(prefixes=(2,), tokens=(2,), k=3), 7 * 4 + 2 * 16 + 2 * 3 * 8),
        (TopkTransformRagged(prefixes=(2,), tokens=(2,), k=3), 7 * 4 + 2 * 16 + 2 * 3 * 8),
        (TopkMerge(counts=(2, 1), rows=1, width=2, k=3), 4 * 4 + 4 * 8 + 3 * 8),
    ],
)
def test_costs_are_what_must_be_moved(case: Case, bytes_: int) -> None:
    assert case.op.cost(**case.arguments()) == Cost(bytes_)


# -- both transforms ---------------------------------------------------------------------------------------


def request_of_row(case: AnyChoice) -> list[int | None]:
    """None of padding."""
    rows: list[int | None] = [i for i, tokens in enumerate(case.tokens) for _ in range(tokens)]
    return [*rows, *[None] * case.padding]


def own_logits(case: AnyChoice, logits: torch.Tensor) -> list[list[float]]:
    bounds = zip(logits, case.ranges().ks.tolist(), case.ranges().ke.tolist(), strict=True)
    return [row[ks:ke].tolist() for row, ks, ke in bounds]


def check_choices(case: AnyChoice, logits: torch.Tensor, chosen: list[list[int]]) -> None:
    """``chosen`` [rows, k]: positions, −1 for none."""
    for own, row in zip(own_logits(case, logits), chosen, strict=True):
        assert obeys(row, own, case.k) if case.k <= 20 else _obeys_quickly(row, own, case.k)


def _obeys_quickly(chosen: list[int], logits: list[float], k: int) -> bool:
    """The same for many keys: the chosen logits are the highest, ties and all, as a sorted list shows."""
    if len(logits) <= k:
        return chosen == [*range(len(logits)), *[-1] * (k - len(logits))]
    best = sorted(logits, reverse=True)[:k]
    return len(set(chosen)) == k and sorted((logits[key] for key in chosen), reverse=True) == best


@proves("A2", "A3")
@given(any_case(TOPK_TRANSFORM_PAGED))
@settings(max_examples=40)
def test_paged_gives_slots_of_the_best_keys(case: TopkTransformPaged) -> None:
    arguments = case.arguments()
    (slots,) = TOPK_TRANSFORM_PAGED.reference(**arguments)
    positions = []
    for request, row in zip(request_of_row(case), slots.tolist(), strict=True):
        pages = [] if request is None else arguments["page_table"][request].tolist()
        length = 0 if request is None else case.lengths[request]
        where = {pages[p // case.page] * case.page + p % case.page: p for p in range(length)} | {-1: -1}
        positions.append([where[slot] for slot in row])
    check_choices(case, arguments["logits"], positions)


@proves("A2", "A3")
@given(any_case(TOPK_TRANSFORM_RAGGED))
@settings(max_examples=40)
def test_ragged_gives_rows_of_the_best_keys(case: TopkTransformRagged) -> None:
    arguments = case.arguments()
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(**arguments)
    positions = []
    for request, row in zip(request_of_row(case), rows.tolist(), strict=True):
        first = 0 if request is None else case.key_starts[request] + request * case.gap
        positions.append([key - first if key >= 0 else -1 for key in row])
    check_choices(case, arguments["logits"], positions)


@proves("A3")
@given(any_case(TOPK_TRANSFORM_PAGED))
def test_no_two_requests_share_a_page_and_tables_end_in_nothing(case: TopkTransformPaged) -> None:
    table = case.arguments()["page_table"]
    pages = table[table >= 0].tolist()
    assert len(set(pages)) == len(pages)
    assert bool((table[:, -1] == -1).all())
    used = (table >= 0).sum(1)
    for row, count in zip(table, used.tolist(), strict=True):
        assert bool((row[:count] >= 0).all())


@proves("A2")
@given(any_case(TOPK_TRANSFORM_RAGGED), st.integers(0, 2**16))
@settings(max_examples=40)
def test_order_and_ties_of_long_rows_are_free(case: TopkTransformRagged, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def kernel(**given: Any) -> Results:
        # Columns change places before the choice: of equal logits others come first.
        (rows,) = TOPK_TRANSFORM_RAGGED.reference(**given)
        for i, (ks, ke) in enumerate(zip(given["ks"].tolist(), given["ke"].tolist(), strict=True)):
            if ke - ks > case.k:
                order = torch.randperm(ke - ks, generator=generator)
                best = order[given["logits"][i, ks:ke][order].topk(case.k).indices]
                best = best[torch.randperm(case.k, generator=generator)]
                rows[i] = best + given["row_starts"][i]
        return (rows,)

    assert judged(case, kernel) is None


@proves("A2")
@given(any_case(TOPK_TRANSFORM_PAGED) | any_case(TOPK_TRANSFORM_RAGGED), st.data())
@settings(max_examples=120)
def test_one_wrong_entry_shows(case: AnyChoice, data: st.DataObject) -> None:
    op = case.op
    (right,) = op.reference(**case.arguments())
    assume(right.numel())
    row, entry = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, case.k - 1))
    entries = right[row].tolist()
    instead = data.draw(st.sampled_from([-2, -1, 2**31 - 1, entries[0], entries[-1]]))
    assume(instead != entries[entry])

    def kernel(**given: Any) -> Results:
        (result,) = op.reference(**given)
        result[row, entry] = instead
        return (result,)

    finding = judged(case, kernel)
    assert finding is not None
    assert f"row {row}" in finding.what


# -- merge -------------------------------------------------------------------------------------------------


def candidates(case: TopkMerge) -> list[dict[int, float]]:
    """Of each row, key to logit."""
    arguments = case.arguments()
    return [
        {
            key: logit
            for part in range(len(case.counts))
            for key, logit in zip(
                arguments["keys"][part, row].tolist(), arguments["logits"][part, row].tolist(), strict=True
            )
            if key >= 0
        }
        for row in range(case.rows)
    ]


@proves("A2", "A6")
@given(any_case(TOPK_MERGE))
@settings(max_examples=40)
def test_a_merge_chooses_among_all_candidates(case: TopkMerge) -> None:
    (merged,) = TOPK_MERGE.reference(**case.arguments())
    for found, row in zip(candidates(case), merged.tolist(), strict=True):
        ascending = sorted(found)
        places = {key: place for place, key in enumerate(ascending)} | {-1: -1}
        logits, chosen = [found[key] for key in ascending], [places[key] for key in row]
        assert obeys(chosen, logits, case.k) if case.k <= 20 else _obeys_quickly(chosen, logits, case.k)


@proves("A6")
@given(any_case(TOPK_MERGE))
def test_candidates_are_in_no_two_parts(case: TopkMerge) -> None:
    keys = case.arguments()["keys"]
    for row in keys.movedim(1, 0):
        own = row[row >= 0].tolist()
        assert len(set(own)) == len(own)


@proves("A6")
@given(any_case(TOPK_MERGE), st.integers(0, 2**16))
@settings(max_examples=40)
def test_order_and_ties_of_merged_long_rows_are_free(case: TopkMerge, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def kernel(logits: torch.Tensor, keys: torch.Tensor, k: int) -> Results:
        (merged,) = TOPK_MERGE.reference(logits, keys, k)
        for row, found in enumerate(candidates(case)):
            if len(found) > k:
                ids = torch.tensor(list(found))[torch.randperm(len(found), generator=generator)]
                scores = torch.tensor([found[key] for key in ids.tolist()])
                best = ids[scores.topk(k).indices]
                merged[row] = best[torch.randperm(k, generator=generator)]
        return (merged,)

    assert judged(case, kernel) is None


@proves("A6")
@given(any_case(TOPK_MERGE), st.data())
@settings(max_examples=60)
def test_one_wrong_entry_of_a_merge_shows(case: TopkMerge, data: st.DataObject) -> None:
    (right,) = TOPK_MERGE.reference(**case.arguments())
    assume(right.numel())
    row, entry = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, case.k - 1))
    entries = right[row].tolist()
    instead = data.draw(st.sampled_from([-2, -1, 2**31 - 1, entries[0], entries[-1]]))
    assume(instead != entries[entry])

    def kernel(logits: torch.Tensor, keys: torch.Tensor, k: int) -> Results:
        (merged,) = TOPK_MERGE.reference(logits, keys, k)
        merged[row, entry] = instead
        return (merged,)

    finding = judged(case, kernel)
    assert finding is not None
    assert f"row {row}" in finding.what
