"""The model on several ranks: one result, whatever the path, format or placement (A5, A7, V2, V7, S6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from properties.strategies import Placed, place, placed
from properties.test_serving import scenarios
from refmodel.attention.transform import Transform
from refmodel.layout.ownership import owner, to_physical
from refmodel.layout.plan import Plan
from refmodel.model.batch import batch_rows
from refmodel.model.forward import Output, forward
from refmodel.model.model import Model, build_model
from refmodel.model.replicated import Replicated, replicated
from refmodel.model.shape import TINY
from refmodel.model.weights import seeded_weights
from refmodel.oracle import relative_error
from refmodel.precision import FP64_BUDGET
from refmodel.storage.formats import PRECISIONS
from refmodel.storage.passage import open_passage
from refmodel.storage.reuse import FULL, Reading, ViewPath
from refmodel.storage.shard import destinations, empty_shard
from refmodel.storage.write import WritePath
from sim.cases.arithmetic import Ids
from sim.cases.scenario import Expect, Extend, Format, Scenario, Step
from sim.gate.runs import run_scenario
from sim.world import World

EVERY_KEY = 1000  # a top_k that no drawn request reaches
READINGS = [
    FULL,
    *(Reading(path, prefetch=True) for path in (ViewPath.CURRENT, ViewPath.PARTIAL, ViewPath.NONE)),
]
EXAMPLES = settings(max_examples=20)
pytestmark = pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")


# -- all paths, enumerated ---------------------------------------------------------------------------------


PATHS: dict[str, dict[str, Any]] = {
    "direct write": {},
    "gathered write": {"placement": "scrambled"},
    "ragged": {"transform": Transform.RAGGED},
    "current-only": {"view": ViewPath.CURRENT},
    "partial": {"view": ViewPath.PARTIAL},
    "prefetch": {"view": ViewPath.PARTIAL, "prefetch": True},
    "no view": {"view": ViewPath.NONE},
}


def _two_chunks(world_size: int, precision: Format, **path: Any) -> Scenario:
    """Two requests in two chunks that meet inside a page, with padding rows, on two layers.

    Both heads of the second chunk lie where they are computed, so that direct write is possible: a's last
    page is of segment 2W − 1, of rank 0, and b, whose last page is of segment 1, is rotated by 1.
    """
    W, P = world_size, 4
    asked = path.get("view", ViewPath.FULL)
    gathered = path.get("placement") == "scrambled" and W > 1
    write = WritePath.GATHERED if gathered else WritePath.DIRECT
    first, second = {
        ViewPath.PARTIAL: (ViewPath.CURRENT, asked),
        ViewPath.CURRENT: (asked, ViewPath.FULL),
    }.get(asked, (asked, asked))
    return Scenario(
        title="two chunks",
        why="enumerated",
        laws=["A5"],
        world_size=W,
        page_size=P,
        steps=[
            Step([Extend("a", 2 * W * P - 1), Extend("b", P + 1)], 3, expect=Expect(write=write, view=first)),
            Step(
                [Extend("a", P + 2), Extend("b", 2 * P, rotation=1 % W)],
                W,
                expect=Expect(write=write, view=second),
            ),
        ],
        format=precision,
        layers=2,
        top_k=7,
        checks=("bytes", "isolation", "attention"),
        file="two chunks",
        **path,
    )


@proves("A5", "V1", "V3", "V4", "V5", "O5")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_path_gives_the_oracles_output_and_the_same_bits(world_size: int, precision: Format) -> None:
    digests = set()
    for name, path in PATHS.items():
        outcome = run_scenario(_two_chunks(world_size, precision, **path), World.lockstep(world_size))
        assert outcome.held, "\n".join([name, *map(str, outcome.findings)])
        if name != "no view":  # sums in another order
            digests.add(outcome.digest)
    assert len(digests) == 1


# -- whatever is drawn -------------------------------------------------------------------------------------


@proves("A5", "A2", "S9")
@EXAMPLES
@given(scenarios(attention=True), st.sampled_from(get_args(Ids)), st.integers(1, 14))
def test_ties_and_small_choices_give_the_oracles_output(scenario: Scenario, ids: Ids, top_k: int) -> None:
    """Equal ids tie all keys of a row, zeros leave nothing to choose by; a row may attend to one key."""
    scenario = msgspec.structs.replace(scenario, ids=ids, top_k=top_k)
    outcome = run_scenario(scenario, World.lockstep(scenario.world_size))
    assert outcome.held, "\n".join(map(str, outcome.findings))


# -- one forward, with a hand on ids, placement and poison -------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """A placed batch, the ids of its requests, and who runs them how."""

    placed: Placed
    ids: tuple[torch.Tensor, ...]  # [end] of each request
    model: Model
    asked: Reading

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    def outputs(self, poison: int | None = None) -> list[Output]:
        """Of each rank, over caches that hold what one rank computes of each prefix, and poison elsewhere."""
        prefixes = [
            replicated(self.model, ids[: extent.prefix])
            for ids, extent in zip(self.ids, self.plan.extents, strict=True)
        ]
        return World.lockstep(self.plan.grid.world_size).run(_serve, self, prefixes, poison)

    def with_token(self, request: int, position: int, token: int) -> Prompts:
        """The same batch with another id in one place."""
        ids = [row.clone() for row in self.ids]
        ids[request][position] = token
        return replace(self, ids=tuple(ids))


def _serve(
    group: dist.ProcessGroup, prompts: Prompts, prefixes: Sequence[Replicated], poison: int | None
) -> Output:
    model, plan, tables = prompts.model, prompts.plan, prompts.placed.tables
    pages = prompts.placed.local_pages
    passage = open_passage(plan, tables, group.rank(), local_pages=pages, asked=prompts.asked)
    shards = [
        {
            cache: empty_shard(plan.grid, group.rank(), f, pages, poison=poison)
            for cache, f in model.formats.items()
        }
        for _ in model.weights.layers
    ]
    for table, prefix in zip(tables, prefixes, strict=True):
        slots = table.slots(torch.arange(len(prefix.hidden)))
        physical = to_physical(slots, group.rank(), plan.grid)
        for layer, trace in zip(shards, prefix.layers, strict=True):
            for cache, shard in layer.items():
                shard.write(destinations(physical, shard.num_slots, group.rank()), trace.rows[cache])
    new = [ids[extent.prefix :] for ids, extent in zip(prompts.ids, plan.extents, strict=True)]
    return forward(group, model, batch_rows(passage, torch.cat(new), model.device), shards)


@st.composite
def prompts(draw: st.DrawFn, *, precisions: Sequence[str] = ("f64",), top_k: int = EVERY_KEY) -> Prompts:
    """One to three requests with random ids, with and without prefixes, read in any way."""
    batch = draw(placed(max_page=4))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    shape = replace(TINY, layers=draw(st.integers(1, 2)), top_k=top_k)
    return Prompts(
        batch,
        tuple(torch.randint(shape.vocab, (end,), generator=generator) for end in batch.valid),
        build_model(
            seeded_weights(shape, seed),
            draw(st.sampled_from(precisions)),
            transform=draw(st.sampled_from(Transform)),
        ),
        draw(st.sampled_from(READINGS)),
    )


def _bits(outputs: Sequence[Output]) -> torch.Tensor:
    """[ranks, bytes] of the last hidden rows."""
    return torch.stack([output.hidden.view(torch.uint8).flatten() for output in outputs])


def _influence(draw: Callable[..., Any], batch: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch rows that may see a drawn token, and those whose output another id there changes."""
    request = draw(st.integers(0, len(batch.ids) - 1), label="request")
    position = draw(st.integers(0, len(batch.ids[request]) - 1), label="position")
    token = int(batch.ids[request][position]) + draw(st.integers(1, TINY.vocab - 1), label="change")
    before = batch.outputs()[0].hidden
    after = batch.with_token(request, position, token % TINY.vocab).outputs()[0].hidden
    plan = batch.plan
    sees = (plan.request_of_row == request) & (plan.positions >= position)
    return sees[: plan.real_rows], (before != after).any(1)


