"""Laws A5, H1, T5 in a service: outputs do not show where rows have been: host, file, transfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.catalogued import history_named
from properties.host_servers import Server, findings, first_request, longest_hit, servers
from properties.mutants import named_mutant
from properties.proofs import proves
from refmodel.storage.reuse import ViewPath
from sim.engine.landing import Landing
from sim.gate.runs import run_scenario
from sim.histories.history import After, History, Prefetch, Resend, Send, Spoil, Step, Submit
from sim.world import World

pytestmark = pytest.mark.filterwarnings("ignore::refmodel.errors.FallbackWarning")


@st.composite
def model_servers(draw: st.DrawFn) -> Server:
    """Those of a host cache, without a draft model; also without a view."""
    server = draw(servers())
    view = draw(st.sampled_from(ViewPath))
    return replace(server, options=server.options | {"model": True, "draft_layers": 0, "view": view})


@st.composite
def travelled(draw: st.DrawFn) -> History:
    """A request comes back by way of the host, or of files; goes to decode in chunks; and decodes there."""
    server = draw(model_servers())
    W, P = server.grid.world_size, server.grid.page_size
    pages = draw(st.integers(1, 5))
    tokens = pages * P + draw(st.integers(0, P - 1))
    prompt = draw(st.integers(1, 7 * P))
    shared = draw(st.integers(0, min(tokens, prompt)))
    usable, by_files = shared // P, draw(st.booleans())
    steps = first_request(server, tokens)
    if by_files:
        page = draw(st.integers(0, pages - 1))
        steps += [*server.empty(host=True), Step(spoil=Spoil("a", page, "index", "corrupt"))]
        steps += [Step(prefetch=Prefetch("a", pages))]
        usable = min(usable, page)
    hit = longest_hit(usable, prompt, server)
    steps += [Step(submit=Submit("b", prompt, "a", shared), expect=After(valid={"b": hit}))]
    if hit and draw(st.booleans()):
        steps += [Step(send=Send("b"))]  # while it loads
    lost = draw(st.lists(st.integers(0, W - 1), max_size=W, unique=True))
    steps += [Step(forward=["b"]), Step(send=Send("b", lose=tuple(lost)))]
    steps += [Step(resend=Resend("b", lost))] if lost else []
    steps += [Step(submit=Submit("c", 3 * P)), Step(forward=["c"]), Step(abort="c")]
    steps += [Step(decode=["b"])] * draw(st.integers(1, P + 1))
    return server.history([*steps, Step(finish="b")], storage=by_files)


@proves("A5", "H1", "H3", "H4", "T5")
@settings(max_examples=40)
@given(travelled())
def test_outputs_do_not_show_where_rows_have_been(history: History) -> None:
    assert not findings(history)


@st.composite
def moved(draw: st.DrawFn) -> History:
    """Whole lanes land in other lanes, and each rank attends to what it has."""
    server = draw(model_servers())
    W, P = server.grid.world_size, server.grid.page_size
    options = {"pages_per_lane": 4, "rotate": False, "load_anywhere": True, "chunk": P}
    server = replace(server, options=server.options | options)
    pages = draw(st.integers(1, 3))
    tokens, taken = pages * P + 1, draw(st.integers(1, 3))
    hit = longest_hit(pages, tokens, server)
    steps = [
        Step(submit=Submit("a", tokens)),
        *[Step(forward=["a"])] * (pages + 1),
        Step(finish="a"),
        *server.empty(),
        Step(submit=Submit("c", taken * P)),
        *[Step(forward=["c"])] * taken,  # chunks of one page: all of lane 0
        Step(
            submit=Submit("b", tokens, "a", tokens),
            expect=After(valid={"b": hit if W > 1 or pages <= 4 - taken else 0}),
        ),
        *[Step(forward=["b"])],
        Step(send=Send("b", tokens=hit or P)),
    ]
    return server.history(steps)


@proves("A5", "A6", "H4", "O1")
@settings(max_examples=20)
@given(moved())
def test_outputs_do_not_show_which_lane_rows_were_loaded_into(history: History) -> None:
    assert not findings(history)


# -- faults ----------------------------------------------------------------------------------------------

EXPOSED = {
    "hostcache/model-loaded-back": (
        *("one-token-a-page", "loaded-to-the-page-it-left", "host-04", "host-07"),
        *("index-read-unwaited", "prefetched-before-it-is-loaded"),
    ),
    "hostcache/model-loaded-into-other-lanes": ("host-06",),
    "hostcache/model-from-storage-with-a-bad-file": ("one-token-a-page", "storage-asked-for-kv", "host-07"),
    "transfer/a-model-with-a-lost-message": ("read-by-position", "one-signal-suffices", "opened-pages-leak"),
    "transfer/a-model-from-the-host-cache": (
        *("pd-01", "pd-02", "pd-07", "written-in-page-order", "read-by-position"),
        *("decode-forgets-what-came", "decode-writes-nothing"),
    ),
}


@pytest.mark.parametrize(("name", "mutant"), [(n, mutant) for n, ids in EXPOSED.items() for mutant in ids])
def test_outputs_and_rows_show_a_fault_on_the_way(name: str, mutant: str) -> None:
    history = history_named(name)
    with World.lockstep(history.world_size) as world, named_mutant(mutant).in_place():
        assert not run_scenario(history, world).held


def test_a_wrong_row_on_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one element, as decode holds it."""
    history = history_named("transfer/a-model-with-a-lost-message")
    right = Landing.compare

    def spoiled(self: Landing, *args: object) -> None:
        self.layers[1][next(iter(self.layers[1]))].pages[2, 7] ^= 1
        right(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Landing, "compare", spoiled)
    with World.lockstep(2) as world:
        finding = run_scenario(history, world).findings[0]
    assert (finding.law, finding.what) == ("T5", "1 of 22 rows on decode, first, on ranks 0, 1")
    assert finding.expected == "token 4 of request a, as the oracle computes it"
    assert (finding.where.layer, finding.where.cache, finding.where.position) == (1, "kv", 4)
