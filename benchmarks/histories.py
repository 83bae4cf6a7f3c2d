"""How fast histories are: campaigns of ``cpkv fuzz``, and what one history costs by what its service has.

A campaign draws, plays and judges, drills and all, on 4 ranks with identities for rows (a few have the
model): two processes beside each other on lockstep, one on lockstep, one whose ranks are gloo processes. Then
some histories are drawn and played one after the other, the same in every run: milliseconds of one, and
microseconds of a step and rank, by what the service has. Targets are for two lockstep processes on two cores,
and for a step of what has no model.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from properties.drawing.choices import Choices
from properties.fuzz import Campaign, hunt
from properties.machine import drawn_history
from sim.garbage import collect_seldom
from sim.gate.histories import try_history
from sim.histories.history import History
from sim.world import World

RANKS = 4
HISTORIES = 400
TARGET_RATE, TARGET_STEPS, TARGET_STEP_US = 50, 12, 1000


@dataclass(frozen=True, slots=True)
class Hunted:
    """One campaign."""

    world: str
    jobs: int
    histories: int
    seconds: float
    steps: int
    median_steps: int

    @property
    def rate(self) -> float:
        """Histories a second."""
        return self.histories / self.seconds


@dataclass(frozen=True, slots=True)
class Played:
    """Histories of one kind of service."""

    service: str
    histories: int
    steps: int
    draw_seconds: float
    play_seconds: float

    @property
    def step_us(self) -> float:
        """Microseconds of a step and rank."""
        return self.play_seconds / (self.steps * RANKS) * 1e6


def campaign(world: str, jobs: int, seconds: float) -> Hunted:
    """A hunt of about so long; starts of processes count."""
    started = time.perf_counter()
    wanted = Campaign(seed=jobs, seconds=seconds, world=world, jobs=jobs, ranks=RANKS)
    tally = hunt(wanted, _Never(), lambda tally: None)
    took = time.perf_counter() - started
    return Hunted(world, jobs, tally.histories, took, tally.steps, tally.median_steps)


class _Never:
    """An event that is not set, which can travel to other processes."""

    def is_set(self) -> bool:
        return False


def service_of(history: History) -> str:
    """What costs most of what a history's service has besides lanes and tree."""
    features = {
        "model": history.model,
        "transfer": history.decode_pages,
        "storage": history.storage,
        "host cache": history.host_pages_per_lane,
        "draft layers": history.draft_layers,
    }
    return next((name for name, has in features.items() if has), "nothing more")


def by_service(count: int) -> Iterator[Played]:
    """The same histories in every run."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for seed in range(count):
        started = time.perf_counter()
        drawn = drawn_history(Choices(Random(seed).randrange), RANKS)
        between = time.perf_counter()
        with World.lockstep(RANKS, seed=drawn.seed) as world:
            try_history(world, drawn.history)
        took = (1, len(drawn.history.history), between - started, time.perf_counter() - between)
        service = service_of(drawn.history)
        sums[service] = [before + more for before, more in zip(sums[service], took, strict=True)]
    for service, (histories, steps, draw, play) in sorted(sums.items(), key=lambda each: -each[1][0]):
        yield Played(service, int(histories), int(steps), draw, play)


def print_tables(hunts: list[Hunted], services: list[Played]) -> None:
    """Campaigns, then services."""
    console = Console()
    console.print(f"Campaigns, {RANKS} ranks")
    table = Table("ranks are", "jobs")
    for heading in ("histories", "a second", "steps a second", "steps, median"):
        table.add_column(heading, justify="right")
    for each in hunts:
        numbers = (each.histories, each.rate, each.steps / each.seconds, each.median_steps)
        table.add_row(each.world, str(each.jobs), *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    console.print(f"{sum(each.histories for each in services)} histories by what the service has")
    table = Table("service")
    for heading in ("histories", "draw, ms", "play, ms", "a step and rank, µs"):
        table.add_column(heading, justify="right")
    for row in services:
        ms = [seconds / row.histories * 1e3 for seconds in (row.draw_seconds, row.play_seconds)]
        table.add_row(row.service, str(row.histories), *(f"{each:.1f}" for each in ms), f"{row.step_us:.0f}")
    console.print(table)


def reached(hunts: list[Hunted], services: list[Played]) -> dict[str, bool]:
    """The targets, in words, and whether these numbers meet them."""
    beside = hunts[0]
    without_model = [row for row in services if "model" not in row.service]
    seconds, steps = sum(row.play_seconds for row in without_model), sum(row.steps for row in without_model)
    step_us = seconds / (steps * RANKS) * 1e6
    return {
        f"two processes: {beside.rate:.1f} histories a second, wanted ≥ {TARGET_RATE}": beside.rate
        >= TARGET_RATE,
        f"steps of a history, median: {beside.median_steps}, wanted ≥ {TARGET_STEPS}": beside.median_steps
        >= TARGET_STEPS,
        f"a step and rank: {step_us:.0f} µs, wanted ≤ {TARGET_STEP_US}": step_us <= TARGET_STEP_US,
    }


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Of each campaign.")] = 60.0,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if a target is missed.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Measure campaigns of the fuzzer, and single histories, at 4 ranks."""
    torch.set_num_threads(1)  # as workers do
    collect_seldom()
    hunts = [campaign("lockstep", 2, seconds), campaign("lockstep", 1, seconds), campaign("gloo", 1, seconds)]
    services = list(by_service(HISTORIES))
    print_tables(hunts, services)
    targets = reached(hunts, services)
    for what, met in targets.items():
        typer.echo(f"{what}: {'met' if met else 'MISSED'}")
    if json_file is not None:
        report = {
            "torch": torch.__version__,
            "campaigns": [asdict(each) for each in hunts],
            "services": [asdict(each) for each in services],
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    raise typer.Exit(1 if check and not all(targets.values()) else 0)


if __name__ == "__main__":
    typer.run(main)
