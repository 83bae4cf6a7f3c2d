"""One layer of a true size under context parallelism: time, memory, and its error against its budget.

On the CPU: DeepSeek-V3.2's layer, a prefix of 3,000 tokens in cache and 1,000 new ones, on 8 lockstep ranks.
With ``--device cuda``: 131,072 new tokens on 8 lockstep ranks of one GPU, and between plan and output nothing
may wait for the device. 64 rows, the last among them, are compared with the same rows in float64 on one rank,
over the keys that the run chose; the budget comes from a twin of them in low precision on one rank.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from refmodel.attention.ranges import KeyRanges
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import PageTable, logical_page, to_physical
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.model.attend import attend, choose_keys
from refmodel.model.batch import batch_rows
from refmodel.model.forward import forward, packed_rows
from refmodel.model.layer import embed, finish, project, project_keys
from refmodel.model.model import Model, build_model
from refmodel.model.shape import PRESETS
from refmodel.model.weights import seeded_weights
from refmodel.oracle import relative_error
from refmodel.precision import budget
from refmodel.storage.identity import Cache
from refmodel.storage.passage import open_passage
from refmodel.storage.shard import destinations, empty_shard
from sim.waiting import nothing_waits
from sim.world import World

GRID = Grid(world_size=8, page_size=64)
VOCAB = 1024  # ids matter, their number does not
SAMPLED = 64
KEY_CHUNK = 4096  # tokens projected at a time where only their keys are wanted

Packed = dict[Cache, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """One precision."""

    shape: str
    precision: str
    device: str
    prefix: int
    tokens: int
    seconds: float  # plan to output, all 8 ranks
    gibibytes: float  # at most, of the process or of the GPU
    error: float  # relative, of the sampled rows
    budget: float

    @property
    def held(self) -> bool:
        return self.error <= self.budget


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What every rank is given."""

    model: Model
    plan: Plan
    table: PageTable
    ids: torch.Tensor  # [prefix + tokens]
    cached: Packed  # rows of the prefix
    rows: torch.Tensor  # [SAMPLED] batch rows to report


def page_table(extent: Extent) -> PageTable:
    """Pages in the lanes of their compute ranks, those in cache as if one forward had written them."""
    spans = [*([Extent(0, extent.prefix)] if extent.prefix else []), extent]
    lanes = torch.cat([new_page_lanes(plan_batch([span], GRID, Split.PAGE_ALIGNED), 0) for span in spans])
    used = [0] * GRID.world_size
    pages = []
    for lane in lanes.tolist():
        used[lane] += 1
        pages.append(logical_page(used[lane], lane, GRID.world_size))
    return PageTable(torch.tensor(pages), GRID)


def serve(group: dist.ProcessGroup, job: Job) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The rank program: (sampled hidden rows, what those of this rank chose, seconds)."""
    model, plan, rank = job.model, job.plan, group.rank()
    local_pages = 1 + int(job.table.pages.max()) // GRID.world_size
    shards = {
        cache: empty_shard(GRID, rank, row_format, local_pages, device=model.device)
        for cache, row_format in model.formats.items()
    }
    prefix = plan.extents[0].prefix
    slots = to_physical(job.table.slots(torch.arange(prefix)), rank, GRID)
    to = destinations(slots, local_pages * GRID.page_size, rank, device=model.device)
    for cache, shard in shards.items():
        shard.write(to, job.cached[cache])
    passage = open_passage(plan, [job.table], rank, local_pages=local_pages, device=model.device)
    batch = batch_rows(passage, job.ids[prefix:], model.device)
    with nothing_waits(group):
        start = time.perf_counter()
        output = forward(group, model, batch, [shards])
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    mine = torch.isin(plan.rows(rank), job.rows)
    chosen = output.layers[0].positions.cpu()[mine]
    return output.hidden[job.rows.to(model.device)].cpu(), chosen, seconds


def keys_of(model: Model, ids: torch.Tensor) -> Packed:
    """The packed rows of tokens from position 0, some thousand at a time: no attention is needed for them."""
    parts = []
    for start in range(0, max(1, len(ids)), KEY_CHUNK):
        some = ids[start : start + KEY_CHUNK].to(model.device)
        positions = torch.arange(start, start + len(some), device=model.device)
        hidden = embed(some, model.weights)
        kv, index_k = project_keys(hidden, positions, model.weights.layers[0], model.shape)
        parts.append(packed_rows(kv, index_k, model))
    return {cache: torch.cat([part[cache] for part in parts]) for cache in model.formats}


def on_one_rank(
    model: Model, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output of the tokens at ``positions``, of all keys on one rank, and what they chose."""
    views, where = keys_of(model, ids), positions.to(model.device)
    hidden = embed(ids.to(model.device)[where], model.weights)
    projected = project(hidden, where, model.weights.layers[0], model.shape)
    if chosen is None:
        ranges = KeyRanges(torch.zeros_like(where), where + 1, len(ids))
        chosen = choose_keys(projected, views, ranges, model)
    out = attend(projected, views, chosen.to(model.device), model).out
    return finish(hidden, out, model.weights.layers[0], model.shape).cpu(), chosen.cpu()


