"""Laws X1, H6, T6 in a service: settings that cannot work are refused at the start, on every rank alike."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.catalogued import HISTORIES, history_named
from properties.mutants import named_mutant
from properties.proofs import proves
from properties.strategies import grids
from refmodel.config import Backend
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid
from refmodel.serving.host_layouts import FITTING, CopyEngine, HostLayout
from sim.cases.library import parse_scenario
from sim.engine.start import Refusal, Started
from sim.gate.histories import judge_start, try_history
from sim.gate.runs import run_scenario
from sim.histories.history import History, Send, Step, Submit
from sim.histories.writing import history_file
from sim.picture.ledger_of_steps import ledger_of_steps
from sim.world import World

REFUSED = [history for history in HISTORIES if history.refused_at_start is not None]


@proves("X1", "H6", "T6")
@settings(max_examples=40)
@given(
    grids(max_world=4, max_page=4),
    st.none() | st.integers(1, 8),
    st.sampled_from(Backend),
    st.sampled_from(HostLayout),
    st.sampled_from(CopyEngine),
)
def test_a_server_starts_exactly_if_its_settings_go_together(
    grid: Grid, decode_page_size: int | None, backend: Backend, layout: HostLayout, engine: CopyEngine
) -> None:
    wrong = {
        "decode_page_size": decode_page_size not in (None, grid.page_size),
        "backend": backend is Backend.NIXL,
        "host_layout": layout not in FITTING[engine],
    }
    history = History(
        title="drawn",
        why="drawn",
        laws=["X1"],
        world_size=grid.world_size,
        page_size=grid.page_size,
        pages_per_lane=4,
        history=[Step(submit=Submit("a", 3)), Step(forward=["a"]), Step(send=Send("a")), Step(finish="a")],
        decode_page_size=decode_page_size,
        backend=backend,
        host_layout=layout,
        copy_engine=engine,
    )
    with World.lockstep(grid.world_size) as world:
        assert bool(try_history(world, history).findings) == any(wrong.values())
        first = next((key for key, is_wrong in wrong.items() if is_wrong), None)
        for key in wrong:
            refused = msgspec.structs.replace(history, refused_at_start=key)
            assert (not try_history(world, refused).findings) == (key == first)


@pytest.mark.parametrize("history", REFUSED, ids=lambda history: history.file)
def test_a_file_that_does_not_say_so_is_refused_before_anything_runs(history: History) -> None:
    text = history_file(msgspec.structs.replace(history, refused_at_start=None))
    with pytest.raises(InvalidInput) as refusal:
        parse_scenario(text, "mine.yaml")
    assert refusal.value.where.path == history.refused_at_start


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("pd-06", "incidents/pd-06-page-sizes-differ"),
        ("slicing-backend-let-in", "transfer/a-backend-of-slices"),
        ("engine-not-checked", "hostcache/direct-cannot-read-page-first"),
        ("engine-not-checked", "hostcache/kernel-cannot-read-page-first-direct"),
        ("layout-rewritten-at-start-up", "hostcache/direct-cannot-read-page-first"),
    ],
)
def test_a_server_that_starts_all_the_same_is_found(mutant: str, name: str) -> None:
    history = history_named(name)
    with World.lockstep(history.world_size) as world, named_mutant(mutant).in_place():
        (finding,) = run_scenario(history, world).findings
    assert (finding.law, finding.what) == ("X1", "start of the server")
    assert (finding.expected, finding.received) == (
        f"a refusal of {history.refused_at_start}",
        "none: it starts",
    )


def test_ranks_that_do_not_refuse_alike_are_found() -> None:
    history = history_named("transfer/a-backend-of-slices")
    refusal = Refusal("backend", "it slices")
    right = Started(refusal)
    assert not list(judge_start(history, [right, right]))
    for other in (None, Refusal("split", "it is round"), replace(refusal, text="another")):
        (finding,) = judge_start(history, [right, Started(other)])
        assert (finding.law, finding.where.rank) == ("X1", 1)


def test_show_says_why_it_does_not_start() -> None:
    (line,) = ledger_of_steps(history_named("transfer/a-backend-of-slices"))
    assert (line.step, line.operation, line.refused) == (0, "start", True)
    assert line.outcome.startswith("setting backend with shared_kv on: expected mooncake, got nixl")
