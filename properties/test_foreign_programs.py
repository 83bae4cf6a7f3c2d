"""Programs of torch itself run unmodified on lockstep: they call from C++, and wait there too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sim.failures import RankFailed
from sim.world import World

SIZE = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def rows(rank: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))


def mean_gradient() -> torch.Tensor:
    """Of the first layer, over the rows of all ranks."""
    model = layers()
    model(torch.cat([rows(rank) for rank in range(SIZE)])).sum().backward()
    return gradient_of(model) / SIZE


def gradient_of(model: nn.Module) -> torch.Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


def data_parallel(group: dist.ProcessGroup) -> torch.Tensor:
    model = nn.parallel.DistributedDataParallel(layers(), process_group=group)
    model(rows(group.rank())).sum().backward()
    return gradient_of(model)


def fully_sharded(group: dist.ProcessGroup) -> torch.Tensor:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (group.size(),)))
    model(rows(group.rank())).sum().backward()
    gradient: Any = gradient_of(model)
    whole: torch.Tensor = gradient.full_tensor()
    return whole


@pytest.mark.parametrize("program", [data_parallel, fully_sharded])
def test_training_gives_the_mean_gradient(program: Any) -> None:
    expected = mean_gradient()
    for seed in range(3):
        for gradient in World.lockstep(SIZE, seed=seed).run(program):
            torch.testing.assert_close(gradient, expected)


def test_tensors_of_many_ranks_are_multiplied() -> None:
    def program(group: dist.ProcessGroup) -> torch.Tensor:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
        by_row = distribute_tensor(left, mesh, [Shard(0)])
        product: Any = by_row @ distribute_tensor(left.T.contiguous(), mesh, [Replicate()])
        whole: torch.Tensor = product.redistribute(mesh, [Shard(1)]).full_tensor()
        return whole

    left = torch.arange(16.0).reshape(8, 2)
    for product in World.lockstep(SIZE).run(program):
        assert torch.equal(product, left @ left.T)


def test_who_waits_for_the_store_is_named() -> None:
    def program(group: dist.ProcessGroup) -> None:
        store: Any = vars(dist.distributed_c10d)["_get_default_store"]()
        store.set(f"from {group.rank()}", "here")
        store.get("from nobody" if group.rank() == 1 else f"from {group.rank()}")

    with pytest.raises(RankFailed, match=r"from nobody|[Tt]imeout") as caught:
        World.lockstep(2).run(program)
    assert caught.value.rank == 1
