"""Laws V3, V4, V5: views of current rows, of history and current rows, of history that came early."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import msgspec
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import reached
from properties.mutants.mutant import Right, mutant
from properties.proofs import proves
from properties.strategies import FORMATS, INDEX_FORMATS, MLA_FORMATS, Placed, placed
from refmodel.collectives import Call
from refmodel.errors import FallbackWarning
from refmodel.layout import ownership
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import to_physical
from refmodel.layout.split import Split
from refmodel.storage.formats import TAG, Format
from refmodel.storage.identity import PADDING_TAG, Cache, pack
from refmodel.storage.passage import open_passage
from refmodel.storage.reuse import FULL, Reading, ReadVerdict, ViewPath, join_history, read_verdict
from refmodel.storage.shard import Shard, destinations, empty_shard
from refmodel.storage.traffic import Traffic
from sim.cases.build import build_case
from sim.cases.scenario import Extend, Placement, Scenario, Step
from sim.serving.program import serve
from sim.world import Run, World

CURRENT, PARTIAL = Reading(ViewPath.CURRENT), Reading(ViewPath.PARTIAL)
EARLY = Reading(ViewPath.PARTIAL, prefetch=True)

Formats = Mapping[Cache, Format]
Views = list[dict[Cache, torch.Tensor]]  # of each layer

formats = st.sampled_from(
    [{Cache.KV: TAG, Cache.INDEX: TAG}]
    + [{Cache.KV: mla, Cache.INDEX: index} for mla, index in zip(MLA_FORMATS, INDEX_FORMATS, strict=True)]
)
schedules = st.integers(0, 9)
# Ranks run one after the other: a few examples of several runs each.
EXAMPLES = settings(max_examples=25)


# -- one forward of identities, on ranks -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A placed batch whose prefixes are in cache; events go to ``events`` where a test wants them."""

    batch: Placed
    formats: Formats
    layers: int
    events: list[tuple[int, str]] | None = None  # (rank, site of a call or "views")


def identities(layer: int, cache: Cache, request: int, start: int, stop: int) -> torch.Tensor:
    return pack(request=request, position=torch.arange(start, stop), layer=layer, cache=cache, write=0)


def truth(task: Task, layer: int, cache: Cache) -> torch.Tensor:
    """The packed rows of all valid tokens."""
    tags = [identities(layer, cache, i, 0, end) for i, end in enumerate(task.batch.valid)]
    return task.formats[cache].encode(torch.cat(tags))


def with_history(task: Task, rank: int, layer: int, cache: Cache) -> Shard:
    """A shard that holds the prefixes."""
    batch, row_format = task.batch, task.formats[cache]
    shard = empty_shard(batch.plan.grid, rank, row_format, batch.local_pages)
    for i, (table, extent) in enumerate(zip(batch.tables, batch.plan.extents, strict=True)):
        physical = to_physical(table.slots(torch.arange(extent.prefix)), rank, shard.grid)
        tags = identities(layer, cache, i, 0, extent.prefix)
        shard.write(destinations(physical, shard.num_slots, rank), row_format.encode(tags))
    return shard


def local_rows(task: Task, rank: int, layer: int, cache: Cache) -> torch.Tensor:
    """The packed rows that a rank computes."""
    plan = task.batch.plan
    spans = enumerate(plan.extents)
    tags = [identities(layer, cache, i, extent.prefix, extent.end) for i, extent in spans]
    batch = torch.cat([*tags, torch.full((plan.padding,), PADDING_TAG)])
    return task.formats[cache].encode(plan.take(batch, rank))


def one_forward(group: dist.ProcessGroup, task: Task, asked: Reading) -> tuple[Views, list[str]]:
    """The views of each layer, and what warned."""
    rank, batch = group.rank(), task.batch
    passage = open_passage(batch.plan, batch.tables, rank, local_pages=batch.local_pages, asked=asked)
    with warnings.catch_warnings(record=True) as heard:  # no collective in here: another rank would join in
        warnings.simplefilter("always")
        assert passage.warn() == len(heard)
    shards = tuple(
        {cache: with_history(task, rank, layer, cache) for cache in task.formats}
        for layer in range(task.layers)
    )
    traffic = Traffic(passage, shards, group)
    views: Views = []
    for layer in range(task.layers):
        rows = {cache: local_rows(task, rank, layer, cache) for cache in task.formats}
        views.append(traffic.views(layer, rows))
        if task.events is not None:
            task.events.append((rank, "views"))
    return views, [str(w.message) for w in heard if w.category is FallbackWarning]


def run(task: Task, asked: Reading, seed: int = 0) -> Run[tuple[Views, list[str]]]:
    world = World.lockstep(task.batch.plan.grid.world_size, seed=seed)
    if task.events is None:
        return world.execute(one_forward, task, asked)
    events = task.events
    return world.execute(one_forward, task, asked, watch=lambda rank, call: events.append((rank, call.site)))


