"""Laws H1–H5 in the engine: what comes back from the host and from storage is what went there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.host_servers import (
    ENGINES,
    Server,
    findings,
    first_request,
    longest_hit,
    second_request,
    servers,
)
from properties.mutants import named_mutant
from properties.proofs import proves
from refmodel.layout.geometry import Grid
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import CopyEngine, HostLayout
from refmodel.serving.write_policy import WritePolicy
from sim.cases.library import load_scenario
from sim.engine.engine import Engine
from sim.engine.play import apply
from sim.gate.histories import try_history
from sim.gate.runs import run_scenario
from sim.histories.history import (
    Backup,
    DropHost,
    History,
    HostCacheName,
    Prefetch,
    Spoil,
    Step,
    Submit,
)
from sim.world import World


@settings(max_examples=50)
@given(servers(), st.sampled_from([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]), st.data())
def test_every_whole_page_comes_back_after_the_device_forgot_it(
    server: Server, policy: WritePolicy, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, 9 * server.grid.page_size))
    prompt = data.draw(st.integers(1, 10 * server.grid.page_size))
    shared = data.draw(st.integers(0, min(tokens, prompt)))
    hit = longest_hit(shared // server.grid.page_size, prompt, server)
    steps = [*first_request(server, tokens), *second_request(prompt, shared, hit)]
    assert not findings(server.history(steps, write_policy=policy))


@proves("H3", "H5")
@settings(max_examples=40)
@given(servers(), st.data())
def test_a_hit_ends_where_storage_lacks_any_cache_of_a_page(server: Server, data: st.DataObject) -> None:
    pages = data.draw(st.integers(1, 8))
    tokens = pages * server.grid.page_size
    caches: list[HostCacheName] = ["kv", "index"]
    caches += ["draft_kv", "draft_index"] if server.options["draft_layers"] else []
    spoils = data.draw(
        st.lists(
            st.builds(
                Spoil,
                st.just("a"),
                st.integers(0, pages - 1),
                st.sampled_from(caches),
                st.sampled_from(["lose", "truncate", "corrupt"]),
            ),
            max_size=2,
        )
    )
    wanted = data.draw(st.integers(1, pages))
    brought = min([wanted, *(spoil.page for spoil in spoils)])
    arrived = data.draw(st.dictionaries(st.sampled_from(caches), st.integers(0, pages), max_size=2))
    usable = min([brought, *arrived.values()])
    steps = [
        *first_request(server, tokens),
        *server.empty(host=True),
        *(Step(spoil=spoil) for spoil in spoils),
        Step(submit=Submit("c", tokens)),  # so that host pages hold something else
        Step(forward=["c"]),
        Step(abort="c"),
        *server.empty(),
        *server.empty(host=True),
        Step(prefetch=Prefetch("a", wanted, arrived)),
        *second_request(tokens + 1, tokens, longest_hit(usable, tokens + 1, server)),
    ]
    assert not findings(server.history(steps, storage=True))


@proves("H3", "H4")
@settings(max_examples=40)
@given(servers(), st.data())
def test_storage_fills_up_what_the_host_has_lost(server: Server, data: st.DataObject) -> None:
    pages = data.draw(st.integers(1, 8))
    tokens = pages * server.grid.page_size + 1
    lost = [
        Step(drop_host=DropHost(lane, count))
        for lane in range(server.grid.world_size)
        if (count := data.draw(st.integers(0, pages)))
    ]
    steps = [
        *first_request(server, tokens),
        *lost,
        Step(prefetch=Prefetch("a", pages)),
        *second_request(tokens, tokens, tokens - 1),
    ]
    assert not findings(server.history(steps, storage=True))


@proves("H4", "O1")
@settings(max_examples=30)
@given(servers(), st.data())
def test_a_load_lands_in_other_lanes_when_its_own_is_short(server: Server, data: st.DataObject) -> None:
    W, P = server.grid.world_size, server.grid.page_size
    room = data.draw(st.integers(3, 6))
    taken = data.draw(st.integers(1, room - 1))
    pages = data.draw(st.integers(1, max(1, min(room - 1, (W - 1) * taken))))
    server = replace(server, options=server.options | {"pages_per_lane": room, "rotate": False})
    tokens = pages * P + 1  # with chunks of one page, all are computed by rank 0
    steps = [
        Step(submit=Submit("a", tokens)),
        *[Step(forward=["a"])] * (pages + 1),
        Step(finish="a"),
        *server.empty(),
        Step(submit=Submit("c", taken * P)),
        *[Step(forward=["c"])] * taken,
        *second_request(tokens, tokens, tokens - 1 if W > 1 or pages <= room - taken else 0),
    ]
    assert not findings(server.history(steps, chunk=P, load_anywhere=True, split=Split.PAGE_ALIGNED))


@proves("H1")
@pytest.mark.parametrize("grid", [Grid(2, 4)], ids=str)
def test_layout_and_copy_engine_change_nothing_that_is_read(grid: Grid) -> None:
    steps = [*first_request(Server(grid, {}), 30), *second_request(33, 29, 28)]
    digests = set()
    for layout, engine in ENGINES:
        server = Server(grid, {"host_layout": layout, "copy_engine": engine, "layers": 3, "draft_layers": 2})
        with World.lockstep(2) as world:
            verdict = try_history(world, server.history(steps))
        assert not verdict.findings
        digests.add(verdict.digest)
    assert len(digests) == 1


# -- who has it ------------------------------------------------------------------------------------------


def files_of_a_rank(group: dist.ProcessGroup, history: History) -> list[str]:
    """Names of the files in this rank's storage after a history."""
    with closing(Engine(history, group.rank(), group)) as engine:
        for step in history.history:
            apply(engine, step)
        assert engine.hosting is not None
        assert engine.hosting.shelf is not None
        return [path.name for path in engine.hosting.shelf.folder.iterdir()]


