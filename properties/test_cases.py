"""What holds of every case of every operation: it is a value, it replays, and a right kernel passes it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from properties.kernels.adversaries import ADVERSARIES
from properties.kernels.adversaries.adversary import Adversary, adversary
from properties.kernels.cases.case import Case
from properties.kernels.cases.catalogue import CASES
from properties.mutants import named_mutant
from properties.mutants.mutant import Mutant
from properties.op_checks import bits, given_as, judged
from refmodel.errors import InvalidInput
from refmodel.ops.catalogue import OPS
from refmodel.ops.op import Op

INDEX = (torch.int64, torch.int32)
ALONE = tuple(kind for kind in CASES.values() if not kind.op.collective)


def strided(value: Any) -> Any:
    """The same tensor, but its elements do not follow each other."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    wide = value.new_empty(*value.shape[:-1], 2 * value.shape[-1])
    view = wide[..., ::2]
    view.copy_(value)
    return view


# -- the catalogues ----------------------------------------------------------------------------------------


def test_every_operation_has_cases_and_adversaries() -> None:
    assert set(OPS) == set(CASES)
    assert {found.op for found in ADVERSARIES} == set(OPS)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_reference_has_its_operations_signature(op: Op) -> None:
    for function in filter(None, (op.reference, op.spaces, op.cost, op.row_width)):
        assert list(inspect.signature(function).parameters) == [argument.name for argument in op.arguments]


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.op.name)
def test_every_corner_is_judged_right_with_any_indices_and_strides(kind: type[Case]) -> None:
    for case in kind.corners():
        op, arguments = case.op, case.arguments()
        assert list(arguments) == [argument.name for argument in op.arguments]
        assert op.cost(**arguments).bytes >= 0
        assert case.row_width == (op.row_width and op.row_width(**arguments))
        for index in INDEX:
            assert judged(case, op.reference, index) is None
        plain, spread = given_as(op, case.arguments(), torch.int64), case.arguments()
        spread = {name: strided(value) for name, value in spread.items()}
        outcomes = [op.outcome(given_, op.reference(**given_)) for given_ in (spread, plain)]
        assert op.judge(arguments, *outcomes) is None


@pytest.mark.parametrize("kind", CASES.values(), ids=lambda kind: kind.op.name)
def test_cases_can_have_rows_of_another_width(kind: type[Case]) -> None:
    knows_rows = kind.op.row_width is not None
    for case in kind.corners():
        other = case.with_width(576)
        assert (case.row_width is not None) == (other is not None) == knows_rows
        if other is not None:
            assert other.row_width == 576
            assert not kind.op.collective or other.arguments()
            assert kind.op.collective or kind.op.row_width(**other.arguments()) == 576  # type: ignore[misc]


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.op.name)
def test_a_case_is_a_value_that_replays(kind: type[Case]) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(kind.strategy())
    def holds(case: Case) -> None:
        assert msgspec.json.decode(msgspec.json.encode(case), type=kind) == case
        assert eval(repr(case), {kind.__name__: kind}) == case
        arguments = case.arguments()
        before = bits(arguments)
        assert bits(case.arguments()) == before
        case.op.reference(**arguments)
        changed = {name for name, value in bits(arguments).items() if value != before[name]}
        assert changed <= set(case.op.written)
        assert judged(case, case.op.reference) is None

    holds()


# -- what stands behind the references ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("zigzag_split", "relative-pages"),
        ("rerange", "rerange-inverted"),
        ("logical_to_physical", "own-01"),
        ("owner_mask", "owner-by-local-page"),
        ("transfer_pairs", "pd-01"),
        ("validate_page_groups", "first-and-last-slot-checked"),
        ("materialize", "view-02"),
        ("mla_write", "minus-one-is-an-index"),
        ("index_write", "first-field-only"),
        ("index_read", "scales-among-the-keys"),
        ("quantize_index", "fmt-02"),
        ("quantize_mla", "rope-before-the-scales"),
    ],
)
def test_a_fault_of_the_model_is_one_of_the_operation(op: str, name: str) -> None:
    """A reference is the model's own function: what is wrong there, a judge finds here."""
    assert any(map(partial(_shows, named_mutant(name)), CASES[op].corners()))


def _shows(mutant: Mutant, case: Case) -> bool:
    op, before, mine, others = case.op, *(case.arguments() for _ in range(3))
    with mutant.in_place():
        wrong = op.outcome(mine, op.reference(**mine))
    right = op.outcome(others, op.reference(**others))
    if [result.shape for result in wrong] != [result.shape for result in right]:
        return True
    return op.judge(before, wrong, right) is not None


# -- adversaries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [found for found in ADVERSARIES if found.law and not found.huge and not OPS[found.op].collective],
    ids=lambda found: f"{found.op}-{found.name}",
)
def test_an_adversary_breaks_its_law_on_a_corner(wrong: Adversary) -> None:
    names = [argument.name for argument in OPS[wrong.op].arguments]
    assert list(inspect.signature(wrong.function).parameters)[: len(names)] == names
    assert wrong.fault.endswith(".")
    corners = ((case, index) for index in INDEX for case in CASES[wrong.op].corners())
    found = next(filter(None, (judged(case, wrong.function, index) for case, index in corners)), None)
    assert found is not None, f"no corner shows: {wrong.fault}"
    assert found.law == wrong.law


def test_an_adversary_says_how_it_fails() -> None:
    with pytest.raises(InvalidInput, match="either a law or a kind"):
        adversary("rerange")
    with pytest.raises(InvalidInput, match="law"):
        adversary("rerange", law="Z9")
