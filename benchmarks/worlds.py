"""How fast worlds are: pairs of collectives a second, and what a start costs.

A pair is one all_gather of 64×128 float32 and one all_reduce of 4 floats: a small layer's traffic, where
what a world costs by itself shows. Machines are noisy, so the candidates take turns, and the median round of
each counts. Not the best: threads that compete for the interpreter are several times faster in the rounds in
which something else happens to keep them on one core. Targets are for 8 ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch._C import _distributed_c10d

from sim.garbage import collect_seldom
from sim.world import World

ROWS, WIDTH, FLOATS = 64, 128, 4
ROUNDS = 25
WARM_UP = 5
STARTS = 7
TARGET_SIZE = 8

# The stub lacks thread isolation.
_native: Any = _distributed_c10d


def pairs(group: dist.ProcessGroup, count: int) -> float:
    """The rank program: seconds that ``count`` pairs took this rank, after a few that do not count."""
    # Its name since torch 2.13, and before.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    sent, small = torch.ones(ROWS, WIDTH), torch.ones(FLOATS)
    gathered = torch.empty(group.size() * ROWS, WIDTH)
    started = time.perf_counter()
    for turn in range(WARM_UP + count):
        if turn == WARM_UP:
            started = time.perf_counter()
        gather(gathered, sent, group=group)
        dist.all_reduce(small, op=dist.ReduceOp.MAX, group=group)
    return time.perf_counter() - started


def nothing(group: dist.ProcessGroup) -> None:
    """The rank program whose time is that of starting and stopping."""


# A batch of pairs on a warm world: the seconds of its slowest rank.
Batch = Callable[[int], float]


def on_world(world: World) -> Batch:
    """On one of ours, ledgers and all."""

    def batch(count: int) -> float:
        run = world.execute(pairs, count)
        assert len(run.ledgers[0]) == 2 * (WARM_UP + count)
        return max(run.results)

    return batch


def on_threaded_group(size: int, *, one_core: bool) -> Batch:
    """On torch's own group of threads, started as torch's tests start it; or all of them on one core."""
    # Here, since it is torch's test code, and importing it takes a second.
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def batch(count: int) -> float:
        store = _native.HashStore()
        seconds: dict[int, float] = {}

        def live(rank: int) -> None:
            if one_core:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            group = dist.group.WORLD
            assert group is not None
            seconds[rank] = pairs(group, count)
            dist.destroy_process_group()

        hook = sys.excepthook  # which torch wraps once a group
        threaded._install_threaded_pg()
        _native._set_thread_isolation_mode(True)
        try:
            threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            _native._set_thread_isolation_mode(False)
            threaded._uninstall_threaded_pg()
            sys.excepthook = hook
        return max(seconds.values())

    return batch


@contextmanager
def candidates(size: int) -> Iterator[dict[str, Batch]]:
    """All that compete at one world size."""
    with World.lockstep(size) as lockstep, World.gloo(size) as gloo:
        gloo.run(nothing)
        yield {
            "lockstep": on_world(lockstep),
            "threaded": on_threaded_group(size, one_core=False),
            "threaded_one_core": on_threaded_group(size, one_core=True),
            "gloo": on_world(gloo),
        }


def median_rates(batches: dict[str, Batch], seconds: float) -> dict[str, float]:
    """Pairs a second of each candidate, the median of some rounds; ``seconds`` of measuring for each."""
    per_round = seconds / ROUNDS
    counts = {name: _pairs_within(per_round, batch) for name, batch in batches.items()}
    rates: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(ROUNDS):
        for name, batch in batches.items():
            rates[name].append(counts[name] / batch(counts[name]))
    return {name: median(measured) for name, measured in rates.items()}


def _pairs_within(seconds: float, batch: Batch) -> int:
    count = 10
    return max(count, round(count * seconds / batch(count)))


def lockstep_start(size: int) -> float:
    """Seconds of a lockstep run that does nothing: the threads' start and stop."""
    world = World.lockstep(size)
    return min(_timed(lambda: world.run(nothing)) for _ in range(STARTS))