def measure(shape: str, precision: str, device: torch.device, extent: Extent) -> Measured:
    """Run the layer once, and compare the sampled rows."""
    weights = seeded_weights(PRESETS[shape], seed=0, layers=1, vocab=VOCAB)
    model = build_model(weights, precision, device=device)
    ids = torch.randint(1, VOCAB, (extent.end,), generator=torch.Generator().manual_seed(1))
    plan = plan_batch([extent], GRID, Split.PAGE_ALIGNED)
    rows = torch.linspace(0, extent.tokens - 1, SAMPLED).round().to(torch.int64)
    job = Job(model, plan, page_table(extent), ids, keys_of(model, ids[: extent.prefix]), rows)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with World.lockstep(GRID.world_size, device=device.type) as world:
        results = world.run(serve, job)
    memory = peak_memory(device)
    actual, chosen = results[0][0], in_order(plan, rows, [part[1] for part in results])
    positions = rows + extent.prefix
    exact_model = build_model(weights, "f64", device=device)
    exact, _ = on_one_rank(exact_model, ids, positions, chosen)
    twin, twin_chosen = on_one_rank(model, ids, positions, None)
    twin_exact, _ = on_one_rank(exact_model, ids, positions, twin_chosen)
    return Measured(
        shape=shape,
        precision=precision,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        prefix=extent.prefix,
        tokens=extent.tokens,
        seconds=max(part[2] for part in results),
        gibibytes=memory,
        error=relative_error(actual.double().numpy(), exact.double().numpy()),
        budget=budget(
            relative_error(twin.double().numpy(), twin_exact.double().numpy()),
            eps=torch.finfo(model.weights.norm.dtype).eps,
        ),
    )


def in_order(plan: Plan, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the ranks chose for the sampled rows, back in the order of ``rows``."""
    found = torch.cat([local[torch.isin(local, rows)] for local in map(plan.rows, range(GRID.world_size))])
    return torch.cat(list(parts))[torch.argsort(found)]


def peak_memory(device: torch.device) -> float:
    """GiB at most so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_table(results: Sequence[Measured]) -> None:
    table = Table("shape", "precision")
    for heading in ("prefix", "tokens", "seconds", "GiB", "error", "budget", ""):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row.shape,
            row.precision,
            f"{row.prefix:,}",
            f"{row.tokens:,}",
            f"{row.seconds:.1f}",
            f"{row.gibibytes:.1f}",
            f"{row.error:.2e}",
            f"{row.budget:.2e}",
            "held" if row.held else "BROKE",
        )
    Console().print(table)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "deepseek-v3.2",
    precision: Annotated[list[str] | None, typer.Option(help="bf16 and fp8 unless named.")] = None,
    tokens: Annotated[int | None, typer.Option(min=SAMPLED, help="New ones.")] = None,
    prefix: Annotated[int | None, typer.Option(min=0, help="Tokens in cache.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Run one layer of a true size on 8 ranks, and check it."""
    where = torch.device(device)
    usual = Extent(0, 131_072) if where.type == "cuda" else Extent(3_000, 1_000)
    extent = Extent(usual.prefix if prefix is None else prefix, tokens or usual.tokens)
    results = [measure(shape, each, where, extent) for each in precision or ["bf16", "fp8"]]
    print_table(results)
    if json_file is not None:
        report = {"torch": torch.__version__, "layers": [asdict(row) for row in results]}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(0 if all(row.held for row in results) else 1)


if __name__ == "__main__":
    typer.run(main)
