"""Runs as a timeline in Chrome's trace event format, which https://ui.perfetto.dev opens.

A run is a process row, each of its ranks a track, each call a slice. An arrow goes through every meeting,
from the rank that came first to the one that came last, and from each send to its receive. Calls that are
under way at the same time lie on further tracks of their rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec

from sim.diagnosis.channels import find_channels
from sim.surface.recorder import Span

Event = dict[str, Any]

# Of one unit of a clock. A step of the schedule has no length; as a microsecond it is easy to read.
_MICROSECONDS = {"steps": 1.0, "ns": 1e-3}
# Slices without any length cannot carry an arrow.
_SHORTEST = 0.5


@dataclass(frozen=True, slots=True)
class Timed:
    """A run: its name, and the spans of each rank in rank order."""

    name: str  # "worked/tokens-1000 on lockstep:4"
    spans: Sequence[Sequence[Span]]
    clock: Literal["steps", "ns"]  # of lockstep; of processes


def timed_run(name: str, world: str, spans: Sequence[Sequence[Span]]) -> Timed:
    """A run on the world of that name, "lockstep:4"."""
    return Timed(f"{name} on {world}", spans, "steps" if world.startswith("lockstep") else "ns")


def write_timeline(path: Path, runs: Sequence[Timed]) -> None:
    """Write all runs into one file, one below the other."""
    path.write_bytes(as_timeline(runs))


def as_timeline(runs: Sequence[Timed]) -> bytes:
    """The file's bytes: JSON, an object with ``traceEvents``."""
    arrows = count(1)
    events = [event for process, run in enumerate(runs) for event in _events(process, run, arrows)]
    return msgspec.json.encode({"displayTimeUnit": "ns", "traceEvents": events}) + b"\n"


def _events(process: int, run: Timed, arrows: Iterator[int]) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, name=run.name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    first = min((span.begin for spans in run.spans for span in spans), default=0)
    unit = _MICROSECONDS[run.clock]
    slices: dict[tuple[int, int], Event] = {}
    for rank, spans in enumerate(run.spans):
        for span, lane in zip(spans, _lanes(spans), strict=True):
            track = rank + lane * len(run.spans)
            slices[rank, span.call.sequence] = _slice(process, track, span, first, unit)
    for track in sorted({slice_["tid"] for slice_ in slices.values()} | set(range(len(run.spans)))):
        lane, rank = divmod(track, len(run.spans))
        yield _metadata(
            "thread_name", process, track, name=f"rank {rank}" + ", at the same time" * bool(lane)
        )
        yield _metadata("thread_sort_index", process, track, sort_index=rank * len(run.spans) + lane)
    yield from slices.values()
    for name, path in _paths(run):
        yield from _arrow(name, [slices[end] for end in path], next(arrows))


def _slice(process: int, track: int, span: Span, first: int, unit: float) -> Event:
    call = span.call
    return {
        "ph": "X",
        "name": call.site,
        "cat": call.kind,
        "pid": process,
        "tid": track,
        "ts": (span.begin - first) * unit,
        "dur": max((span.end - span.begin) * unit, _SHORTEST * unit),
        "args": {
            "site": call.site,
            "kind": f"{call.kind} {call.detail}".rstrip(),
            "shape": list(call.shape),
            "dtype": call.dtype,
            "bytes": call.num_bytes,
            "sequence": call.sequence,
            "group": call.group,
        },
    }


def _lanes(spans: Sequence[Span]) -> Iterator[int]:
    """For each span the first lane that is free when it begins: 0 unless calls overlap."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    lanes = count()
    for span in spans:
        while busy and busy[0][0] <= span.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else next(lanes)
        heapq.heappush(busy, (max(span.end, span.begin + 1), lane))
        yield lane


def _paths(run: Timed) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What arrows connect: a name, and (rank, sequence) of each end."""
    meetings: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rank, spans in enumerate(run.spans):
        met: dict[str, int] = {}
        for span in spans:
            call = span.call
            if not call.is_message:
                turn = met[call.group] = met.get(call.group, -1) + 1
                meetings.setdefault((call.group, turn), []).append((rank, call.sequence))
    yield from (("meeting", ends) for ends in meetings.values())
    for channel in find_channels([[span.call for span in spans] for spans in run.spans]):
        for sent, received in zip(channel.sends, channel.receives, strict=False):
            yield "message", [(channel.source, sent.sequence), (channel.target, received.sequence)]


def _arrow(name: str, slices: list[Event], number: int) -> Iterator[Event]:
    """One flow through the slices: of a meeting as they begin, of a message from its send."""
    if len(slices) < 2:
        return
    path = slices if name == "message" else sorted(slices, key=lambda slice_: slice_["ts"])
    phases = ["s", *"t" * (len(path) - 2), "f"]
    time = path[0]["ts"]
    for phase, slice_ in zip(phases, path, strict=True):
        time = max(time, slice_["ts"])  # a receive may have begun before the send
        point = {"pid": slice_["pid"], "tid": slice_["tid"], "ts": time}
        # "e": to the slice that is there, not to the next one.
        binding = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, "name": name, "cat": name, "id": number} | point | binding


def _metadata(kind: str, process: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}
