"""Traces: reading them, what a request finds in cache, and runs at full length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.proofs import proves
from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Extent, ceil_div
from refmodel.layout.ownership import owner
from sim.cases.trace import BLOCK, Request, Rotation, generate_trace, read_trace, trace_case, write_trace
from sim.gate.record import Entry
from sim.gate.setting import Setting
from sim.gate.traces import TraceRun, bytes_moved, run_trace
from sim.world import World

TRACES = Path(os.environ.get("CPKV_TRACES") or Path(__file__).parents[2] / "shared" / "traces")
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'


def _request(tokens: int, *blocks: int) -> Request:
    return Request(0.0, tokens, 1, list(blocks))


def _extents(*requests: Request, page_size: int = 64) -> list[Extent]:
    case = trace_case(requests, world_size=2, page_size=page_size).case
    return [forward.turns[0].extent for forward in case.forwards]


def _run(
    requests: Sequence[Request],
    world_size: int = 4,
    page_size: int = 64,
    rotation: Rotation = "none",
    seed: int = 0,
) -> Entry:
    run = TraceRun("hand-made", requests, f"lockstep:{world_size}", page_size, rotation, Setting(seed))
    with run.open_world() as world:
        return run_trace(run, world)[0]


# -- reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not JSON", "not JSON"),
        (GOOD.replace("600", "0"), "input_length"),
        (GOOD.replace("600", '"600"'), "input_length"),
        (GOOD.replace(', "hash_ids": [1, 2]', ""), "hash_ids"),
        (GOOD.replace("600", "1025"), "3 hash_ids for 1025 tokens"),
        (GOOD.replace("[1, 2]", "[]"), "2 hash_ids for 600 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(InvalidInput) as caught:
        read_trace(file)
    assert (caught.value.where.file, caught.value.where.line) == (str(file), 3)
    assert said in str(caught.value)


def test_lines_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\nnot JSON\n")
    assert len(read_trace(file, limit=2)) == 2


def test_a_trace_without_requests_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(InvalidInput, match=name):
            read_trace(tmp_path / name)


@given(st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_generated_trace_is_its_seed_and_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, requests: int, seed: int
) -> None:
    trace = generate_trace(requests, seed)
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(trace, file)
    assert generate_trace(requests, seed) == trace == read_trace(file)


def test_generated_traces_grow_turn_by_turn_and_differ_by_seed() -> None:
    first, second = generate_trace(100, 1), generate_trace(100, 2)
    assert first != second
    assert trace_case(first).hit_share > 0.3


# -- what a request finds in cache -------------------------------------------------------------------------


def test_a_repeated_request_leaves_one_token_to_compute() -> None:
    same = _request(2 * BLOCK, 1, 2)
    assert _extents(same, same, page_size=1)[1] == Extent(2 * BLOCK - 1, 1)


def test_a_hit_is_whole_pages() -> None:
    same = _request(600, 1, 2)
    assert _extents(same, same, page_size=64)[1] == Extent(576, 24)
    assert _extents(same, same, page_size=7)[1] == Extent(595, 5)
    assert _extents(same, same, page_size=1024)[1] == Extent(0, 600)


def test_a_hit_ends_with_the_tokens_that_its_writer_had() -> None:
    assert _extents(_request(600, 1, 2), _request(1500, 1, 2, 3))[1] == Extent(576, 924)


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    longer = _request(4 * BLOCK, 1, 2, 3, 4)
    assert _extents(longer, _request(4 * BLOCK, 1, 2, 9, 4))[1] == Extent(2 * BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("blocks", [(2, 1), (2, 3), (9, 2)], ids=str)
def test_a_block_seen_elsewhere_is_no_hit(blocks: tuple[int, ...]) -> None:
    assert _extents(_request(2 * BLOCK, 1, 2), _request(2 * BLOCK, *blocks))[1].prefix == 0


def test_a_block_is_known_by_what_stands_before_it() -> None:
    """Third and fourth share blocks 9, 2; the first wrote another 2, behind another block."""
    trace = [_request(2 * BLOCK, *blocks) for blocks in ((1, 2), (9, 3), (9, 2), (9, 2))]
    case = trace_case(trace, world_size=2, page_size=64).case
    _, _, third, fourth = (forward.turns[0] for forward in case.forwards)
    assert third.extent.prefix == BLOCK
    assert [origin.request for origin in fourth.origins] == [1, 2, 3]


def test_reused_pages_are_the_writers_own() -> None:
    case = trace_case([_request(700, 1, 2), _request(1000, 1, 5)], world_size=2, page_size=64).case
    first, second = (forward.turns[0].table.pages for forward in case.forwards)
    assert second[:8].tolist() == first[:8].tolist()
    assert not set(second[8:].tolist()) & set(first.tolist())


# -- runs --------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([7, 16, 64]))
ROTATIONS: st.SearchStrategy[Rotation] = st.sampled_from(["none", "least-full"])


@pytest.mark.parametrize("rotation", ["none", "least-full"])
@pytest.mark.parametrize("page_size", [7, 16, 64])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_a_trace_run_holds(world_size: int, page_size: int, rotation: Rotation) -> None:
    trace = generate_trace(12, seed=page_size)
    entry = _run(trace, world_size, page_size, rotation)
    assert entry.findings == []
    assert entry.trace is not None
    tokens = sum(request.input_length for request in trace)
    assert entry.trace.tokens == tokens
    assert entry.rows_checked == world_size * tokens
    assert (entry.trace.bytes_moved > 0) == (world_size > 1)


@proves("V1", "V7")
@given(SIZES, ROTATIONS, st.integers(0, 2**16))
@settings(max_examples=12)
def test_views_depend_neither_on_ranks_nor_on_page_ids(
    sizes: tuple[int, int], rotation: Rotation, seed: int
) -> None:
    world_size, page_size = sizes
    trace = generate_trace(6, seed=3)
    entry = _run(trace, world_size, page_size, rotation, seed)
    assert entry.digest == _run(trace, world_size=2, page_size=page_size).digest != ""


@proves("O6")
@given(SIZES, ROTATIONS, st.integers(0, 2**16))
@settings(max_examples=20)
def test_a_request_adds_its_share_of_pages_to_any_lane(
    sizes: tuple[int, int], rotation: Rotation, seed: int
) -> None:
    world_size, page_size = sizes
    trace = trace_case(
        generate_trace(15, seed), world_size=world_size, page_size=page_size, rotation=rotation
    )
    for forward in trace.case.forwards:
        turn = forward.turns[0]
        units = turn.extent.page_positions(page_size)
        lanes = owner(turn.table.pages[units.start :], world_size)
        assert int(lanes.bincount().max()) <= ceil_div(len(units), world_size)


def _imbalance(lengths: Sequence[int], world_size: int, rotation: Rotation) -> float:
    """Of requests that share nothing."""
    fresh = count()
    trace = [_request(n, *(next(fresh) for _ in range(ceil_div(n, BLOCK)))) for n in lengths]
    return trace_case(trace, world_size=world_size, rotation=rotation).imbalance


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 9))
def test_one_page_requests_fill_one_lane_unless_rotated(lengths: list[int], world_size: int) -> None:
    mean = len(lengths) / world_size
    assert _imbalance(lengths, world_size, "none") == pytest.approx(world_size)
    assert _imbalance(lengths, world_size, "least-full") == pytest.approx(
        ceil_div(len(lengths), world_size) / mean
    )


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("longest", [64, 320, 1500])
def test_rotation_evens_out_what_short_requests_skew(longest: int, world_size: int) -> None:
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, longest, 60).tolist()
        rotated = _imbalance(lengths, world_size, "least-full")
        assert rotated <= min(_imbalance(lengths, world_size, "none"), 1.1)


def test_the_cost_of_a_run_is_counted_from_its_ledgers() -> None:
    """Two pages on two ranks: each sends its page of 64 tokens of 8 bytes to the other."""
    entry = _run([_request(128, 1)], world_size=2)
    assert entry.trace is not None
    assert entry.collectives == 1
    assert entry.trace.bytes_moved == 2 * 64 * 8
    assert (entry.trace.bytes_fullest_rank, entry.trace.bytes_replicated) == (64 * 8, 128 * 8)
    assert bytes_moved([]) == 0


def test_progress_ticks_once_a_request() -> None:
    ticks: list[None] = []
    run = TraceRun("hand-made", generate_trace(5), "lockstep:3", 64, "none")
    with World.lockstep(3) as world:
        assert run_trace(run, world, lambda: ticks.append(None))[0].held
    assert len(ticks) == 5


def test_the_real_trace_holds() -> None:
    file = TRACES / "conversation_trace.jsonl"
    if not file.is_file():
        pytest.skip("the trace of the FAST'25 paper is not here; CPKV_TRACES names its folder")
    entry = _run(read_trace(file, limit=30), world_size=8)
    assert entry.findings == []