@proves("H5")
@settings(max_examples=30)
@given(servers(), st.data())
def test_over_the_ranks_each_page_is_stored_once(server: Server, data: st.DataObject) -> None:
    P = server.grid.page_size
    tokens = data.draw(st.integers(1, 9 * P))
    more = data.draw(st.integers(1, 9 * P))
    shared = data.draw(st.integers(0, min(tokens, more)))
    steps = [*first_request(server, tokens), *second_request(more, shared, 0)]
    with World.lockstep(server.grid.world_size) as world:
        names = world.run(files_of_a_rank, server.history(steps, storage=True))
    parts = [name.removesuffix(".page").split("-") for of_rank in names for name in of_rank]
    times = Counter((key, cache) for key, _, cache in parts)
    pages = tokens // P + (more + 1) // P - shared // P  # the second request decodes one token more
    caches = 4 if server.options["draft_layers"] else 2
    assert set(times.values()) <= {1}
    assert len(times) == pages * caches
    assert all(int(part[1]) == rank for rank, of_rank in enumerate(names) for part in _parts(of_rank))


def _parts(names: Sequence[str]) -> list[list[str]]:
    return [name.split("-") for name in names]


# -- incidents, and what is refused ----------------------------------------------------------------------

INCIDENTS = (*(f"host-{number:02}" for number in range(1, 8)), "draft-02")


@pytest.mark.parametrize("incident", INCIDENTS)
def test_the_history_of_an_incident_exposes_it_and_holds_without_it(incident: str) -> None:
    (path,) = Path(str(files("scenarios"))).glob(f"incidents/{incident}-*.yaml")
    history = load_scenario(path)
    assert history.incident == incident
    with World.lockstep(history.world_size) as world:
        assert run_scenario(history, world).held
        with named_mutant(incident).in_place():
            assert not run_scenario(history, world).held


def test_storage_without_a_host_cache_is_refused() -> None:
    history = Server(Grid(1, 4), {}).history(
        [Step(submit=Submit("a", 3))], host_pages_per_lane=0, storage=True
    )
    with World.lockstep(1) as world, pytest.raises(Exception, match="off without a host cache"):
        world.run(files_of_a_rank, history)


def test_operations_of_a_host_cache_are_refused_without_one() -> None:
    steps = [Step(submit=Submit("a", 3)), Step(forward=["a"])]
    steps += [Step(drop_host=DropHost(0, 1), refused=True), Step(backup=Backup("a", 0, 2), refused=True)]
    history = Server(Grid(1, 2), {}).history(steps, host_pages_per_lane=0)
    with World.lockstep(1) as world:
        assert not try_history(world, history).findings


def test_a_layout_that_the_copy_engine_cannot_read_is_refused() -> None:
    server = Server(Grid(1, 2), {"host_layout": HostLayout.PAGE_FIRST, "copy_engine": CopyEngine.DIRECT})
    with World.lockstep(1) as world:
        (finding,) = try_history(world, server.history([Step(submit=Submit("a", 3))])).findings
    assert "layer_first or page_first_direct with copy engine direct" in str(finding)
