"""Who waits for whom when time is up: read off what each rank has called."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import refmodel.collectives
from refmodel.collectives import Call
from sim.diagnosis.sentence import ranks_text


@dataclass(frozen=True, slots=True)
class Standstill:
    """Why nothing moves.

    ``waits`` are ranks whose last call cannot end, as not all ranks of its group have come to it;
    ``awaited`` are the ranks that some wait for and that wait for nobody themselves.

    >>> def call(sequence, site):
    ...     return Call(sequence, site, "all_gather", (1,), "uint8", group="0", group_size=2, num_bytes=1)
    >>> before, after = call(0, "before"), call(1, "after")
    >>> print(find_standstill([[before], [before, after]]))
    rank 1 waits in #1 after: all_gather [1] uint8 on group 0; rank 0 has not come to it, its last call is #0 before: all_gather [1] uint8 on group 0
    """  # noqa: E501  # one line, as it is printed

    waits: dict[int, Call]
    awaited: dict[int, Call | None]  # with their last calls

    def __str__(self) -> str:
        if not self.waits:
            return "no rank waits in a collective that another has not come to"
        places: dict[Call, list[int]] = {}
        for rank, call in self.waits.items():
            places.setdefault(call, []).append(rank)
        parts = [f"{ranks_text(ranks)} {_wait(ranks)} in {call}" for call, ranks in places.items()]
        it = "it" if len(places) == 1 else "them"
        for rank, last in self.awaited.items():
            doing = "it has called nothing yet" if last is None else f"its last call is {last}"
            parts.append(f"rank {rank} has not come to {it}, {doing}")
        if not self.awaited:
            parts.append("each waits for another that waits elsewhere")
        return "; ".join(parts)


def find_standstill(ledgers: Sequence[Sequence[Call]], finished: Collection[int] = ()) -> Standstill:
    """Who waits and for whom, from the calls of all ranks in rank order.

    Calls of a smaller group are those of the ranks seen to call on it. A message from rank to rank waits for
    its peer alone, and is not judged here.
    """
    counts = [Counter(call.group for call in ledger if not call.is_message) for ledger in ledgers]
    waits: dict[int, Call] = {}
    behind: dict[int, list[int]] = {}
    for rank, ledger in enumerate(ledgers):
        if rank in finished or not ledger or ledger[-1].is_message:
            continue
        last = ledger[-1]
        everyone = last.group_size == len(ledgers)
        members = [other for other in range(len(ledgers)) if everyone or counts[other][last.group]]
        behind[rank] = [other for other in members if counts[other][last.group] < counts[rank][last.group]]
        if behind[rank] or len(members) < last.group_size:
            waits[rank] = last
    awaited = sorted({other for rank in waits for other in behind[rank]} - waits.keys())
    return Standstill(waits, {rank: ledgers[rank][-1] if ledgers[rank] else None for rank in awaited})


_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in ')
# What stands between a program and its group, and what runs it.
_SIM = Path(__file__).parent.parent
_PLUMBING = (
    f"{Path(torch.__file__).parent}/",
    *(f"{_SIM / room}/" for room in ("processes", "surface", "faults")),
    refmodel.collectives.__file__,
)
# Here a rank sleeps until a call is finished.
_WAITING = tuple(str(_SIM / "surface" / name) for name in ("group.py", "work.py"))
_STANDARD_LIBRARY = f"{Path(threading.__file__).parent}/"


def line_of_stack(text: str) -> str:
    """Where the program is, "ring.py:88", in a stack that ``faulthandler`` wrote; "" if it tells not."""
    _, current, stack = text.partition("Current thread ")
    for line in stack.splitlines() if current else ():
        frame = _FRAME.match(line)
        if frame is not None and not _is_plumbing(frame["file"]):
            return f"{Path(frame['file']).name}:{frame['line']}"
    return ""


def waits_by_stack(text: str) -> bool:
    """Whether the innermost frame of such a stack is where a call waits; else the program does something."""
    _, _, stack = text.partition("Current thread ")
    frames = (_FRAME.match(line) for line in stack.splitlines())
    innermost = next((frame["file"] for frame in frames if frame is not None), "")
    return innermost in _WAITING


def _is_plumbing(file: str) -> bool:
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return standard or file.startswith(_PLUMBING)


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
