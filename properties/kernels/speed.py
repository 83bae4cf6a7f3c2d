"""How fast a kernel is: beside the reference, and beside a plain copy on the same machine in the same run.

Seconds depend on the machine; the share of what a copy moves a second does not, much. Before each call what
the last one left in the cache is overwritten, and inputs take turns, so that no call finds its input warm or
its last answer again. On a GPU the clock is the GPU's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
from rich.table import Table

from properties.kernels.cases.case import Case
from refmodel.ops.op import Cost
from sim.kernels.candidate import Candidate

ROUNDS = 20
WARM_UPS = 3  # the first call compiles
CLONES = 3  # inputs that take turns
MOST_SECONDS = 2.0  # for all rounds of one function; a slow one gets fewer
LEAST_ROUNDS = 3
CPU_CACHE = 64 << 20  # bytes; more than most have

Act = Callable[[int], object]  # of the number of a round


@dataclass(frozen=True, slots=True)
class Speed:
    """Median times of one case. *Bytes* and *flops* are what the operation needs at least."""

    op: str
    case: str
    device: str
    seconds: float
    reference_seconds: float
    bytes: int
    flops: int
    copy_rate: float  # bytes a second that a plain copy reads and writes here

    @property
    def byte_rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds

    @property
    def flop_rate(self) -> float:
        """Operations a second."""
        return self.flops / self.seconds

    @property
    def share(self) -> float:
        """Of the speed of a copy, 0 … 1: near 1, a kernel that only moves bytes cannot be faster."""
        return self.byte_rate / self.copy_rate

    @property
    def gain(self) -> float:
        """How many times as fast as the reference."""
        return self.reference_seconds / self.seconds


def speed(candidate: Candidate, case: Case, device: str) -> Speed:
    """Time a candidate on one case. It is called as it is in production: results into new tensors.

    A candidate that writes into its arguments writes into the same clone again; that costs what it costs
    the first time.
    """
    place = torch.device(device)
    op, given = case.op, case.arguments()
    clones = [{name: _there(value, place) for name, value in given.items()} for _ in range(CLONES)]
    outs = [
        tuple(torch.empty(space.shape, dtype=space.dtype, device=place) for space in op.spaces(**clone))
        for clone in clones
    ]
    cost: Cost = op.cost(**given)
    return Speed(
        op=op.name,
        case=repr(case),
        device=device_name(place),
        seconds=_timed(
            lambda turn: candidate.run(
                clones[turn % CLONES], outs[turn % CLONES] if candidate.needs_out else None
            ),
            place,
        ),
        reference_seconds=_timed(lambda turn: op.reference(**clones[turn % CLONES]), place),
        bytes=cost.bytes,
        flops=cost.flops,
        copy_rate=copy_rate(place),
    )


def largest(cases: Iterable[Case]) -> Case:
    """The case that moves most bytes: what is worth timing."""
    return max(cases, key=lambda case: case.op.cost(**case.arguments()).bytes)


def _there(value: object, device: torch.device) -> object:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``, or ``CPU, 2 threads``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


@cache
def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy far larger than the cache. Measured once a process."""
    size = 8 * _cache_bytes(device)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _timed(lambda turn: target.copy_(source), device)


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _timed(act: Act, device: torch.device) -> float:
    """Median seconds of a call."""
    for turn in range(WARM_UPS):
        act(turn)
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    cold = torch.empty(2 * _cache_bytes(device), dtype=torch.uint8, device=device)
    times: list[float] = []
    while len(times) < ROUNDS and (len(times) < LEAST_ROUNDS or sum(times) < MOST_SECONDS):
        cold.fill_(len(times))
        times.append(measure(act, len(times)))
    return median(times)


def _on_cpu(act: Act, turn: int) -> float:
    started = time.perf_counter()
    act(turn)
    return time.perf_counter() - started


def _on_gpu(act: Act, turn: int) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    act(turn)
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3


def speed_table(speeds: Iterable[Speed]) -> Table:
    """A line an operation; below it, on a CPU, that it means little."""
    found = list(speeds)
    device = found[0].device if found else ""
    rate = f", copy {found[0].copy_rate / 1e9:,.0f} GB/s" if found else ""
    note = "Of a CPU, times mean little: they say nothing of a GPU." if device.startswith("CPU") else None
    table = Table("operation", title=f"{device}{rate}", caption=note)
    for column in ("time", "reference", "gain", "GB/s", "of a copy", "GFLOP/s"):
        table.add_column(column, justify="right")
    for each in found:
        flops = f"{each.flop_rate / 1e9:,.0f}" if each.flops else ""
        table.add_row(
            each.op, duration(each.seconds), duration(each.reference_seconds), f"{each.gain:.1f} ×",
            f"{each.byte_rate / 1e9:,.1f}", f"{each.share:.0%}", flops,
        )  # fmt: skip
    return table


def duration(seconds: float) -> str:
    """
    >>> duration(0.0000123), duration(0.0123), duration(1.2)
    ('12 µs', '12.3 ms', '1.20 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