def check_views(task: Task, done: Run[tuple[Views, list[str]]]) -> None:
    """Every rank has every row of every layer and cache."""
    for (views, _), (layer, cache) in product(done.results, product(range(task.layers), task.formats)):
        assert torch.equal(views[layer][cache], truth(task, layer, cache))


def sites(ledger: tuple[Call, ...]) -> list[str]:
    return [call.site.rpartition(".")[2] for call in ledger]


def keys(done: Run[tuple[Views, list[str]]]) -> list[list[object]]:
    return [[call.key for call in ledger] for ledger in done.ledgers]


# -- without ranks -----------------------------------------------------------------------------------------


@proves("V3", "V4", "V5")
@given(st.lists(st.sampled_from([0, 0, 1, 4, 7]), min_size=1, max_size=4), st.booleans())
def test_what_is_asked_for_and_what_is_cached_decide(prefixes: list[int], prefetch: bool) -> None:
    """From shared metadata alone: there is no rank in it (S8, V6)."""
    extents = [Extent(prefix, 3) for prefix in prefixes]
    verdicts = {path: read_verdict(Reading(path, prefetch), extents) for path in ViewPath}
    assert verdicts[ViewPath.FULL].path is ViewPath.FULL
    assert bool(verdicts[ViewPath.FULL].fallbacks) == prefetch
    if any(prefixes):
        assert verdicts[ViewPath.PARTIAL] == ReadVerdict(ViewPath.PARTIAL, prefetch)
        assert verdicts[ViewPath.CURRENT].path is ViewPath.FULL
        assert len(verdicts[ViewPath.CURRENT].fallbacks) == 1
    else:
        assert (
            verdicts[ViewPath.PARTIAL] == verdicts[ViewPath.CURRENT] == ReadVerdict(ViewPath.CURRENT, False)
        )


@proves("V4")
@given(placed(), st.sampled_from(FORMATS))
def test_the_cut_between_history_and_current_rows_is_at_the_token(batch: Placed, fmt: Format) -> None:
    task = Task(batch, {Cache.KV: fmt}, layers=1)
    extents, view = batch.plan.extents, truth(task, 0, Cache.KV)
    of_request = view.split([extent.end for extent in extents])
    pairs = list(zip(of_request, extents, strict=True))
    history = torch.cat([rows[: extent.prefix] for rows, extent in pairs])
    current = torch.cat([rows[extent.prefix :] for rows, extent in pairs])
    assert torch.equal(join_history(history, current, extents), view)


# -- V3: current-only --------------------------------------------------------------------------------------


@proves("V3")
@EXAMPLES
@given(placed(max_page=4, prefixed=False), formats, schedules)
def test_without_a_prefix_the_current_rows_are_the_view(batch: Placed, fmt: Formats, seed: int) -> None:
    reached.note(batch.plan)
    task = Task(batch, fmt, layers=2)
    full, current = run(task, FULL), run(task, CURRENT, seed)
    check_views(task, full)
    check_views(task, current)
    assert all(warned == [] or warned[0].startswith("gathered write") for _, warned in current.results)
    for ledger in current.ledgers:
        assert sites(ledger) == ["current"] * 4  # no pages: neither "view" nor "history"


@proves("V3")
@EXAMPLES
@given(placed(max_page=4, prefixed=False), schedules)
def test_slots_find_their_compact_rows(batch: Placed, seed: int) -> None:
    """The remap of current-only reuse: logical slots of a request to rows of the gathered tensor."""
    task = Task(batch, {Cache.KV: TAG}, layers=1)
    done = run(task, CURRENT, seed)
    passage = open_passage(batch.plan, batch.tables, 0, local_pages=batch.local_pages, asked=CURRENT)
    for views, _ in done.results:
        view = TAG.unpack(views[0][Cache.KV])[:, 0]
        for request, (table, valid) in enumerate(zip(batch.tables, batch.valid, strict=True)):
            rows = passage.view.compact(request).rows_of(table.slots(torch.arange(valid)))
            assert torch.equal(view[rows], identities(0, Cache.KV, request, 0, valid))


@proves("V3")
@settings(max_examples=15)
@given(placed(max_page=4, max_requests=2), formats)
def test_current_only_with_a_prefix_is_a_full_view_with_a_warning(batch: Placed, fmt: Formats) -> None:
    task = Task(batch, fmt, layers=1)
    done = run(task, CURRENT)
    check_views(task, done)
    prefixed = [f"request {i} " for i, extent in enumerate(batch.plan.extents) if extent.prefix]
    for (_, warned), ledger in zip(done.results, done.ledgers, strict=True):
        of_views = [text for text in warned if text.startswith("full view on all ranks: ")]
        assert len(of_views) == bool(prefixed)
        assert not prefixed or prefixed[0] in of_views[0]
        assert ("view" in sites(ledger)) == bool(prefixed)


# -- V4: partial -------------------------------------------------------------------------------------------


