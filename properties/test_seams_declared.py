"""A kernel in place is called within what it declares; the rest is left to the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refmodel.layout import ownership
from refmodel.layout.geometry import Grid
from refmodel.ops.catalogue import OPS
from refmodel.ops.declare import Capabilities
from sim.kernels.called import Called, WrongResult
from sim.kernels.candidate import Candidate
from sim.kernels.seams.seam import Unsuited


def declared(op: str, function: Callable[..., object], **capabilities: object) -> Called:
    return Called(Candidate(OPS[op], function, Capabilities(**capabilities)))  # type: ignore[arg-type]


def to_physical(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> torch.Tensor:
    return ownership.to_physical(slots, rank, Grid(world_size, page_size))


def mla_write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    assert cache.is_contiguous()
    cache[slots[slots >= 0].long()] = rows[slots >= 0]


def test_a_page_size_that_is_not_declared_is_left_to_the_reference() -> None:
    called = declared("logical_to_physical", to_physical, page_sizes=(64,))
    called.given((torch.arange(3), 0, 2, 64))
    with pytest.raises(Unsuited):
        called.given((torch.arange(3), 0, 2, 16))


def test_a_width_that_is_not_declared_is_left_to_the_reference() -> None:
    called = declared("mla_write", mla_write, widths=(4,))
    called.given((torch.zeros(3, 4), torch.arange(2), torch.ones(2, 4)))
    with pytest.raises(Unsuited):
        called.given((torch.zeros(3, 8), torch.arange(2), torch.ones(2, 8)))


def test_indices_come_in_a_type_that_is_declared() -> None:
    called = declared("logical_to_physical", to_physical, index_dtypes=("int32",))
    assert called.given((torch.arange(3), 0, 2, 4)).arguments["slots"].dtype == torch.int32


def test_numbers_come_in_a_declared_type_only_if_it_holds_them() -> None:
    called = declared("sparse_mla", OPS["sparse_mla"].reference, dtypes=(torch.bfloat16,))
    chosen = torch.zeros(1, 1, dtype=torch.int64)
    exact = torch.tensor([[[1.0, torch.nan]]])
    given = called.given((exact, exact[0], chosen, 1, 1.0)).arguments
    assert (given["q"].dtype, given["kv"].dtype) == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(Unsuited):
        called.given((exact + 2**-20, exact[0], chosen, 1, 1.0))


def test_nan_does_not_come_to_a_kernel_that_says_so() -> None:
    called = declared("sparse_mla", OPS["sparse_mla"].reference, tail_nan=False)
    q = torch.ones(1, 1, 2)
    kv = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]])
    given = called.given((q, kv, torch.zeros(1, 1, dtype=torch.int64), 1, 1.0))
    assert bool(given.arguments["kv"].isfinite().all())


def test_what_is_written_to_a_contiguous_copy_comes_back() -> None:
    cache = torch.zeros(4, 6, dtype=torch.uint8)[:, ::2]
    rows = torch.arange(6, dtype=torch.uint8).view(2, 3)
    called = declared("mla_write", mla_write, contiguous=True)
    called.results(called.given((cache, torch.tensor([2, -1]), rows)))
    assert cache.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 2], [0, 0, 0]]


def test_a_device_that_is_not_here_is_left_to_the_reference() -> None:
    called = declared("logical_to_physical", to_physical, devices=("cuda",))
    if torch.cuda.is_available():
        given = called.given((torch.arange(3), 0, 2, 4))
        assert given.arguments["slots"].is_cuda
        assert called.results(given)[0].device.type == "cpu"
    else:
        with pytest.raises(Unsuited):
            called.given((torch.arange(3), 0, 2, 4))


def test_results_go_to_out_where_a_kernel_needs_it() -> None:
    def logical_to_physical(
        slots: torch.Tensor, rank: int, world_size: int, page_size: int, out: torch.Tensor
    ) -> None:
        out.copy_(to_physical(slots, rank, world_size, page_size))

    called = declared("logical_to_physical", logical_to_physical)
    (result,) = called.results(called.given((torch.tensor([453, 512]), 3, 4, 64)))
    assert result.tolist() == [69, -1]


def test_a_result_of_another_shape_is_named() -> None:
    called = declared("logical_to_physical", lambda *arguments: to_physical(*arguments)[1:])
    with pytest.raises(WrongResult, match=r"physical of logical_to_physical: expected torch.int64 \[3\]"):
        called.results(called.given((torch.arange(3), 0, 2, 4)))
