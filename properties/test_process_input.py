"""What goes into a world of processes arrives as it was sent, or is refused."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from properties import process_programs as programs
from refmodel.errors import InvalidInput
from sim.processes.parcel import pack, unpack
from sim.world import World

Worlds = Callable[..., World]


@pytest.mark.gloo
def test_what_cannot_travel_is_refused_and_the_pool_goes_on(gloo_world: Worlds) -> None:
    world = gloo_world(2)
    before = world.run(programs.process_id)
    with pytest.raises(InvalidInput, match="program between processes"):
        world.run(lambda group: None)
    with pytest.raises(InvalidInput, match="argument 1 between processes"):
        world.run(programs.dies, 0, threading.Lock())
    assert world.run(programs.process_id) == before  # nothing was sent: the same processes
    with pytest.raises(InvalidInput, match="result between processes"):
        world.run(programs.returns_a_lock)
    assert world.run(programs.who) == [(0, 2), (1, 2)]


@pytest.mark.gloo
def test_a_program_of_another_folder_is_found_by_running_workers(
    gloo_world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = gloo_world(2)
    world.run(programs.who)
    (tmp_path / "elsewhere.py").write_text("def program(group): return group.rank() + 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = importlib.import_module("elsewhere")

    assert world.run(elsewhere.program) == [10, 11]
    (tmp_path / "elsewhere.py").unlink()
    monkeypatch.undo()
    with World.gloo(2) as fresh:
        with pytest.raises(InvalidInput, match="No module named 'elsewhere'"):
            fresh.run(elsewhere.program)
        assert fresh.run(programs.who) == [(0, 2), (1, 2)]


@pytest.mark.gloo
def test_arguments_stay_the_callers_own(gloo_world: Worlds) -> None:
    counts = torch.tensor([1, 2])
    gloo_world(2).run(programs.write_into, counts)
    assert counts.tolist() == [1, 2]
    assert not counts.is_shared()


@pytest.mark.parametrize(("size", "timeout"), [(0, 1), (65, 1), (2, 0), (2, -1), (2, float("nan")), (2, 1e9)])
@pytest.mark.parametrize("make", [World.gloo, World.nccl])
def test_sizes_and_limits_without_meaning_are_refused(make: Worlds, size: int, timeout: float) -> None:
    with pytest.raises(InvalidInput):
        make(size, timeout=timeout)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_travel_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    (copy,) = unpack(pack([tensor]))
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))
