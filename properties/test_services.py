"""Traces through the serving engine: all is served, nothing leaks, and memory is that of live tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.command_line import cpkv, refused
from properties.mutants import named_mutant
from properties.test_trace import TRACES
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import ceil_div, num_pages
from sim.cases.service import Service, trace_service
from sim.cases.trace import BLOCK, Request, distinct_pages, generate_trace, read_trace
from sim.engine.driver import Driver
from sim.engine.engine import Engine
from sim.engine.play import attempt
from sim.engine.serve import Served, Tally
from sim.gate.services import percent, try_service
from sim.gate.verdict import Verdict
from sim.histories.history import History, Submit
from sim.world import World

SMALL = 5  # requests of a trace that a property serves


def _served(service: Service, seed: int = 0) -> Verdict[Served]:
    with World.lockstep(service.setting.world_size, seed=seed) as world:
        return try_service(world, service)


def _tally(service: Service) -> Tally:
    verdict = _served(service)
    assert verdict.findings == ()
    return verdict.said[0].tally


def _pool(requests: Sequence[Request], more: int, **sizes: Any) -> Service:
    """The smallest pool that is not refused, and so many percent more of the trace."""
    with pytest.raises(InvalidInput) as caught:
        trace_service(requests, pool=0.001, **sizes)
    least = float(caught.value.expected.split("at least ")[1].split("%")[0]) + 0.1
    return trace_service(requests, pool=least + more, **sizes)


@st.composite
def services(draw: st.DrawFn) -> Service:
    page_size = draw(st.sampled_from([32, 48, 64, 128]))
    return _pool(
        generate_trace(SMALL, seed=draw(st.integers(0, 99))),
        draw(st.sampled_from([0, 0, 10, 60])),
        world_size=draw(st.sampled_from([1, 2, 3, 4])),
        page_size=page_size,
        chunk=draw(st.sampled_from([page_size, 300, 1024])),
        every=draw(st.sampled_from([1, 7, 1000])),
    )


@given(services())
@settings(max_examples=5)
def test_every_request_is_served_and_nothing_stays(service: Service) -> None:
    tally = _tally(service)
    assert tally.requests + tally.dropped == SMALL
    found = tally.device_tokens + tally.host_tokens + tally.storage_tokens
    assert 0 <= found < tally.tokens <= sum(request.input_length for request in service.requests)
    setting = service.setting
    most = setting.world_size * setting.pages_per_lane * setting.page_size
    assert 0 < tally.peak_live_tokens <= most
    # 8 bytes a token in the tree, two times 8 for each request that runs.
    longest = max(request.input_length for request in service.requests) + service.decodes
    assert tally.peak_token_bytes <= 8 * most + 16 * service.window * longest


@given(services(), st.integers(1, 99))
@settings(max_examples=2)
def test_a_service_depends_on_no_schedule_of_ranks(service: Service, seed: int) -> None:
    one, other = _served(service), _served(service, seed)
    assert [each.digest for each in one.said] == [each.digest for each in other.said]
    assert [each.tally for each in one.said] == [each.tally for each in other.said]


def test_a_prompt_comes_back_from_wherever_it_is_left() -> None:
    """Ten prompts of 16 pages, one at a time: the device holds the last three, the host the last seven."""
    prompts = [Request(0.0, 2 * BLOCK, 1, [2 * i, 2 * i + 1]) for i in range(10)]
    sizes = {"world_size": 2, "page_size": 64, "pages_per_lane": 28, "chunk": 1024}
    setting = _setting(**sizes, host_pages_per_lane=60, storage=True)
    tallies = [
        _tally(Service([*prompts, prompts[again]], setting, 160, window=1, every=10)) for again in (9, 5, 0)
    ]
    found = [(each.device_tokens, each.host_tokens, each.storage_tokens) for each in tallies]
    whole = 2 * BLOCK - 1
    assert found == [(whole, 0, 0), (0, whole, 0), (0, 0, whole)]
    assert all(each.requests == 11 for each in tallies)
    # With its sampled token a prompt leaves 17 pages; of one that is still there, all are duplicates.
    assert [each.evicted_pages for each in tallies] == [170, 170 + 17, 170 + 17]


def test_the_youngest_waits_where_lanes_are_full() -> None:
    service = _pool(generate_trace(8), 0, world_size=2, page_size=16, chunk=512)
    tally = _tally(service)
    assert tally.returned > 0
    assert (tally.requests, tally.dropped) == (8, 0)


def test_a_request_that_gets_no_pages_even_alone_is_given_up() -> None:
    """Chunks of one page all go to the lane where the request begins, and one lane has too few."""
    setting = _setting(world_size=2, page_size=64, pages_per_lane=4, chunk=64)
    service = Service([Request(0.0, 320, 1, [1]), Request(0.0, 64, 1, [2])], setting, 6)
    tally = _tally(service)
    assert (tally.requests, tally.dropped) == (1, 1)


def _setting(**settings_: Any) -> History:
    return History(title="t", why="w", laws=["L1"], history=[], **settings_)


# -- what goes wrong is said, and ends the run on all ranks -------------------------------------------------


@pytest.mark.parametrize(
    "mutant_id",
    ["shared-tail-written", "duplicates-leak", "page-key-without-its-last-token"],
)
def test_a_wrong_engine_is_found(mutant_id: str) -> None:
    """With pages of 27, two prompts differ in the last token of a page; all of them meet inside a page."""
    lengths = ((600, 1), (1000, 1), (600, 2), (700, 1), (1000, 2))
    requests = [Request(0.0, tokens, 2, [0, block]) for tokens, block in lengths]
    setting = _setting(world_size=2, page_size=27, pages_per_lane=30, chunk=512)
    service = Service(requests, setting, 99, window=2, every=3)
    assert _served(service).findings == ()
    with named_mutant(mutant_id).in_place():
        assert _served(service).findings


def test_ranks_that_know_different_things_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(self: Engine) -> int:
        return int(self.tables.now > 5 and self.storage.rank == 1)

    def of_engine(engine: Engine) -> Callable[[], int]:
        return lambda: odd(engine)

    right = Engine.__init__

    def init(self: Engine, *given_: Any) -> None:
        right(self, *given_)
        monkeypatch.setattr(self.tables, "fingerprint", of_engine(self), raising=True)

    monkeypatch.setattr(Engine, "__init__", init)
    service = _pool(generate_trace(3), 50, world_size=3, page_size=64, chunk=512, every=4)
    (finding, *_) = _served(service).findings
    assert (finding.law, finding.received, finding.where.step) == ("L7", "another on ranks 1", 8)


# -- memory -----------------------------------------------------------------------------------------------


def _sizes(group: dist.ProcessGroup, service: Service) -> list[int]:
    """Bytes of the tables' whole state as each request leaves."""
    with closing(Engine(service.setting, 0, group)) as engine:
        driver, sizes = Driver(service, engine.tables), list[int]()
        steps = driver.steps()
        step = next(steps)
        while step.evict is None:
            done = attempt(engine, step) == (None, False)
            if step.finish is not None:
                sizes.append(len(pickle.dumps(engine.tables)))
            step = steps.send(done)
        return sizes


