"""Laws H1–H5 in the engine: what comes back from the host and from storage is what went there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.mutants import named_mutant
from properties.proofs import proves
from refmodel.errors import FallbackWarning, Finding
from refmodel.layout.geometry import Grid
from refmodel.layout.split import Split
from refmodel.serving.host_layouts import FITTING, CopyEngine, HostLayout
from refmodel.serving.write_policy import WritePolicy
from refmodel.storage.reuse import ViewPath
from sim.cases.library import load_scenario
from sim.engine.engine import Engine
from sim.engine.play import apply
from sim.engine.shelf import Shelf
from sim.gate.histories import REFUSAL, try_history
from sim.gate.runs import run_scenario
from sim.histories.history import (
    After,
    Backup,
    DropHost,
    Evict,
    History,
    HostCacheName,
    Prefetch,
    Spoil,
    Step,
    Submit,
)
from sim.world import World

PLENTY = 64  # pages of a lane where none is ever short


@dataclass(frozen=True, slots=True)
class Server:
    """Settings of a history, as far as these properties draw them."""

    grid: Grid
    options: dict[str, object]

    def history(self, steps: Sequence[Step], **more: object) -> History:
        settings_of_it = {"pages_per_lane": PLENTY, "host_pages_per_lane": PLENTY} | self.options | more
        return History(
            title="drawn",
            why="drawn",
            laws=["H1"],
            world_size=self.grid.world_size,
            page_size=self.grid.page_size,
            history=list(steps),
            **settings_of_it,  # type: ignore[arg-type]
        )

    @property
    def pages_per_lane(self) -> int:
        return int(str(self.options.get("pages_per_lane", PLENTY)))

    def empty(self, *, host: bool = False) -> Iterator[Step]:
        """Every page that nobody uses leaves the device, or the host."""
        for lane in range(self.grid.world_size):
            whole_lane = Evict(lane, self.pages_per_lane)
            yield Step(drop_host=DropHost(lane, PLENTY)) if host else Step(evict=whole_lane)


ENGINES = [(layout, engine) for engine in CopyEngine for layout in FITTING[engine]]


@st.composite
def servers(draw: st.DrawFn) -> Server:
    """Small ones of all kinds, with room for everything."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    layout, engine = draw(st.sampled_from(ENGINES))
    options: dict[str, object] = {
        "hit": draw(st.sampled_from(["token", "page"])),
        "split": draw(st.sampled_from([Split.PAGE_ALIGNED, Split.TOKEN_BALANCED])),
        "view": draw(st.sampled_from([ViewPath.FULL, ViewPath.CURRENT, ViewPath.PARTIAL])),
        "prefetch": draw(st.booleans()),
        "layers": draw(st.integers(1, 2)),
        "draft_layers": draw(st.integers(0, 1)),
        "host_layout": layout,
        "copy_engine": engine,
        "rotate": draw(st.booleans()),
    }
    return Server(grid, options)


def findings(history: History) -> list[Finding]:
    """What is wrong, but for steps that were refused: what is drawn does not know which those are."""
    with World.lockstep(history.world_size) as world:
        verdict = try_history(world, history)
    return [finding for finding in verdict.findings if finding.law != REFUSAL]


# -- how much comes back ---------------------------------------------------------------------------------


def longest_hit(whole_pages: int, prompt: int, server: Server) -> int:
    """Tokens hit, if so many first pages of a prompt are there: one token is left to compute (L4)."""
    P = server.grid.page_size
    if server.options["hit"] == "page":
        return min(whole_pages, (prompt - 1) // P) * P
    return min(whole_pages * P, prompt - 1)


def first_request(server: Server, tokens: int) -> list[Step]:
    """It has been and gone, and the device has forgotten it."""
    life = [Step(submit=Submit("a", tokens)), Step(forward=["a"]), Step(finish="a")]
    return [*life, *server.empty()]


def second_request(tokens: int, shared: int, hit: int) -> list[Step]:
    """It shares so many tokens, and must hit so many of them."""
    submit = Step(submit=Submit("b", tokens, "a", shared), expect=After(valid={"b": hit}))
    return [submit, Step(forward=["b"]), Step(decode=["b"]), Step(finish="b")]


@proves("H1", "H4", "H5")
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


# -- under pressure --------------------------------------------------------------------------------------


@st.composite
def crowded(draw: st.DrawFn) -> History:
    """A server with too little room everywhere, and any operations, some of which make no sense."""
    drawn = draw(servers())
    server = replace(drawn, options=drawn.options | {"pages_per_lane": draw(st.integers(4, 8))})
    lengths: dict[str, int] = {}
    steps = [step for _ in range(draw(st.integers(3, 12))) for step in _some_steps(draw, server, lengths)]
    P = server.grid.page_size
    return server.history(
        steps,
        host_pages_per_lane=draw(st.integers(2, 6)),
        write_policy=draw(st.sampled_from([WritePolicy.WRITE_THROUGH, *WritePolicy])),
        load_anywhere=draw(st.booleans()),
        storage=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, None, P, 2 * P])),
    )


# What happens: a request is served, or one comes back after the device has forgotten it, and so on.
KINDS = ("served", "served", "returns", "returns", "returns", "waits", "runs", "host", "host", "leaves")


