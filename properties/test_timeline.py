"""Timelines: what a viewer needs is there, and arrows join what met."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from refmodel.collectives import Call, all_gather_rows
from sim.surface.recorder import Span
from sim.timeline import Timed, as_timeline, timed_run, write_timeline
from sim.world import World

W = 3


def call_of(sequence: int, site: str, **other: Any) -> Call:
    return Call(sequence, site, "all_gather", (4, 2), "float32", "0", W, 32)._replace(**other)


def events_of(*runs: Timed) -> list[dict[str, Any]]:
    trace = json.loads(as_timeline(runs))
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert {event["ph"] for event in events} <= set("MXstf")
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    return events


def flows_of(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    return flows


def bound_to(point: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """The slice that the viewer attaches an arrow's end to."""
    (name,) = [
        slice_["name"]
        for slice_ in events
        if slice_["ph"] == "X"
        and (slice_["pid"], slice_["tid"]) == (point["pid"], point["tid"])
        and slice_["ts"] <= point["ts"] < slice_["ts"] + slice_["dur"]
    ]
    return str(name)


# Each rank comes two steps later than the one before it.
LOCKSTEP = Timed(
    "case on lockstep:3",
    [
        [Span(call_of(0, "kv.view"), 10 + 2 * rank, 20), Span(call_of(1, "index.view"), 30 - rank, 40)]
        for rank in range(W)
    ],
    "steps",
)


def test_a_run_is_a_process_and_each_rank_a_named_track() -> None:
    events = events_of(LOCKSTEP, LOCKSTEP)
    names = [
        (event["name"], event["pid"], event["tid"], event["args"]["name"])
        for event in events
        if event["ph"] == "M" and "name" in event["args"]
    ]
    for process in (0, 1):
        assert ("process_name", process, 0, "case on lockstep:3") in names
        for rank in range(W):
            assert ("thread_name", process, rank, f"rank {rank}") in names


def test_slices_say_when_and_what() -> None:
    slices = [event for event in events_of(LOCKSTEP) if event["ph"] == "X"]
    assert len(slices) == 2 * W
    second = next(slice_ for slice_ in slices if slice_["tid"] == 1 and slice_["name"] == "kv.view")
    assert (second["ts"], second["dur"], second["cat"]) == (2, 8, "all_gather")
    assert second["args"] == {
        "site": "kv.view",
        "kind": "all_gather",
        "shape": [4, 2],
        "dtype": "float32",
        "bytes": 32,
        "sequence": 0,
        "group": "0",
    }


def test_an_arrow_goes_through_each_meeting_from_the_first_to_the_last() -> None:
    events = events_of(LOCKSTEP, LOCKSTEP)
    flows = flows_of(events)
    assert len(flows) == 4  # two meetings in each of two runs: no number is used twice
    for flow in flows.values():
        assert [point["ph"] for point in flow] == ["s", "t", "f"]
        assert [point["ts"] for point in flow] == sorted(point["ts"] for point in flow)
        assert len({bound_to(point, events) for point in flow}) == 1
        assert flow[-1]["bp"] == "e"
    came = {bound_to(flow[0], events): [point["tid"] for point in flow] for flow in flows.values()}
    assert came == {"kv.view": [0, 1, 2], "index.view": [2, 1, 0]}


def test_wall_time_is_in_microseconds_from_the_first_call() -> None:
    spans = [[Span(call_of(0, "a"), 5_000_000, 5_250_000)], [], []]
    (slice_,) = [event for event in events_of(Timed("run", spans, "ns")) if event["ph"] == "X"]
    assert (slice_["ts"], slice_["dur"]) == (0, 250)


def test_calls_under_way_together_have_tracks_of_their_own() -> None:
    spans = [[Span(call_of(n, f"chunk {n}"), n, 10) for n in range(3)] + [Span(call_of(3, "last"), 11, 12)]]
    events = events_of(Timed("run", spans, "steps"))
    slices = [event for event in events if event["ph"] == "X"]
    assert [slice_["tid"] for slice_ in slices] == [0, 1, 2, 0]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 0, at the same time", "rank 0, at the same time"]


def test_an_arrow_goes_from_each_send_to_its_receive() -> None:
    sent = call_of(0, "ring", kind="send", detail="to 2 tag 7", is_message=True)
    received = call_of(0, "ring", kind="recv", detail="from 0 tag 7", is_message=True)
    spans = [[Span(sent, 5, 6)], [], [Span(received, 1, 9)]]  # it waits already
    events = events_of(Timed("run", spans, "steps"))
    ((start, end),) = flows_of(events).values()
    assert (start["tid"], end["tid"], start["name"]) == (0, 2, "message")
    assert start["ts"] <= end["ts"]
    assert bound_to(end, events) == "ring"


def test_a_call_without_length_can_carry_an_arrow() -> None:
    spans = [[Span(call_of(0, "a"), 3, 3)] for _ in range(W)]
    events = events_of(Timed("run", spans, "ns"))
    (flow,) = flows_of(events).values()
    assert [bound_to(point, events) for point in flow] == ["a"] * W


def test_runs_without_calls_and_no_runs_are_written_too(tmp_path: Path) -> None:
    write_timeline(tmp_path / "run.json", [Timed("quiet", [[], []], "steps")])
    assert len(json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]) == 6
    assert json.loads(as_timeline([]))["traceEvents"] == []


def two_calls(group: dist.ProcessGroup) -> None:
    for site in ("first", "second"):
        all_gather_rows(torch.zeros(2, 4), [2] * group.size(), group=group, site=site)


def check_real_run(world: World) -> None:
    events = events_of(timed_run("program", str(world), world.execute(two_calls).spans))
    slices = [event for event in events if event["ph"] == "X"]
    assert [(slice_["tid"], slice_["name"]) for slice_ in slices] == [
        (rank, site) for rank in range(W) for site in ("first", "second")
    ]
    flows = flows_of(events)
    assert sorted(bound_to(flow[0], events) for flow in flows.values()) == ["first", "second"]
    for flow in flows.values():
        # All are in the meeting when the last one comes to it.
        last = flow[-1]["ts"]
        met = [slice_ for slice_ in slices if slice_["name"] == bound_to(flow[0], events)]
        assert all(slice_["ts"] <= last <= slice_["ts"] + slice_["dur"] for slice_ in met)


@pytest.mark.parametrize("seed", range(5))
def test_a_lockstep_run_has_a_timeline(seed: int) -> None:
    check_real_run(World.lockstep(W, seed=seed))


@pytest.mark.gloo
def test_a_gloo_run_has_a_timeline(gloo_world: Callable[[int], World]) -> None:
    check_real_run(gloo_world(W))