@proves("V4")
@EXAMPLES
@given(placed(max_page=4), formats, schedules)
def test_history_and_current_rows_make_the_view(batch: Placed, fmt: Formats, seed: int) -> None:
    reached.note(batch.plan)
    task = Task(batch, fmt, layers=1)
    full, partial = run(task, FULL), run(task, PARTIAL, seed)
    for (one, _), (other, warned) in zip(full.results, partial.results, strict=True):
        assert all(torch.equal(one[0][cache], other[0][cache]) for cache in fmt)
        assert not any(text.startswith("full view") for text in warned)
    check_views(task, partial)
    history = ["history"] * 2 if any(extent.prefix for extent in batch.plan.extents) else []
    assert all(sites(ledger) == [*history, "current", "current"] for ledger in partial.ledgers)


# -- V5: prefetch ------------------------------------------------------------------------------------------


@proves("V5")
@EXAMPLES
@given(placed(max_page=4, max_requests=2), formats, st.integers(2, 3), schedules, schedules)
def test_prefetch_changes_neither_bytes_nor_the_order_of_calls(
    batch: Placed, fmt: Formats, layers: int, one: int, other: int
) -> None:
    task = Task(batch, fmt, layers)
    late, early = run(task, PARTIAL, one), run(task, EARLY, other)
    check_views(task, late)
    check_views(task, early)
    assert keys(late) == keys(early)
    assert len(set(map(tuple, keys(early)))) == 1


@proves("V5")
@EXAMPLES
@given(placed(max_page=4, max_requests=2), st.integers(2, 3), st.booleans(), schedules)
def test_prefetched_history_is_under_way_before_the_views_are_handed_out(
    batch: Placed, layers: int, prefetch: bool, seed: int
) -> None:
    task = Task(batch, {Cache.KV: TAG}, layers, events=[])
    run(task, EARLY if prefetch else PARTIAL, seed)
    history = ["kv.history"] if any(extent.prefix for extent in batch.plan.extents) else []
    first, layer = [*history, "kv.current"], [*history, "kv.current", "views"]
    expected = layer * layers
    if prefetch:
        expected = first + [*history, "views", "kv.current"] * (layers - 1) + ["views"]
    for rank in range(batch.plan.grid.world_size):
        assert [event for who, event in task.events or () if who == rank] == expected


@proves("V5")
@settings(max_examples=15)
@given(placed(max_page=4, max_requests=2), schedules)
def test_a_full_view_cannot_be_prefetched_and_says_so(batch: Placed, seed: int) -> None:
    task = Task(batch, {Cache.KV: TAG}, layers=2)
    asked, plain = run(task, Reading(ViewPath.FULL, prefetch=True), seed), run(task, FULL)
    check_views(task, asked)
    assert keys(asked) == keys(plain)
    for (_, warned), (_, usual) in zip(asked.results, plain.results, strict=True):
        assert [text for text in warned if text.startswith("no prefetch: ")] == warned[len(usual) :]
        assert len(warned) == len(usual) + 1


# -- whole cases -------------------------------------------------------------------------------------------

# A request that comes back in the middle of a page, beside one that is new.
TWO_STEPS = Scenario(
    title="two steps",
    why="the second has a prefix",
    laws=["V3"],
    world_size=3,
    page_size=4,
    layers=2,
    steps=[
        Step(extend=[Extend(request="a", tokens=30)]),
        Step(extend=[Extend(request="b", tokens=9), Extend(request="a", tokens=17)]),
    ],
    file="two-steps.yaml",
)


def fallbacks(view: ViewPath, *, prefetch: bool = False) -> list[int]:
    """Of each rank, over both steps."""
    case = build_case(msgspec.structs.replace(TWO_STEPS, view=view, prefetch=prefetch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return [report.fallbacks for report in World.lockstep(3).run(serve, case)]


def test_every_rank_counts_its_fallbacks() -> None:
    unavoidable = fallbacks(ViewPath.FULL)  # writes that must be gathered, on every rank alike
    assert unavoidable == fallbacks(ViewPath.PARTIAL, prefetch=True)
    assert fallbacks(ViewPath.CURRENT) == [count + 1 for count in unavoidable]
    assert fallbacks(ViewPath.FULL, prefetch=True) == [count + 2 for count in unavoidable]


@proves("O1")
@settings(max_examples=15)
@given(
    st.sampled_from([ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL]),
    st.sampled_from(Split),
    st.sampled_from(["compute_owner", "scrambled"]),
    st.integers(2, 3),
)
def test_one_remap_a_forward_serves_all_caches_and_layers(
    view: ViewPath, split: Split, placement: Placement, layers: int
) -> None:
    case = build_case(
        msgspec.structs.replace(
            TWO_STEPS, view=view, split=split, placement=placement, layers=layers, checks=("identity",)
        )
    )
    remaps: list[int] = []

    def counted(right: Right, slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
        if len(slots):
            remaps.append(rank)
        remapped: torch.Tensor = right(slots, rank, grid)
        return remapped

    with mutant(ownership.to_physical, "counted", "O1")(counted).in_place(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        World.lockstep(3).run(serve, case)
    assert sorted(remaps) == [rank for rank in range(3) for _ in case.forwards]
