"""The mutants prove the properties; these tests prove the mutants."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from properties.catalogued import CATALOGUE
from properties.mutants import MUTANTS
from properties.mutants.matrix import first_kill, try_mutant
from properties.mutants.mutant import Mutant
from properties.proofs import Proof, all_proofs
from refmodel.laws import LAWS
from refmodel.layout import plan, split
from refmodel.layout.geometry import Extent, Grid


def test_ids_are_unique() -> None:
    assert [name for name, n in Counter(m.id for m in MUTANTS).items() if n > 1] == []


@pytest.mark.parametrize("law_id", LAWS)
def test_every_law_has_a_property_and_a_mutant(law_id: str) -> None:
    assert any(law_id in proof.laws for proof in all_proofs()), f"no property proves {law_id}"
    assert any(law_id in mutant.laws for mutant in MUTANTS), f"no mutant breaks {law_id}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_every_mutant_says_what_is_wrong_and_where(mutant: Mutant) -> None:
    assert mutant.fault.endswith(".")
    assert mutant.place.startswith(("refmodel.", "sim."))
    assert mutant.source


# Incidents that no run of the model can show; a property does.
NOT_IN_A_RUN = {
    "attn-04",  # rounding each partial output costs less than the budget of bf16, also on 64 ranks
    "topk-04",  # what is built though unused is read by nobody
}


def test_every_incident_of_the_catalogue_is_a_mutant() -> None:
    incidents = {scenario.incident for scenario in CATALOGUE if scenario.incident}
    shape = re.compile(r"(split|own|view|attn|topk|fmt|draft|radix|host|pd|adm)-\d\d")
    assert incidents | NOT_IN_A_RUN == {mutant.id for mutant in MUTANTS if shape.fullmatch(mutant.id)}


def test_a_mutant_stands_wherever_the_right_version_was_known_and_leaves_no_trace() -> None:
    right = split.balanced
    mutant = next(m for m in MUTANTS if m.id == "split-02")
    extent, grid = Extent(0, 7), Grid(2, 64)
    with mutant.in_place():
        assert split.balanced is not right
        assert split.token_balanced_bounds(extent, grid)[-1] == 4
        assert plan.plan_batch([extent], grid, split.Split.TOKEN_BALANCED).bounds[0][-1] == 4
    assert split.balanced is right
    assert split.token_balanced_bounds(extent, grid)[-1] == 7


def test_a_mutant_of_a_cached_property_is_undone_too() -> None:
    mutant = next(m for m in MUTANTS if m.id == "split-03")
    batch = [Extent(0, 698)], Grid(4, 8), split.Split.PAGE_ALIGNED
    with mutant.in_place():
        assert plan.plan_batch(*batch).row_counts == (174, 174, 174, 174)
    assert plan.plan_batch(*batch).row_counts == (170, 176, 176, 176)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_every_mutant_is_killed(mutant: Mutant) -> None:
    row = try_mutant(mutant.id)
    assert row.caught, f"no property of {', '.join(row.laws)} caught: {row.fault}"
    assert row.exposed or not row.has_scenario, f"its scenario does not expose: {row.fault}"


@pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")
@pytest.mark.parametrize("proof", [*all_proofs()], ids=lambda proof: proof.name)
def test_what_catches_a_mutant_lets_the_right_version_pass(proof: Proof) -> None:
    assert first_kill([proof], most=2) is None
