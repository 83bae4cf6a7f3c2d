"""In place only within the block, for its thread alone, and never in what ranks compare with."""

from __future__ import annotations

import threading

import pytest
import torch

from properties.kernels_in_place import outcome, right, wrong
from refmodel.layout import ownership
from refmodel.layout.geometry import Grid
from sim.kernels import in_place as standing
from sim.kernels.in_place import in_place
from sim.kernels.uses import Uses


def test_within_the_block_only_this_thread_has_the_kernel_and_behind_it_nobody() -> None:
    before = ownership.to_physical
    slots, grid = torch.arange(8), Grid(2, 2)
    other: list[torch.Tensor] = []
    with in_place(wrong("logical_to_physical", "logical_slots_of_its_own")) as uses:
        assert ownership.to_physical is not before
        mine = ownership.to_physical(slots, 1, grid)
        thread = threading.Thread(target=lambda: other.append(ownership.to_physical(slots, 1, grid)))
        thread.start()
        thread.join()
        assert uses() == Uses({"logical_to_physical": 1})
    assert ownership.to_physical is before
    assert torch.equal(other[0], before(slots, 1, grid))
    assert not torch.equal(mine, other[0])


def test_the_functions_are_put_back_after_a_run_that_failed() -> None:
    before = ownership.to_physical
    assert outcome("worked/tokens-100", wrong("gather_materialize", "skips_without_pages")).findings
    assert ownership.to_physical is before


def test_what_ranks_compare_with_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    name, target = "incidents/split-02-last-token-lost", right("owner_mask")
    calls = outcome(name, target).uses.calls["owner_mask"]
    monkeypatch.setattr(standing, "_JUDGES", ())  # now a kernel has a say in what it is compared with
    assert outcome(name, target).uses.calls["owner_mask"] > calls
