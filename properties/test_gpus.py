"""The same laws on NVIDIA GPUs: NCCL worlds, bytes as on the CPU, and a forward that waits for nothing.

Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from properties import process_programs as programs
from properties.catalogued import ON_GLOO
from properties.gpu_marks import needs_gpus
from properties.proofs import proves
from properties.strategies import FORMATS
from properties.timing import fails_within
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import PageTable
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.model.batch import batch_rows
from refmodel.model.forward import forward
from refmodel.model.model import build_model
from refmodel.model.replicated import replicated
from refmodel.model.shape import TINY
from refmodel.model.weights import seeded_weights
from refmodel.oracle import relative_error
from refmodel.precision import FP64_BUDGET, budget
from refmodel.storage.codecs import as_bytes
from refmodel.storage.formats import PRECISIONS, Format
from refmodel.storage.pages import read_rows, write_rows
from refmodel.storage.passage import open_passage
from refmodel.storage.reuse import Reading, ViewPath
from refmodel.storage.shard import empty_shard
from sim.failures import Diverged, RankFailed, RunFailed, TimedOut, WorldUnavailable
from sim.gate.runs import run_scenario
from sim.waiting import nothing_waits
from sim.world import World


def test_more_ranks_than_gpus_are_refused() -> None:
    gpus = torch.cuda.device_count()
    lacks = f"got {gpus} GPU" if gpus else "no CUDA GPU|without NCCL"
    with pytest.raises(WorldUnavailable, match=lacks):
        World.nccl(gpus + 1)


@pytest.fixture(scope="module")
def gpus() -> Iterator[World]:
    with World.nccl(2, timeout=10) as world:
        yield world


@pytest.mark.nccl
@needs_gpus(2)
def test_a_rank_has_a_gpu_of_its_own(gpus: World) -> None:
    assert gpus.run(programs.device_name) == ["cuda:0, current 0", "cuda:1, current 1"]


@pytest.mark.nccl
@needs_gpus(2)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_gpus_give_the_bytes_of_the_cpu(
    gpus: World, gloo_world: Callable[[int], World], dtype: torch.dtype
) -> None:
    theirs, ours = (
        gpus.execute(programs.rows_on_device, dtype),
        gloo_world(2).execute(programs.rows_on_device, dtype),
    )
    assert theirs.ledgers == ours.ledgers
    for left, right in zip(theirs.results, ours.results, strict=True):
        assert left.device.type == "cpu"
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.nccl
@needs_gpus(2)
def test_every_call_of_a_foreign_program_is_recorded_on_gpus(
    gpus: World, gloo_world: Callable[[int], World]
) -> None:
    theirs, ours = gpus.execute(programs.raw_calls), gloo_world(2).execute(programs.raw_calls)
    assert theirs.results == ours.results
    assert theirs.ledgers == ours.ledgers
    assert gpus.run(programs.group_name) == ["1", "1"]


@pytest.mark.nccl
@needs_gpus(2)
@pytest.mark.parametrize(
    ("program", "args", "kind", "match"),
    [
        (programs.diverges, (), Diverged, "issues"),
        (programs.raises, (1,), RankFailed, "ZeroDivisionError"),
        (programs.dies, (1, "SIGKILL"), RankFailed, "killed by SIGKILL"),
        (programs.sleeps, (1,), TimedOut, "rank 1 has not come to it"),
    ],
)
def test_failures_on_gpus_are_named(
    gpus: World, program: Callable[..., Any], args: tuple[Any, ...], kind: type[RunFailed], match: str
) -> None:
    gpus.run(programs.who)
    with fails_within(12, kind, match):
        gpus.run(program, *args)
    assert gpus.run(programs.who) == [(0, 2), (1, 2)]


@proves("V6", "A5")
@pytest.mark.nccl
@needs_gpus(2)
def test_scenarios_on_gpus_have_the_digests_of_lockstep(gpus: World) -> None:
    some = [scenario for scenario in ON_GLOO if scenario.world_size == 2]
    assert some
    for scenario in some:
        theirs, ours = run_scenario(scenario, gpus), run_scenario(scenario, World.lockstep(2))
        assert theirs.held, scenario.file
        assert theirs.digest == ours.digest, scenario.file


@proves("F1")
@pytest.mark.nccl
@needs_gpus(1)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_gpu_packs_writes_and_reads_the_bytes_of_the_cpu(fmt: Format) -> None:
    tags = torch.arange(40)
    values = fmt.unpack(fmt.encode(tags))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:40]
    read = []
    for device in ("cpu", "cuda"):
        pages = torch.zeros(4, fmt.page_bytes(16), dtype=torch.uint8, device=device)
        packed = fmt.pack(values.to(device))
        write_rows(pages, slots.to(device), packed, fmt)
        back = read_rows(pages, slots.to(device), fmt)
        read.append((pages.cpu(), packed.cpu(), back.cpu(), as_bytes(fmt.unpack(back)).cpu()))
    for cpu, gpu in zip(*read, strict=True):
        assert torch.equal(cpu, gpu)


GRID = Grid(world_size=8, page_size=4)
TOKENS = 50
SHAPE = replace(TINY, top_k=TOKENS)  # all keys: which of two tied ones is chosen depends on the device


def two_layers(group: dist.ProcessGroup, precision: str, path: ViewPath, ids: torch.Tensor) -> torch.Tensor:
    """The rank program: a forward of the tiny model, on the GPU that the group is bound to."""
    device = group.bound_device_id
    assert device is not None
    model = build_model(seeded_weights(SHAPE, 0), precision, device=device)
    plan = plan_batch([Extent(0, TOKENS)], GRID, Split.PAGE_ALIGNED, padding=3)
    table = PageTable(torch.randperm(13, generator=torch.Generator().manual_seed(5)) + 8, GRID)
    shards = [
        {c: empty_shard(GRID, group.rank(), f, 4, device=device) for c, f in model.formats.items()}
        for _ in model.weights.layers
    ]
    asked = Reading(path)
    passage = open_passage(plan, [table], group.rank(), local_pages=4, asked=asked, device=device)
    batch = batch_rows(passage, ids, device)
    with nothing_waits(group):
        output = forward(group, model, batch, shards)
    return output.hidden.cpu()


@proves("S7", "A5")
@pytest.mark.nccl
@needs_gpus(1)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("path", [ViewPath.FULL, ViewPath.CURRENT, ViewPath.NONE])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_between_plan_and_output_nothing_waits_for_the_gpu(precision: str, path: ViewPath) -> None:
    ids = torch.randint(1, SHAPE.vocab, (TOKENS,), generator=torch.Generator().manual_seed(1))
    outputs = World.lockstep(8, device="cuda").run(two_layers, precision, path, ids)
    exact = replicated(build_model(seeded_weights(SHAPE, 0), "f64"), ids).hidden.double().numpy()
    model = build_model(seeded_weights(SHAPE, 0), precision)
    twin = relative_error(replicated(model, ids).hidden.double().numpy(), exact)
    eps = torch.finfo(model.weights.norm.dtype).eps
    allowed = FP64_BUDGET if precision == "f64" else budget(twin, eps=eps)
    for output in outputs:
        assert relative_error(output.double().numpy(), exact) <= allowed