def _some_steps(draw: st.DrawFn, server: Server, lengths: dict[str, int]) -> list[Step]:
    """One thing that happens; ``lengths`` of the prompts so far."""
    kind = draw(st.sampled_from(KINDS))
    if kind in ("served", "waits") or not lengths:
        name, submit = _submitted(draw, server, lengths)
        return [submit, *(_run(draw, name) if kind == "served" else [])]
    name = draw(st.sampled_from(list(lengths)))
    if kind == "returns":
        again = f"r{len(lengths)}"
        tokens = lengths[again] = lengths[name] + draw(st.integers(0, 2))
        submit = Step(submit=Submit(again, tokens, name, lengths[name]))
        before = draw(st.sampled_from([[], *_losses(draw, server, name)]))
        meanwhile = draw(st.sampled_from([[], [], list(server.empty(host=True))]))
        return [*server.empty(), *before, submit, *meanwhile, *_run(draw, again)]
    if kind == "runs":
        return [draw(st.sampled_from([Step(forward=[name]), Step(decode=[name])]))]
    if kind == "leaves":
        return [draw(st.sampled_from([Step(finish=name), Step(abort=name)]))]
    return [draw(st.sampled_from(_of_the_host(draw, server, name)))]


def _losses(draw: st.DrawFn, server: Server, name: str) -> list[list[Step]]:
    """What the host may have lost of a request, and got back from storage."""
    lane, pages = draw(st.integers(0, server.grid.world_size - 1)), draw(st.integers(1, 4))
    lost, back = Step(drop_host=DropHost(lane, pages)), Step(prefetch=Prefetch(name, pages))
    return [[lost], [lost, back], [*server.empty(host=True), back]]


def _run(draw: st.DrawFn, name: str) -> list[Step]:
    """So many chunks, or not even one; then it leaves, if it can."""
    chunks = draw(st.sampled_from([4, 4, 1, 0]))
    return [*[Step(forward=[name])] * chunks, *[Step(finish=name)] * bool(chunks)]


def _submitted(draw: st.DrawFn, server: Server, lengths: dict[str, int]) -> tuple[str, Step]:
    """A prompt that often begins like another one, as far as it can."""
    name, tokens = f"r{len(lengths)}", draw(st.integers(1, 4 * server.grid.page_size + 1))
    like = draw(st.sampled_from(list(lengths))) if lengths else None
    most = min(tokens, lengths[like]) if like else 0
    lengths[name] = tokens
    return name, Step(submit=Submit(name, tokens, like, draw(st.just(most) | st.integers(0, most))))


def _of_the_host(draw: st.DrawFn, server: Server, name: str) -> list[Step]:
    P, page = server.grid.page_size, draw(st.integers(0, 3))
    lane = draw(st.integers(0, server.grid.world_size - 1))
    return [
        Step(drop_host=DropHost(lane, page + 1)),
        Step(drop_host=DropHost(lane, page + 1)),
        Step(backup=Backup(name, 0, (page + 1) * P)),
        Step(prefetch=Prefetch(name, page + 1)),
        Step(prefetch=Prefetch(name, page + 1, {"index": draw(st.integers(0, 4))})),
        Step(spoil=Spoil(name, page, "kv", "corrupt")),
    ]


@proves("H1", "H3", "H4", "H5")
@settings(max_examples=80)
@given(crowded())
def test_nothing_wrong_is_read_where_everything_is_short(history: History) -> None:
    assert not findings(history)


# -- storage ---------------------------------------------------------------------------------------------


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with closing(Shelf(rank=1)) as shelf:
        yield shelf


def test_a_file_says_whose_it_is_and_gives_back_what_was_put(shelf: Shelf) -> None:
    shelf.put(0xAB, "kv", b"twelve bytes")
    assert [path.name for path in shelf.folder.iterdir()] == ["00000000000000ab-1-kv.page"]
    assert shelf.get(0xAB, "kv", 12) == b"twelve bytes"
    shelf.put(0xAB, "kv", b"twelve other")
    assert shelf.get(0xAB, "kv", 12) == b"twelve other"


@pytest.mark.parametrize("how", ["lose", "truncate", "corrupt"])
def test_a_file_that_is_not_sound_is_a_miss_with_a_warning(shelf: Shelf, how: str) -> None:
    shelf.put(7, "index", bytes(range(64)))
    shelf.spoil(7, "index", how)
    with pytest.warns(FallbackWarning, match="0000000000000007-1-index.page is a miss"):
        assert shelf.get(7, "index", 64) is None


def test_a_file_under_the_name_of_another_page_is_a_miss(shelf: Shelf) -> None:
    shelf.put(7, "kv", bytes(8))
    shelf.path(7, "kv").rename(shelf.path(8, "kv"))
    with pytest.warns(FallbackWarning, match="its digest is another"):
        assert shelf.get(8, "kv", 8) is None


def test_files_are_gone_with_the_engine() -> None:
    shelf = Shelf(0)
    folder = Path(shelf.folder)
    shelf.put(1, "kv", b"x")
    shelf.close()
    assert not folder.exists()


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