_COLD = """
import time
from sim.world import World
started = time.perf_counter()
World.gloo({size}).run(str)
print(time.perf_counter() - started)
"""


def gloo_start(size: int) -> float:
    """Seconds until a new pool has run its first program, in a process that never had one."""
    run = subprocess.run(
        [sys.executable, "-c", _COLD.format(size=size)], check=True, capture_output=True, text=True
    )
    return float(run.stdout)


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Measured:
    """One world size. Rates are pairs a second, starts are seconds."""

    size: int
    lockstep: float
    threaded: float
    threaded_one_core: float
    gloo: float
    lockstep_start: float
    gloo_start: float

    @property
    def over_threaded(self) -> float:
        return self.lockstep / self.threaded

    @property
    def over_gloo(self) -> float:
        return self.lockstep / self.gloo


@dataclass(frozen=True, slots=True)
class Target:
    """What 8 ranks should reach."""

    what: str
    wanted: str
    measured: str
    met: bool


def measure(size: int, seconds: float) -> Measured:
    """Everything at one world size."""
    with candidates(size) as batches:
        rates = median_rates(batches, seconds)
    starts = min(gloo_start(size) for _ in range(2))
    return Measured(size, **rates, lockstep_start=lockstep_start(size), gloo_start=starts)


def targets(at: Measured) -> list[Target]:
    """The targets, and whether these numbers meet them."""
    return [
        Target("lockstep / MTPG", "≥ 4", f"{at.over_threaded:.1f}", at.over_threaded >= 4),
        Target("lockstep / gloo", "≥ 30", f"{at.over_gloo:.1f}", at.over_gloo >= 30),
        Target("start of lockstep", "≤ 5 ms", f"{at.lockstep_start * 1e3:.1f} ms", at.lockstep_start <= 5e-3),
        Target("start of gloo", "≤ 4 s", f"{at.gloo_start:.1f} s", at.gloo_start <= 4),
    ]


def print_tables(results: list[Measured], reached: list[Target]) -> None:
    """Two tables: what was measured, and how it compares with the targets."""
    console = Console()
    console.print(f"Pairs of all_gather {ROWS}×{WIDTH} float32 and all_reduce {FLOATS} float32, a second")
    table = Table("ranks", pad_edge=False)  # else it is one wider than a terminal
    headings = ("lockstep", "MTPG", "1 core", "gloo", "/ MTPG", "/ gloo", "start", "of gloo")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            str(row.size),
            *(f"{rate:,.0f}" for rate in (row.lockstep, row.threaded, row.threaded_one_core, row.gloo)),
            f"{row.over_threaded:.1f}",
            f"{row.over_gloo:.1f}",
            f"{row.lockstep_start * 1e3:.1f} ms",
            f"{row.gloo_start:.1f} s",
        )
    console.print(table)
    for target in reached:
        verdict = "met" if target.met else "MISSED"
        console.print(
            f"{target.what} at {TARGET_SIZE} ranks: {target.measured}, wanted {target.wanted}: {verdict}"
        )


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="Of measuring, a candidate and world size.")] = 5.0,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if a target is missed.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Compare lockstep, torch's MultiThreadedPG and a warm gloo pool at 2, 4 and 8 ranks."""
    torch.set_num_threads(1)  # as the worlds do: else the threaded group alone would compute with more
    collect_seldom()  # as the command does
    results = [measure(size, seconds) for size in (2, 4, TARGET_SIZE)]
    reached = targets(results[-1])
    print_tables(results, reached)
    if json_file is not None:
        report = {
            "torch": torch.__version__,
            "worlds": [asdict(row) for row in results],
            "targets": [asdict(t) for t in reached],
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(1 if check and not all(target.met for target in reached) else 0)


if __name__ == "__main__":
    typer.run(main)