class _Unlike(Service):
    """The same, with prompts that others may be like."""

    def submit(self, number: int, name: str) -> Submit:
        return Submit(name, self.requests[number].input_length)


@pytest.mark.parametrize(("kind", "grows"), [(Service, False), (_Unlike, True)])
def test_tables_hold_what_is_live_however_many_requests_have_left(kind: type[Service], grows: bool) -> None:
    requests = [Request(0.0, 2 * BLOCK, 1, [2 * i, 2 * i + 1]) for i in range(60)]
    setting = _setting(world_size=1, page_size=64, pages_per_lane=100, chunk=1024)
    with World.lockstep(1) as world:
        (sizes,) = world.run(_sizes, kind(requests, setting, 0))
    full, later = sizes[20], sizes[50]  # 6 requests fill the pool
    names = 30 * 64  # bytes, of thirty
    assert (later - full > names) == grows


# -- sizes of pools ---------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 99), st.sampled_from([1, 16, 64, 100, 512, 600]))
def test_distinct_pages_are_those_of_all_beginnings(count: int, seed: int, page_size: int) -> None:
    """By brute force: whole pages by the blocks and the length up to them, tails one a request."""
    trace = generate_trace(count, seed)
    whole, tails = set(), 0
    for request in trace:
        for end in range(page_size, request.input_length + 1, page_size):
            whole.add((tuple(request.hash_ids[: ceil_div(end, BLOCK)]), end))
        tails += request.input_length % page_size > 0
    assert distinct_pages(trace, page_size) == len(whole) + tails


