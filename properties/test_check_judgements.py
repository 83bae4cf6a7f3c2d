"""Right kernels pass, wrong ones and cheats fail for the right reason."""

from __future__ import annotations

import time

import pytest

from properties.kernel_trials import ALONE, CHEATS, DEADLY, candidate_of, named, tried
from properties.kernels import faults
from properties.kernels.adversaries import ADVERSARIES
from properties.kernels.adversaries.adversary import Adversary
from refmodel.ops.catalogue import OPS


@pytest.mark.parametrize("op", ALONE)
def test_a_right_kernel_passes(op: str) -> None:
    result = tried(candidate_of(OPS[op].reference, op), examples=10)
    assert result.counterexample is None
    assert result.cases > 5


@pytest.mark.parametrize(
    "adversary", [one for one in ADVERSARIES if one.op in ALONE and not one.huge], ids=named
)
def test_a_wrong_kernel_fails_for_its_reason(adversary: Adversary) -> None:
    found = tried(candidate_of(adversary.function, adversary.op)).counterexample
    assert found is not None
    assert found.finding.law == (adversary.law or adversary.kind)


@pytest.mark.parametrize("cheat", [one for one in CHEATS if one.kind not in DEADLY], ids=named)
def test_a_cheat_fails_for_its_reason(cheat: Adversary) -> None:
    found = tried(candidate_of(cheat.function, cheat.op)).counterexample
    assert found is not None
    assert found.finding.law == (cheat.law or cheat.kind)


def test_every_rule_of_the_kit_has_a_cheat_that_breaks_it() -> None:
    on_a_gpu = {faults.DEVICE}
    of_a_list = {faults.UNEXPECTED_PASS}
    assert {cheat.kind for cheat in CHEATS} - {""} == set(faults.STATEMENTS) - on_a_gpu - of_a_list


def test_checking_one_operation_takes_seconds() -> None:
    start = time.process_time()
    tried(candidate_of(OPS["rerange"].reference, "rerange"), examples=40)
    assert time.process_time() - start < 10
