"""A scenario worked out: who gets which pages, who wrote what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import Plan, plan_batch
from refmodel.model.model import cache_formats
from refmodel.model.shape import TINY
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache
from refmodel.storage.reuse import Reading
from sim.cases.arithmetic import Arithmetic
from sim.cases.case import Case, Forward, Origin, Turn
from sim.cases.pages import PagePool
from sim.cases.scenario import Scenario, Step


@dataclass(slots=True)
class _Request:
    """A request while its scenario is worked out."""

    number: int
    pages: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    origins: list[Origin] = field(default_factory=list)

    @property
    def valid(self) -> int:
        return self.origins[-1].stop if self.origins else 0


class _Builder:
    """Works a scenario out, step by step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.grid = Grid(scenario.world_size, scenario.page_size)
        self.local_pages = 2 + self._most_pages()
        self.pool = PagePool(self.grid, self.local_pages, scenario.seed)
        self.random = np.random.default_rng(scenario.seed + 1)
        self.requests: dict[str, _Request] = defaultdict(lambda: _Request(len(self.requests)))

    def _most_pages(self) -> int:
        """Pages of all requests at their end: enough for any lane, whatever the placement."""
        ends: dict[str, int] = defaultdict(int)
        for extend in (extend for step in self.scenario.steps for extend in step.extend):
            ends[extend.request] = (extend.prefix or ends[extend.request]) + extend.tokens
        return sum(num_pages(end, self.grid.page_size) for end in ends.values())

    def forward(self, index: int, step: Step) -> Forward:
        extents = [self._extent(index, i) for i in range(len(step.extend))]
        rotations = [extend.rotation for extend in step.extend]
        plan = plan_batch(extents, self.grid, self.scenario.split, rotations=rotations, padding=step.padding)
        turns = tuple(self._turn(index, i, plan) for i in range(len(step.extend)))
        return Forward(index + 1, turns, step.padding, step.draft)

    def _extent(self, index: int, i: int) -> Extent:
        extend = self.scenario.steps[index].extend[i]
        request = self.requests[extend.request]
        file, path = self.scenario.file, f"steps[{index}].extend[{i}]"
        if any(extend.request == other.request for other in self.scenario.steps[index].extend[:i]):
            raise InvalidInput(
                "batch",
                expected="each request once",
                received=f"{extend.request} twice",
                where=Where(file=file, path=f"{path}.request"),
            )
        if not request.origins and extend.prefix:
            self._preload(request, extend.prefix)
        prefix = request.valid if extend.prefix is None else extend.prefix
        if prefix != request.valid:
            raise InvalidInput(
                "prefix",
                expected=f"{request.valid}, what earlier steps left",
                received=prefix,
                where=Where(file=file, path=f"{path}.prefix"),
                fix="Leave the prefix out after a request's first step.",
            )
        return Extent(prefix, extend.tokens)

    def _preload(self, request: _Request, prefix: int) -> None:
        """A prefix that nobody in the scenario wrote: a radix hit, on pages of any lane."""
        pages = num_pages(prefix, self.grid.page_size)
        request.pages = self.pool.take(self.random.integers(self.grid.world_size, size=pages))
        request.origins.append(Origin(0, prefix, request.number, write=0))

    def _turn(self, index: int, i: int, plan: Plan) -> Turn:
        extend, extent = self.scenario.steps[index].extend[i], plan.extents[i]
        request = self.requests[extend.request]
        lanes = new_page_lanes(plan, i).numpy()
        if self.scenario.placement == "scrambled":
            lanes = self.random.integers(self.grid.world_size, size=len(lanes))
        request.pages = torch.cat([request.pages, self.pool.take(lanes)])
        request.origins.append(Origin(extent.prefix, extent.end, request.number, write=index + 1))
        table = PageTable(request.pages, self.grid, extend.request)
        return Turn(extend.request, request.number, extent, plan.rotations[i], table, tuple(request.origins))


def build_case(scenario: Scenario) -> Case:
    """Work a scenario out. :class:`InvalidInput` names the step that makes no sense."""
    builder = _Builder(scenario)
    if scenario.format == "tag":
        formats = {Cache.KV: TAG, Cache.INDEX: TAG}
    else:
        formats = cache_formats(TINY, scenario.format)
    return Case(
        grid=builder.grid,
        split=scenario.split,
        formats=formats,
        forwards=tuple(builder.forward(i, step) for i, step in enumerate(scenario.steps)),
        local_pages=builder.local_pages,
        layers=scenario.layers,
        reading=Reading(scenario.view, scenario.prefetch),
        arithmetic=_arithmetic(scenario) if "attention" in scenario.checks else None,
        checks=frozenset(scenario.checks),
    )


def _arithmetic(scenario: Scenario) -> Arithmetic:
    """The tiny model, as the scenario wants it. Equal ids tie all logits of a row if no key is rotated."""
    return Arithmetic(
        shape=replace(
            TINY,
            layers=scenario.layers,
            top_k=scenario.top_k or TINY.top_k,
            index_rope=0 if scenario.ids == "equal" else TINY.index_rope,
        ),
        precision=scenario.format,
        transform=scenario.transform,
        ids=scenario.ids,
        seed=scenario.seed,
    )
