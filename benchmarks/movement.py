"""How fast the reference moves rows: materialize and rerange, as a share of this machine's copy bandwidth.

A view of 1,048,576 tokens on 8 ranks, pages of 64 tokens in any order, production formats. Counted is what a
view needs, one read and one write of its bytes, as for a plain copy of the same size. *Parts* are what a rank
does by itself, contribute and assemble; *in a world* is all of it on 8 lockstep ranks that share the device,
where each rank also receives what the others send, so that every byte is moved twice. *Layer* is both caches.
On a GPU (``--device cuda``) the target for a layer is 40 % of the copy's bandwidth. Shorter views are a
matter of launching kernels, not of moving bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.model.model import cache_formats
from refmodel.model.shape import DEEPSEEK_V32
from refmodel.storage.formats import Format
from refmodel.storage.pages import words
from refmodel.storage.shard import Shard, empty_shard
from refmodel.storage.view import ViewIndex, assemble, contribute, materialize, view_index, view_layout
from sim.world import World

GRID = Grid(world_size=8, page_size=64)
ROUNDS = 7
TARGET = 0.4

Act = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """One piece of work. Bandwidths are bytes read and written a second."""

    work: str
    format: str
    mebibytes: float  # of the view
    seconds: float
    copy_seconds: float  # of a plain copy of the same bytes

    @property
    def share(self) -> float:
        """Of the copy's bandwidth."""
        return self.copy_seconds / self.seconds


def best_seconds(act: Act, device: torch.device) -> float:
    """Of one call, the best of some rounds of as many calls as take a while."""
    calls = 20 if device.type == "cuda" else 2
    act()
    return min(_round(act, device, calls) for _ in range(ROUNDS)) / calls


def _round(act: Act, device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            act()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    for _ in range(calls):
        act()
    return time.perf_counter() - began


def parts_of_a_rank(shard: Shard, index: ViewIndex, buffers: torch.Tensor) -> torch.Tensor:
    """Contribute and assemble; what lies between them is the exchange."""
    contribute(shard, index)
    return assemble(buffers, index, shard.format)


def rerange(buffers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gathered rows into batch order, as every gathered write and every current row goes."""
    return words(buffers)[places].view(torch.uint8)


def views_in_a_world(group: dist.ProcessGroup, table: PageTable, tokens: int, row_format: Format) -> float:
    """The rank program: seconds of a view, the best of some."""
    device = group.bound_device_id or torch.device("cpu")
    shard, index = _shard_and_index(table, tokens, row_format, group.rank(), device)
    return best_seconds(partial(materialize, shard, index, group=group, site="view"), device)


def _shard_and_index(
    table: PageTable, tokens: int, row_format: Format, rank: int, device: torch.device
) -> tuple[Shard, ViewIndex]:
    local_pages = 1 + int(table.pages.max()) // GRID.world_size
    layout = view_layout([table], [tokens], GRID)
    shard = empty_shard(GRID, rank, row_format, local_pages, device=device)
    return shard, view_index(layout, rank, local_pages=local_pages, device=device)


def measure(row_format: Format, tokens: int, device: torch.device) -> Iterator[Measured]:
    """All work in one format."""
    pages = GRID.world_size + torch.randperm(
        num_pages(tokens, GRID.page_size), generator=torch.Generator().manual_seed(0)
    )
    table = PageTable(pages, GRID)
    shard, index = _shard_and_index(table, tokens, row_format, 0, device)
    plan = plan_batch([Extent(0, tokens)], GRID, Split.PAGE_ALIGNED)
    view_bytes = tokens * row_format.bytes_per_token
    source = torch.zeros(view_bytes, dtype=torch.uint8, device=device)
    copy = best_seconds(partial(torch.empty_like(source).copy_, source), device)
    page_buffers = torch.zeros(
        GRID.world_size * max(index.layout.page_counts),
        row_format.page_bytes(GRID.page_size),
        dtype=torch.uint8,
        device=device,
    )
    row_buffers = torch.zeros(
        GRID.world_size * plan.max_rank_rows, row_format.bytes_per_token, dtype=torch.uint8, device=device
    )
    with World.lockstep(GRID.world_size, device=device.type) as world:
        in_a_world = max(world.run(views_in_a_world, table, tokens, row_format)) / GRID.world_size
    seconds = {
        "materialize, parts": best_seconds(partial(parts_of_a_rank, shard, index, page_buffers), device),
        "materialize, in a world": in_a_world,
        "rerange": best_seconds(partial(rerange, row_buffers, plan.places.to(device)), device),
    }
    for work, each in seconds.items():
        yield Measured(work, row_format.name, view_bytes / 2**20, each, copy)


def both(name: str, kv: Measured, index: Measured) -> Measured:
    """The same work for both caches of a layer."""
    return Measured(
        kv.work,
        name,
        kv.mebibytes + index.mebibytes,
        kv.seconds + index.seconds,
        kv.copy_seconds + index.copy_seconds,
    )


def print_table(results: list[Measured]) -> None:
    table = Table("format", "work")
    for heading in ("MiB", "ms", "GB/s", "copy GB/s", "share"):
        table.add_column(heading, justify="right")
    for row in results:
        moved = 2 * row.mebibytes * 2**20 / 1e9
        table.add_row(
            row.format,
            row.work,
            f"{row.mebibytes:.0f}",
            f"{row.seconds * 1e3:.2f}",
            f"{moved / row.seconds:,.0f}",
            f"{moved / row.copy_seconds:,.0f}",
            f"{row.share:.0%}",
        )
    Console().print(table)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="Of the view.")] = 1_048_576,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if the target is missed.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Measure materialize and rerange against a plain copy."""
    results: list[Measured] = []
    for precision in ("bf16", "fp8"):
        formats = cache_formats(DEEPSEEK_V32, precision).values()
        rows = [list(measure(each, tokens, torch.device(device))) for each in formats]
        results += [*rows[0], *rows[1], *map(partial(both, f"layer_{precision}"), *rows)]
    print_table(results)
    if json_file is not None:
        report = {"torch": torch.__version__, "device": device, "work": [asdict(row) for row in results]}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    judged = [row for row in results if row.format.startswith("layer") and "world" not in row.work]
    raise typer.Exit(1 if check and any(row.share < TARGET for row in judged) else 0)


if __name__ == "__main__":
    typer.run(main)