@given(st.integers(1, 8), st.integers(0, 99), st.integers(1, 4), st.floats(0.1, 150))
def test_a_pool_is_its_share_of_all_pages_or_refused(
    count: int, seed: int, world_size: int, pool: float
) -> None:
    trace = generate_trace(count, seed)
    longest = num_pages(max(request.input_length for request in trace), 64)
    try:
        service = trace_service(trace, world_size=world_size, page_size=64, pool=pool, chunk=512)
    except InvalidInput:
        assert distinct_pages(trace, 64) * pool / 100 < longest + world_size * (longest // 8 + 4)
        return
    pages = service.setting.pages_per_lane * world_size
    share = distinct_pages(trace, 64) * pool / 100
    assert share <= pages < share + world_size
    assert pages >= longest


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_serves_a_trace_and_its_replay_line_repeats_it(tmp_path: Path) -> None:
    report = tmp_path / "gate.json"
    result = cpkv(
        *("gate", "--trace", "embedded", "--requests", 6, "--cp", 2, "--pool", "70%"),
        *("--chunk", 512, "--every", 3, "--json", report, "--junit", tmp_path / "gate.xml"),
    )
    assert result.exit_code == 0, result.output
    assert "on the device" in result.output
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["theme"], run["world"], run["service"]["chunk"]) == ("trace", "lockstep:2", 512)
    again = cpkv(*run["replay"].split()[1:], "--json", report)
    assert again.exit_code == 0, again.output
    (repeated,) = json.loads(report.read_text())["runs"]
    for changing in ("seconds",):
        run.pop(changing), repeated.pop(changing)
    assert repeated == run
    assert (tmp_path / "gate.xml").read_text().count("<testcase") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pool", "25%"], "--trace FILE"),
        (["worked", "--chunk", "512"], "--trace FILE"),
        (["--trace", "embedded", "--chunk", "512"], "--pool 25%"),
        (["--trace", "embedded", "--every", "5"], "--pool 25%"),
        (["--trace", "embedded", "--pool", "25"], "a percentage such as 25%"),
        (["--trace", "embedded", "--pool", "0%"], "a percentage such as 25%"),
        (["--trace", "embedded", "--pool", "1%"], "the longest request needs"),
        (["--trace", "embedded", "--pool", "50%", "--chunk", "63"], "at least 64, a page"),
        (["--trace", "embedded", "--pool", "50%", "--rotation", "none"], "--rotation"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], said: str) -> None:
    assert said in refused("gate", *options)


@given(st.floats(0.01, 1000).map(lambda number: round(number, 2)))
def test_a_percentage_is_read_as_it_is_written(number: float) -> None:
    assert percent(f"{number}%") == number


def test_a_service_is_the_same_on_processes() -> None:
    result = cpkv(
        *("gate", "--trace", "embedded", "--requests", 4, "--pool", "90%", "--chunk", 512),
        *("--world", "lockstep:2", "--world", "gloo:2"),
    )
    assert result.exit_code == 0, result.output


def test_the_real_trace_is_served() -> None:
    file = TRACES / "conversation_trace.jsonl"
    if not file.is_file():
        pytest.skip("the trace of the FAST'25 paper is not here; CPKV_TRACES names its folder")
    requests = read_trace(file, limit=8)
    tally = _tally(_pool(requests, 10, world_size=4, page_size=64, chunk=8192, every=50))
    assert (tally.requests, tally.dropped) == (8, 0)