@proves("A7")
@EXAMPLES
@given(prompts(), st.data())
def test_a_token_changes_exactly_the_rows_that_may_see_it(batch: Prompts, data: st.DataObject) -> None:
    """All keys are chosen: whoever may see the token does, and through any number of layers."""
    sees, changed = _influence(data.draw, batch)
    assert torch.equal(changed, sees)


@proves("A7")
@EXAMPLES
@given(prompts(top_k=3), st.data())
def test_a_token_changes_no_row_that_may_not_see_it(batch: Prompts, data: st.DataObject) -> None:
    """Few keys are chosen: a row that may see the token need not."""
    sees, changed = _influence(data.draw, batch)
    assert not bool((changed & ~sees).any())


@proves("V2")
@EXAMPLES
@given(prompts(precisions=PRECISIONS, top_k=5), st.integers(1, 254))
def test_what_nobody_wrote_changes_no_bit(batch: Prompts, poison: int) -> None:
    """Zeros, which are finite in every format, NaN, and anything else."""
    truth = _bits(batch.outputs(0x00))
    assert torch.equal(_bits(batch.outputs(0xFF)), truth)
    assert torch.equal(_bits(batch.outputs(poison)), truth)


@proves("V7")
@EXAMPLES
@given(prompts(precisions=PRECISIONS, top_k=5), st.integers(0, 2**16))
def test_other_pages_of_the_same_lanes_change_no_bit(batch: Prompts, seed: int) -> None:
    """Without a view, too: the keys of a rank stay the same, wherever it keeps them."""
    W = batch.plan.grid.world_size
    elsewhere = place(batch.plan, lambda request: owner(batch.placed.tables[request].pages, W), seed)
    assert torch.equal(_bits(batch.outputs()), _bits(replace(batch, placed=elsewhere).outputs()))


@proves("S6", "A5")
@EXAMPLES
@given(prompts())
def test_a_prefix_in_cache_gives_what_one_pass_over_everything_gives(batch: Prompts) -> None:
    outputs = batch.outputs()
    whole = [replicated(batch.model, ids).hidden for ids in batch.ids]
    truth = torch.cat([rows[e.prefix :] for rows, e in zip(whole, batch.plan.extents, strict=True)])
    assert torch.equal(_bits(outputs), _bits(outputs[:1]).expand(len(outputs), -1))
    assert relative_error(outputs[0].hidden.numpy(), truth.numpy()) <= FP64_BUDGET
