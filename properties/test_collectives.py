"""Every collective that torch has, one by one, and what is refused, on lockstep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import example, given
from hypothesis import strategies as st

from refmodel.errors import InvalidInput
from sim.failures import Diverged, RankFailed, WorldUnavailable
from sim.world import World

# torch does not export it.
coalescing: Any = vars(dist)["_coalescing_manager"]

BITS = ["8", "16", "32", "64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
SMALL = ["8_e4m3fn", "8_e4m3fnuz", "8_e5m2", "8_e5m2fnuz", "8_e8m0fnu", "4_e2m1fn_x2"]
ALL_DTYPES = ["bool", *(kind + bits for kind in ("int", "uint") for bits in BITS), *FLOATS]
ALL_DTYPES += [f"float{kind}" for kind in SMALL]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_all_types_travel_unchanged(name: str) -> None:
    dtype = getattr(torch, name)

    def program(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        mine = torch.full((16,), group.rank() + 1, dtype=torch.uint8)
        mine = mine.view(dtype) if dtype != torch.bool else mine.to(dtype)
        parts = [torch.zeros_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine)
        whole = torch.cat([torch.zeros_like(mine)] * 2)
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, mine)
        dist.broadcast(mine, src=1)
        return *parts, whole, mine

    first, second, whole, mine = World.lockstep(2).run(program)[0]

    def as_bytes(tensor: torch.Tensor) -> list[int]:
        return tensor.view(torch.uint8).tolist()

    expected = [1] * 16 if dtype == torch.bool else [2] * 16
    assert as_bytes(first) == [1] * 16
    assert as_bytes(second) == as_bytes(mine) == expected
    assert as_bytes(whole) == [1] * 16 + expected


@pytest.mark.parametrize("fold", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_all_reductions(fold: str) -> None:
    values = torch.tensor([[6, 1], [3, 5], [2, 7]])

    def program(group: dist.ProcessGroup) -> list[torch.Tensor]:
        op, size = getattr(dist.ReduceOp, fold), group.size()
        mine = values[group.rank()]
        everywhere, at_root, scattered = mine.clone(), mine.clone(), torch.zeros(2, dtype=torch.int64)
        dist.all_reduce(everywhere, op)
        dist.reduce(at_root, dst=1, op=op)
        dist.reduce_scatter(scattered, [mine * (rank + 1) for rank in range(size)], op)
        return [everywhere, at_root, scattered]

    expected = {
        "SUM": [11, 13],
        "AVG": [11 // 3, 13 // 3],
        "PRODUCT": [36, 35],
        "MIN": [2, 1],
        "MAX": [6, 7],
        "BAND": [6 & 3 & 2, 1 & 5 & 7],
        "BOR": [6 | 3 | 2, 1 | 5 | 7],
        "BXOR": [6 ^ 3 ^ 2, 1 ^ 5 ^ 7],
    }[fold]
    results = World.lockstep(3).run(program)
    assert all(result[0].tolist() == expected for result in results)
    assert results[1][1].tolist() == expected
    assert results[0][1].tolist() == values[0].tolist()
    assert results[0][2].tolist() == expected


def laid_out(layout: str, rows: int, size: int) -> torch.Tensor:
    """An output for ``rows`` × 2 numbers of each rank, which may be of any shape."""
    if layout == "transposed":
        return torch.zeros(2, size * rows).t()
    shapes = {"rows": (size * rows, 2), "flat": (size * rows * 2,), "of ranks": (size, rows, 2)}
    return torch.zeros(shapes[layout])


@given(
    layouts=st.lists(st.sampled_from(["rows", "flat", "of ranks", "transposed"]), min_size=3, max_size=3),
    rows=st.integers(0, 3),
    is_async=st.booleans(),
)
@example(layouts=["transposed", "rows", "flat"], rows=1, is_async=False)
def test_what_is_gathered_takes_the_shape_it_finds(layouts: list[str], rows: int, is_async: bool) -> None:
    def program(group: dist.ProcessGroup) -> torch.Tensor:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        output = laid_out(layouts[group.rank()], rows, group.size())
        place, shape = output.data_ptr(), output.shape
        work = gather(output, torch.full((rows, 2), float(group.rank())), async_op=is_async)
        if work is not None:
            work.wait()
        assert (output.data_ptr(), output.shape) == (place, shape)
        return output

    expected = torch.arange(3.0).repeat_interleave(2 * rows)
    assert all(torch.equal(output.reshape(-1), expected) for output in World.lockstep(3).run(program))


def test_gathering_no_numbers_leaves_the_output_alone() -> None:
    def program(group: dist.ProcessGroup) -> tuple[int, ...]:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        output = torch.zeros(5, 0)
        gather(output, torch.zeros(2, 0))
        return tuple(output.shape)

    assert World.lockstep(2).run(program) == [(5, 0)] * 2


def test_uneven_lists_are_gathered_and_exchanged() -> None:
    def program(group: dist.ProcessGroup) -> list[list[int]]:
        rank, size = group.rank(), group.size()
        parts = [torch.zeros(other, dtype=torch.int64) for other in range(size)]
        dist.all_gather(parts, torch.full((rank,), rank))
        taken = [torch.zeros(other + rank, dtype=torch.int64) for other in range(size)]
        dist.all_to_all(taken, [torch.full((other + rank,), rank) for other in range(size)])
        return [part.tolist() for part in parts + taken]

    for rank, parts in enumerate(World.lockstep(3).run(program)):
        assert parts[:3] == [[], [1], [2, 2]]
        assert parts[3:] == [[other] * (other + rank) for other in range(3)]


def test_object_collectives() -> None:
    def program(group: dist.ProcessGroup) -> list[Any]:
        rank, size = group.rank(), group.size()
        gathered: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object({"of": rank}, gathered, dst=1)
        told = [("root", rank)]
        dist.broadcast_object_list(told, src=2)
        given: list[Any] = [None]
        dist.scatter_object_list(given, [f"to {other}" for other in range(size)], src=0)
        return [gathered, *told, *given]

    assert World.lockstep(3).run(program) == [
        [None, ("root", 2), "to 0"],
        [[{"of": 0}, {"of": 1}, {"of": 2}], ("root", 2), "to 1"],
        [None, ("root", 2), "to 2"],
    ]


def test_coalesced_calls_are_one() -> None:
    def program(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[float]]:
        one, two = torch.tensor([group.rank()]), torch.tensor([1, 2])
        with coalescing():
            dist.all_reduce(one)
            dist.all_reduce(two)
        three = torch.zeros(1)
        with coalescing(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(three.fill_(group.rank()), src=2)
        before = three.item()
        manager.wait()
        return one.tolist(), two.tolist(), [before, three.item()]

    run = World.lockstep(3).execute(program)
    assert run.results == tuple(([3], [3, 6], [float(rank), 2.0]) for rank in range(3))
    assert [call.what for call in run.ledgers[0]] == [
        "all_reduce SUM of [1], [2] [1] int64",
        "broadcast from 2 [1] float32",
    ]


def test_functional_collectives_come_from_beneath_c() -> None:
    def named(*names: str) -> Any:  # that of torch 2.13, and the earlier one
        return next(getattr(functional, name) for name in names if hasattr(functional, name))

    gather = named("all_gather_single", "all_gather_tensor")
    scatter = named("reduce_scatter_single", "reduce_scatter_tensor")
    gather_coalesced = named("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
    scatter_coalesced = named("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def program(group: dist.ProcessGroup) -> list[list[float]]:
        rank, size = group.rank(), group.size()
        mine = torch.arange(size).float() + 10 * rank
        results = [
            gather(mine, 0, group),
            functional.all_reduce(mine, "sum", group),
            scatter(mine, "sum", 0, group),
            functional.all_to_all_single(mine, None, None, group),
            functional.broadcast(mine, 1, group),
            *functional.all_reduce_coalesced([mine, mine + 1], "max", group),
            *gather_coalesced([mine], group),
            *scatter_coalesced([mine], "sum", [0], group),
        ]
        return [functional.wait_tensor(result).tolist() for result in results]

    everything = [0.0, 1, 2, 10, 11, 12, 20, 21, 22]
    for rank, results in enumerate(World.lockstep(3).run(program)):
        assert results == [
            everything,
            [30, 33, 36],
            [30 + 3 * rank],
            [rank, 10 + rank, 20 + rank],
            [10, 11, 12],
            [20, 21, 22],
            [21, 22, 23],
            everything,
            [30 + 3 * rank],
        ]


def test_device_meshes() -> None:
    def program(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        sums = []
        for name in ("row", "column"):
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total, group=mesh.get_group(name))
            sums.append(int(total))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return list(coordinate), sums

    assert World.lockstep(4).run(program) == [
        ([0, 0], [2, 1]),
        ([0, 1], [4, 1]),
        ([1, 0], [2, 5]),
        ([1, 1], [4, 5]),
    ]


# -- refused ----------------------------------------------------------------------------------------------


def mixed_devices(group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.zeros(1), torch.zeros(1, device="meta")], torch.zeros(1))


def other_outputs(group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(1))


def wrong_splits(group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], [1, 2])


def bits_of_floats(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1), dist.ReduceOp.BXOR)


def group_of_others(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1), group=dist.new_group([1 - group.rank()]))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (mixed_devices, "cpu and meta"),
        (other_outputs, "output list of all_gather"),
        (wrong_splits, "input splits of all_to_all"),
        (bits_of_floats, "integers for BXOR"),
    ],
)
def test_what_has_no_meaning_is_refused(program: Callable[..., object], says: str) -> None:
    with pytest.raises(RankFailed, match=says) as caught:
        World.lockstep(2).run(program)
    assert isinstance(caught.value.__cause__, InvalidInput)


def test_a_call_on_a_group_of_others_is_refused() -> None:
    def program(group: dist.ProcessGroup) -> None:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=pair)

    with pytest.raises(
        RankFailed, match="all_reduce on a group: expected a group that the calling"
    ) as caught:
        World.lockstep(3).run(program)
    assert caught.value.rank == 2


def test_a_group_made_by_another_rank_is_refused() -> None:
    made = []

    def program(group: dist.ProcessGroup) -> None:
        made.append(group)
        dist.barrier()
        dist.barrier(group=made[0])

    with pytest.raises(RankFailed, match="a call on a group: expected rank"):
        World.lockstep(2).run(program)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("SUM of|SUM .1. float8", lambda: dist.all_reduce(torch.zeros(1).to(torch.float8_e5m2))),
        ("split_group", lambda: dist.distributed_c10d._get_default_group().split_group([0])),
    ],
)
def test_what_lockstep_does_not_do_is_named(name: str, attempt: Callable[[], object]) -> None:
    with pytest.raises((RankFailed, WorldUnavailable), match=name) as caught:
        World.lockstep(2).run(lambda group: attempt())
    failure = caught.value
    assert isinstance(failure, WorldUnavailable) or isinstance(failure.__cause__, WorldUnavailable)


def test_what_does_not_fit_is_named_on_both_sides() -> None:
    def rows(group: dist.ProcessGroup) -> None:
        splits = [1, 2] if group.rank() else [1, 1]
        dist.all_to_all_single(torch.zeros(2), torch.zeros(sum(splits)), [1, 1], splits)

    def message(group: dist.ProcessGroup) -> None:
        if group.rank():
            dist.send(torch.zeros(3), 0)
        else:
            dist.recv(torch.zeros(4), 1)

    with pytest.raises(Diverged, match="2 rows where 1 rows are expected"):
        World.lockstep(2).run(rows)
    with pytest.raises(Diverged, match=r"rank 1 to send what rank 0 expects, got .*send to 0 \[3\]"):
        World.lockstep(2).run(message)
