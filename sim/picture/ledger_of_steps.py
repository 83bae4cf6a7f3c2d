"""A history as a table: what each step did to requests and lanes (laws L1–L4), as rank 0 knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import msgspec
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import owner
from refmodel.serving.lanes import Lanes, PageState
from sim.engine.engine import Engine
from sim.engine.play import apply
from sim.engine.start import start
from sim.engine.tables import Tables
from sim.gate.verdict import fallbacks_unwarned
from sim.histories.history import History, Step
from sim.world import World


class StepLine(msgspec.Struct, frozen=True):
    """One step of a history."""

    step: int  # from 1; 0 is the start of the server
    operation: str  # "forward a b"
    outcome: str  # "a 0 → 8, b 4 → 6", or why it was refused
    refused: bool
    taken: list[int]  # [W] pages that requests took of each lane
    evicted: list[int]  # [W] pages that left the tree
    free: list[int]  # [W] free pages after the step


class _CountingLanes(Lanes):
    """Counts what goes in and out; a page evicted and taken in one step would show no difference."""

    def __init__(self, grid: Grid, pages_per_lane: int) -> None:
        super().__init__(grid, pages_per_lane)
        self.reset()

    def reset(self) -> None:
        self.taken = [0] * self.grid.world_size
        self.evicted = [0] * self.grid.world_size

    def take(self, lanes: Sequence[int]) -> tuple[int, ...]:
        pages = super().take(lanes)
        for lane in lanes:
            self.taken[lane] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        pages = tuple(pages)
        cached = [page for page in pages if self.state(page) is PageState.CACHED]
        super().free(pages)
        for page in cached:
            self.evicted[owner(page, self.grid.world_size)] += 1


def ledger_of_steps(history: History) -> list[StepLine]:
    """Play a history on lockstep, and say what each step did; of one refused at start, only that."""
    with fallbacks_unwarned(), World.lockstep(history.world_size) as world:
        return world.run(_narrate, history)[0]


def _narrate(group: dist.ProcessGroup, history: History) -> list[StepLine]:
    if history.refused_at_start is not None:
        refusal = start(group, history).refusal
        text = refusal.text if refusal else "the server starts"
        return [StepLine(0, "start", text, refusal is not None, taken=[], evicted=[], free=[])]
    with closing(Engine(history, group.rank(), group)) as engine:
        lanes = _CountingLanes(engine.tables.grid, history.pages_per_lane)
        engine.tables.lanes = lanes
        if engine.tables.host is not None:  # which shares them
            engine.tables.host.lanes = lanes
        return [_line(engine, lanes, number, step) for number, step in enumerate(history.history, start=1)]


def _line(engine: Engine, lanes: _CountingLanes, number: int, step: Step) -> StepLine:
    engine.tables.now = number
    lanes.reset()
    before = _valid(engine.tables)
    refusal = apply(engine, step).refusal
    return StepLine(
        step=number,
        operation=" ".join([step.name, *_words(getattr(step, step.name))]),
        outcome=refusal or ", ".join(_changes(step, before, engine.tables)),
        refused=refusal is not None,
        taken=lanes.taken,
        evicted=lanes.evicted,
        free=list(lanes.all_free()),
    )


def _valid(tables: Tables) -> dict[str, int]:
    return {name: tables.valid(name) for name in tables.requests}


def _words(value: object) -> Iterator[str]:
    """What an operation is given: names as they are, settings that are not the default by their keys."""
    if isinstance(value, (list, tuple)):
        yield from map(str, value)
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            given = getattr(value, field.name)
            if field.name == "request":
                yield str(given)
            elif given != field.default:
                yield f"{field.name} {' '.join(_words(given))}"
    else:
        yield str(value)


def _changes(step: Step, before: dict[str, int], tables: Tables) -> Iterator[str]:
    """Of each request: its hit, how far it went, or that it left."""
    after = _valid(tables)
    for name, valid in after.items():
        if name not in before:
            yield f"{name} hits {valid} of {len(tables.requests[name].ids)}"
        elif valid != before[name]:
            yield f"{name} {before[name]} → {valid}"
        elif step.forward is not None and name in step.forward:
            yield f"{name} waits"
    yield from (f"{name} leaves" for name in before if name not in after)


def print_ledger(lines: Iterable[StepLine], console: Console) -> None:
    """A line a step. Numbers are of each lane, lane 0 first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("step", "operation", "outcome", "taken", "evicted", "free"):
        table.add_column(name, justify="right" if name == "step" else "left", overflow="fold")
    for line in lines:
        table.add_row(
            str(line.step),
            line.operation,
            f"refused: {line.outcome}" if line.refused else line.outcome,
            _numbers(line.taken),
            _numbers(line.evicted),
            " ".join(map(str, line.free)),
        )
    console.print(table)


def _numbers(of_lanes: Sequence[int]) -> str:
    return " ".join(map(str, of_lanes)) if any(of_lanes) else ""
